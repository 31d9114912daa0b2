"""The parts that an encoder-decoder such as T5 has in addition to those of a GPT. No torch.

These are relative positions and attention to the encoder's output. An encoder-decoder has two stacks of blocks, whose
sequences have different lengths. Every block of the decoder reads the encoder's output (`memory`). It therefore travels
with the decoder's activations from stage to stage, and its gradient returns the same way, summed over all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.spec.layout.params import Init, columns_of, rows_of
from meshwright.spec.model.gpt import core_saved, core_work
from meshwright.spec.model.linear import column_calls, row_calls, row_records
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kernels,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)

ENCODER, DECODER = "encoder", "decoder"  # the stacks, and the groups of ranks that hold their table of positions
MEMORY, DECODED = "memory", "decoded"  # the streams of the encoder's output and of the decoder
ALIGNED_KEYS = 16  # a row of the bias is padded to a multiple of this many elements


def relative_bucket(distance: int, both_ways: bool, buckets: int, farthest: int) -> int:
    """Return the bucket of a key that is `distance` positions after its query.

    Half of the buckets of a direction hold one distance each. The others grow logarithmically up to `farthest`. The
    computation uses integers only, so that rounding of a machine's logarithm can't move the edges of buckets.
    """
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    more, step = buckets - exact, 0
    # The largest step with (distance / exact) ^ more >= (farthest / exact) ^ step.
    while step + 1 < more and distance**more * exact ** (step + 1) >= farthest ** (step + 1) * exact**more:
        step += 1
    return first + exact + step


def padded_keys(keys: int) -> int:
    """Return the padded length of a row of the bias in memory. Kernels that add the bias to scores would copy rows of
    other lengths for every block."""
    return -(-keys // ALIGNED_KEYS) * ALIGNED_KEYS


@dataclass(frozen=True)
class RelativeBiasPart(Part):
    """A table with the bias that is added to the scores for each bucket of distances, cut over tp by heads.

    One table serves all blocks of its stack. Every stage that has some of these blocks holds a copy, and gradients are
    summed over the ranks of the `stack`. The bias of a micro-batch is one tensor for all blocks of a stage.
    """

    buckets: int
    farthest: int
    heads: int
    both_ways: bool
    stack: str
    init: Init

    @property
    def group(self) -> str:  # type: ignore[override]
        return self.stack

    def records(self, at: Coordinate, name: str) -> Records:
        axes = (self.group,) if at.size(self.group) > 1 else ()
        full = f"{name}.weight"
        weight = columns_of(
            full, self.buckets, self.heads, at.size("tp"), at.index("tp"), self.init, decay=False, partial=axes,
            copies=axes, tied=full,
        )  # fmt: skip
        return {"weight": weight}

    def _scores(self, at: Coordinate, batch: MicroBatch) -> int:
        return self.heads // at.size("tp") * batch.seq**2

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return Work(moved=2.0 * self._scores(at, batch) * batch.element, kernels=4)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the bias, which all blocks of the stage save, and the buckets of all distances. A decoder also saves
        its causal mask."""
        row = padded_keys(batch.seq)
        yield SavedTensor("bias", self.heads // at.size("tp") * batch.seq * row * batch.element)
        yield SavedTensor("buckets", 8 * (2 * batch.seq - 1) + (0 if self.both_ways else batch.seq * row))

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return 2.0 * self._scores(at, batch) * batch.element


@dataclass(frozen=True)
class CrossAttentionPart(Part):
    """Attention of a decoder's tokens to all tokens of the encoder's output, which has `seq` tokens per sample. It is
    cut over tp by heads.

    H stands for the bytes of the decoder's activations and E for those of the encoder's output.

    - Plain: forward 1 all_reduce of H; backward 1 all_reduce of H and 1 of E.
    - Split tokens: forward 1 all_gather of H and 1 of E, and 1 reduce_scatter of H; backward the two all_gathers again,
      1 reduce_scatter of H and 1 of E, and 1 all_gather of H.
    """

    hidden: int
    heads: int
    head_dim: int
    seq: int
    q_init: Init
    init: Init
    out_init: Init
    dropout: float = 0.0
    source: str = MEMORY

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.source,)

    def memory(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the sequence length of the encoder."""
        return replace(batch, seq=self.seq)

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        width, count = (self.head_dim, self.heads) if by_head else (self.heads * self.head_dim, 1)
        return {"q.weight": (width,) * count, "kv.weight": (width,) * 2 * count, "out.weight": (self.hidden,)}

    def records(self, at: Coordinate, name: str) -> Records:
        total = self.heads * self.head_dim
        rows = total // at.size("tp")
        first = at.index("tp") * rows
        both = ((first, rows, 0), (total + first, rows, rows))
        return {
            "q.weight": rows_of(f"{name}.q.weight", ((first, rows, 0),), total, (self.hidden,), self.q_init),
            "kv.weight": rows_of(f"{name}.kv.weight", both, 2 * total, (self.hidden,), self.init),
        } | row_records(at, name, "out", (self.hidden, total), self.out_init, False)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        heads = self.heads // at.size("tp")
        d = self.head_dim
        tokens = batch.tokens(at)
        products = (
            Product("cross q", tokens, heads * d, self.hidden),
            Product("cross kv", self.memory(batch).tokens(at), 2 * heads * d, self.hidden),
            Product("cross out", tokens, self.hidden, heads * d, scattered=True),
        )
        lengths = (batch.seq, self.seq)
        return Work(products) + core_work(batch, kernels, heads, d, lengths, float(batch.seq * self.seq), self.dropout)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        local = self.heads // at.size("tp") * self.head_dim
        yield from column_calls(at, batch, self.hidden, local)
        yield from column_calls(at, self.memory(batch), self.hidden, 2 * local)
        yield from row_calls(at, batch, self.hidden, local)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield queries, keys and values, the result, and the tensor that the core saves.

        The encoder's output is saved once for all blocks (see `Model.read_beside`).
        """
        heads = self.heads // at.size("tp")
        d = self.head_dim
        tokens = batch.tokens(at)
        e = batch.element
        keys = self.memory(batch).tokens(at)
        yield SavedTensor("attention output", tokens * heads * d * e)
        yield SavedTensor("cross qkv", (tokens + 2 * keys) * heads * d * e)
        # A CPU has no fused kernel with dropout. It processes tiles of queries, and saves nothing of the core.
        if not (kernels.fused_attention and kernels.host and self.dropout):
            yield core_saved(batch, kernels, tokens * heads, self.seq, self.dropout)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the gradients of keys and values, and of two gradients of the encoder's output: the sum
        so far, and this block's."""
        keys = self.memory(batch).tokens(at)
        return float(keys * (2 * self.heads // at.size("tp") * self.head_dim + 2 * self.hidden) * batch.element)


def t5_inits(factor: float, hidden: int, heads: int, head_dim: int, ffn: int) -> dict[str, Init]:
    """Return the initial values of T5's weights.

    They are scaled by 1 / sqrt(inputs) of each product, and smaller for queries, so that activations keep their size
    although attention does not scale its scores.
    """
    inner = heads * head_dim
    stds = {"q": hidden * head_dim, "in": hidden, "out": inner, "down": ffn, "table": 1}
    return {name: Init("normal", factor / math.sqrt(size)) for name, size in stds.items()}
