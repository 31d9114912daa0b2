"""The MLP of a block, computed for all tokens at once or in chunks of tokens. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.spec.layout.params import Init, rows_of
from meshwright.spec.model.linear import ZEROS, column_calls, row_calls, row_records
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kernels,
    LinearPieces,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)


@dataclass(frozen=True)
class MLPPart(Part):
    """The feed-forward part, cut over tp by its inner features."""

    kind: str  # gelu, gelu_tanh, quick_gelu, relu, or a gated one: swiglu, geglu, tanh_geglu, reglu
    hidden: int
    ffn: int
    init: Init
    out_init: Init
    bias: bool = False
    fuses: bool = True  # the activation may be fused with the second product, if kernels do that
    keeps_result: bool = True  # the activation's result is saved for the gradient of the second product's weight

    @property
    def is_gated(self) -> bool:
        return self.kind.endswith("glu")

    @property
    def is_swiglu(self) -> bool:
        """True if the activation is SwiGLU, which has its own operators (`nn/fused.py`)."""
        return self.kind == "swiglu"

    @property
    def first(self) -> str:
        """The name of the first projection. In a gated MLP it computes both the gate and the up projection."""
        return "gate_up" if self.is_gated else "up"

    def linears(self) -> tuple[LinearPieces, ...]:
        pieces = (("gate", self.ffn), ("up", self.ffn)) if self.is_gated else (("up", self.ffn),)
        return LinearPieces(self.first, "column", pieces), LinearPieces("down", "row", (("down", self.hidden),))

    def width(self, at: Coordinate) -> int:
        """Return the number of inner features of one tp rank."""
        return self.ffn // at.size("tp")

    def records(self, at: Coordinate, name: str) -> Records:
        width, key = self.width(at), self.first
        first = at.index("tp") * width
        parts: tuple[tuple[int, int, int], ...] = ((first, width, 0),)
        total = self.ffn
        # A gated MLP stacks gate and up in one weight, and tp cuts each of them.
        if self.is_gated:
            parts = (*parts, (self.ffn + first, width, width))
            total = 2 * self.ffn
        records = {f"{key}.weight": rows_of(f"{name}.{key}.weight", parts, total, (self.hidden,), self.init)}
        if self.bias:
            records[f"{key}.bias"] = rows_of(f"{name}.{key}.bias", parts, total, (), ZEROS, decay=False)
        return records | row_records(at, name, "down", (self.hidden, self.ffn), self.out_init, self.bias)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        f, tokens = self.width(at), batch.tokens(at)
        up = 2 * f if self.is_gated else f
        products = (
            Product("up", tokens, up, self.hidden, again=kernels.pieces > 1),
            Product("down", tokens, self.hidden, f, scattered=True, again=kernels.pieces > 1),
        )
        return Work(products, moved=float(tokens * (up + f) * batch.element), kernels=6)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        width = self.width(at)
        yield from column_calls(at, batch, self.hidden, 2 * width if self.is_gated else width)
        yield from row_calls(at, batch, self.hidden, width)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the tensors that the activation saves.

        A gated one saves both halves, the gate's activation and the result. SwiGLU saves only the halves if the next
        product recomputes the rest. Others save the activation's input and result, of which ReLU needs one. The
        uncompiled quick GELU also saves its sigmoid. In chunks of tokens, the tensors of one chunk exist at a time,
        while its backward runs.
        """
        copies: float = {"relu": 1.0, "quick_gelu": 2.0 if kernels.fused else 3.0}.get(self.kind, 2.0)
        if self.is_gated:
            copies = 2.0 if self._recomputes_swiglu(at, kernels) else kernels.gate_copies - (not self.keeps_result)
        elif not self.keeps_result:
            copies = max(1.0, copies - 1.0)
        rows = rows_of_chunk(batch.tokens(at), kernels.pieces)
        yield SavedTensor("mlp", rows * self.width(at) * batch.element * copies, passing=kernels.pieces > 1)

    def _recomputes_swiglu(self, at: Coordinate, kernels: Kernels) -> bool:
        """Return whether the second product recomputes SwiGLU in backward. It does not if it adds a bias itself."""
        return kernels.fused and self.fuses and self.is_swiglu and not (self.bias and at.size("tp") == 1)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the gradients of the widest tensors, and of SwiGLU's result if it is recomputed."""
        widths = 2
        if self.is_gated:
            widths = 3 if self._recomputes_swiglu(at, kernels) else 5
        return float(rows_of_chunk(batch.tokens(at), kernels.pieces) * self.width(at) * batch.element * widths)


def rows_of_chunk(tokens: int, chunks: int) -> int:
    """Return the number of tokens of each chunk except the last, which may have fewer."""
    return -(-tokens // chunks)
