"""The MLP of a block, sharded over tp by its inner features. On request it computes one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.nn.grid.sides import gather_input, gather_output_grad, scatter_input_grad, sum_output
from meshwright.nn.inputs import Inputs
from meshwright.nn.linear import Linear
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import piece_of_contribution
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.mlp import MLPPart, rows_of_chunk

Activation = Callable[[Tensor], Tensor]


def gated_activation(activation: Activation) -> Activation:
    """Return a gated activation: it splits its input into gate and up, and returns activation(gate) * up."""

    def product(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return product


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "geglu": gated_activation(F.gelu),
    "tanh_geglu": gated_activation(lambda x: F.gelu(x, approximate="tanh")),
    "reglu": gated_activation(F.relu),
}  # SwiGLU is in fused.py, since it can be fused with the product after it.


class MLP(nn.Module):
    """Two linear layers with an activation between them. In a gated MLP the first one computes both gate and up."""

    def __init__(self, parallel: Parallel, part: MLPPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.up, self.down = self.products(parallel, part.first, records)
        self.activation = None if part.is_swiglu else ACTIVATIONS[part.kind]
        self.chunks = parallel.recompute.pieces
        self.chunk = _TokenChunk(self)

    def products(self, parallel: Parallel, first: str, records: dict[str, ParamRecord]) -> tuple[Any, Any]:
        """Return both linear layers; `first` is the name of the first one's parameters."""
        up = Linear(parallel, records[f"{first}.weight"], records.get(f"{first}.bias"), "column")
        return up, Linear(parallel, records["down.weight"], records.get("down.bias"), "row")

    def forward(self, x: Tensor, norm: Norm, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return x, for the residual, and the MLP of norm(x). `inputs` is not used."""
        if self.chunks > 1:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            return x, self.down.add_bias(_InChunks.apply(norm(x), self, *trained))
        x, inner = self.up.after_norm(x, norm)
        return x, self._down(inner)

    def of(self, x: Tensor) -> Tensor:
        """Return the MLP of x, without a norm."""
        return self._down(self.up(x))

    def _down(self, inner: Tensor) -> Tensor:
        return self.down.after_swiglu(inner) if self.activation is None else self.down(self.activation(inner))

    @property
    def compiled_part(self) -> nn.Module:
        """The module to compile as one graph. The loop over chunks and its collectives stay outside the graph."""
        return self.chunk if self.chunks > 1 else self


class _TokenChunk(nn.Module):
    """This rank's part of the MLP of some tokens, without collectives."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down, self.activation = mlp.up, mlp.down, mlp.activation

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up.alone(x)
        if self.activation is None:
            return self.down.alone(inner, after_swiglu=True)
        return self.down.alone(self.activation(inner))


class _InChunks(torch.autograd.Function):
    """The MLP of all tokens, computed chunk by chunk; only x is saved for backward.

    Backward computes each chunk again, so inner features exist for only one chunk at a time. Tokens are gathered and
    outputs summed for all chunks at once, with the same collectives as without chunks. Weight gradients go to their
    sinks chunk by chunk, as one contribution. The gradients of `trained` parameters without a sink are summed here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: MLP, *trained: Tensor) -> Tensor:
        ctx.mlp = mlp
        ctx.save_for_backward(x, *trained)
        full = gather_input(x, mlp.up.sides)
        y = torch.empty_like(full)
        for at in _rows(full, mlp.chunks):
            y[at] = mlp.chunk(full[at])
        return sum_output(y, mlp.down.sides)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, *trained), mlp = ctx.saved_tensors, ctx.mlp
        grad = gather_output_grad(grad, mlp.down.sides)
        full = gather_input(x, mlp.up.sides, again=True)
        grad_x = torch.empty_like(full)
        rows = _rows(full, mlp.chunks)
        sums: list[Tensor | None] = [None] * len(trained)
        handles = (mlp.up.sinks.get("weight"), mlp.down.sinks.get("weight"))
        for at in rows:
            part = full[at].detach().requires_grad_()
            with torch.enable_grad():
                y = mlp.chunk(part)
            with piece_of_contribution(handles, last=at is rows[-1]):
                part_grad, *trained_grads = torch.autograd.grad(y, [part, *trained], grad[at], allow_unused=True)
            grad_x[at] = part_grad
            for number, new in enumerate(trained_grads):
                if new is not None:
                    before = sums[number]
                    sums[number] = new if before is None else before + new
            # Without this, they would still be in memory while the next chunk is computed.
            del y, part_grad, trained_grads
        return scatter_input_grad(grad_x, mlp.up.sides), None, *sums


def _rows(x: Tensor, chunks: int) -> list[slice]:
    size = rows_of_chunk(x.shape[0], chunks)
    return [slice(begin, begin + size) for begin in range(0, x.shape[0], size)]
