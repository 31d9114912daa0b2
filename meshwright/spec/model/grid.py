"""The parts of a GPT on a grid of tensor-parallel ranks. No torch.

Each wraps a part of a GPT, which gives its sizes, heads and names. The wrapper cuts it over the grid: it gives the
shard of each rank, and the communication between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from meshwright.errors import UserError
from meshwright.spec.layout.grid import GRID_AXES, STREAM, Grid
from meshwright.spec.model.context import context_calls
from meshwright.spec.model.gpt import (
    LOGIT_BYTES,
    AttentionPart,
    NormPart,
    OutputLayerPart,
    PositionEmbeddingPart,
    TokenEmbeddingPart,
)
from meshwright.spec.model.graph import Model
from meshwright.spec.model.grid_products import (
    GridProduct,
    along,
    cut_features,
    cut_weight,
    ends,
    held_by,
    inside_attention,
    rows_of_inner,
    vocabulary_rows,
    vocabulary_weight,
)
from meshwright.spec.model.loss_pieces import tile_counts, tile_rows
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import (
    SINGLE_RANK,
    BlockUnit,
    Collective,
    Coordinate,
    Kernels,
    MicroBatch,
    NamedPart,
    Part,
    Product,
    Records,
    SavedTensor,
    Unit,
    Work,
)


@dataclass(frozen=True)
class GridNormPart(Part):
    """A norm whose features are cut.

    Ranks that share a row exchange two numbers of it (RMS norm: one), and as many again for its gradient, in fp32 (in
    fp64 runs: fp64).
    """

    part: NormPart
    grid: Grid

    def records(self, at: Coordinate, name: str) -> Records:
        return {key: cut_features(record, at, STREAM) for key, record in self.part.records(SINGLE_RANK, name).items()}

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return self._own(at).work(at, batch, kernels)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of a norm, whose payloads are per row.

        Forward: 1 all_gather of each rank's mean and sum of squares (layer norm), or 1 all_reduce of the squares (RMS
        norm). Backward: 1 all_reduce of two numbers (layer norm) or of one (RMS norm).
        """
        rows = batch.rows(at) * batch.wide
        axis = STREAM.features
        size = at.size(STREAM.features)
        if self.part.facts.centred:
            yield Collective("forward", axis, "all_gather", 2 * rows * size)
            yield Collective("backward", axis, "all_reduce", 2 * rows)
        else:
            yield Collective("forward", axis, "all_reduce", rows)
            yield Collective("backward", axis, "all_reduce", rows)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the input, each row's statistics and, if the product after it saves it, the output."""
        rows = batch.rows(at)
        stream = rows * self._own(at).width * batch.element
        yield SavedTensor("input", stream)
        yield SavedTensor("statistics", self.part.facts.statistics * rows * batch.wide)
        if self.part.keeps_output and not self.grid.keeps and not self.part.fused_by(kernels):
            yield SavedTensor("output", stream)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the input, the normed input and a gradient in accumulation precision."""
        return 3.0 * batch.rows(at) * self._own(at).width * batch.wide

    def _own(self, at: Coordinate) -> NormPart:
        return replace(self.part, width=self.part.width // at.size(STREAM.features))


@dataclass(frozen=True)
class GridAttentionPart(Part):
    """Self-attention on a grid.

    The axis of the inner features cuts heads. The axes of the inner rows cut the micro-batch into whole sequences, or
    into parts of sequences if it has too few.
    """

    part: AttentionPart
    grid: Grid

    @property
    def products(self) -> tuple[GridProduct, GridProduct]:
        p = self.part
        q = p.heads * p.head_dim
        qkv = GridProduct("qkv", q + 2 * p.kv_heads * p.head_dim, p.hidden, self.grid.first, self.grid.keeps)
        return qkv, GridProduct("out", p.hidden, q, self.grid.second, self.grid.keeps)

    def _heads(self, at: Coordinate) -> Coordinate:
        return along(at, self.grid.inner.features)

    def records(self, at: Coordinate, name: str) -> Records:
        first, second, inner = self.grid.first, self.grid.second, self.grid.inner
        records: Records = {}
        for key, record in self.part.records(self._heads(at), name).items():
            if key == "qkv.weight":
                records[key] = cut_weight(record, at, first, whole=False)
            elif key == "qkv.bias" or (key.endswith("_norm.weight") and self.part.norms_tokens):
                records[key] = held_by(record, at, inner.rows)
            elif key.endswith("_norm.weight"):
                # One weight serves all heads, and every rank of the grid has some heads of some rows.
                records[key] = held_by(record, at, GRID_AXES)
        whole = self.part.records(SINGLE_RANK, name)
        records["out.weight"] = cut_weight(whole["out.weight"], at, second, whole=True)
        if "out.bias" in whole:
            records["out.bias"] = cut_features(whole["out.bias"], at, second.y)
        return records

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        inner = self.part.work(*inside_attention(at, batch, self.grid), kernels)
        own = tuple(product.work(at, batch) for product in self.products)
        return replace(inner, products=(*own, *(p for p in inner.products if not p.linear)))

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of both products and, if ranks share sequences, those for other ranks' keys and values."""
        for product in self.products:
            yield from product.collectives(at, batch)
        place, own = inside_attention(at, batch, self.grid)
        if self.part.norms_tokens:
            for phase in ("forward", "backward"):
                yield Collective(phase, self.grid.inner.features, "all_reduce", 2 * own.tokens(place) * batch.wide)
        for call in context_calls(place, own, *self.part.own_heads(place), self.part.core_dim):
            yield replace(call, axis=self.grid.sharing_axis)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        yield from self.part.saved(*inside_attention(at, batch, self.grid), kernels)
        for product in self.products:
            yield from product.gathered_tensors(at, batch)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        core = self.part.workspace(*inside_attention(at, batch, self.grid), kernels)
        return core + max(product.workspace(at, batch) for product in self.products)

    def core_backward(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return self.part.core_backward(*inside_attention(at, batch, self.grid), kernels)


@dataclass(frozen=True)
class GridMLPPart(Part):
    """The MLP on a grid. The axis of the inner features cuts its features, and the axes of the inner rows its rows."""

    part: MLPPart
    grid: Grid

    @property
    def products(self) -> tuple[GridProduct, GridProduct]:
        p, keeps = self.part, self.grid.keeps
        up = GridProduct("up", (2 if p.is_gated else 1) * p.ffn, p.hidden, self.grid.first, keeps)
        return up, GridProduct("down", p.hidden, p.ffn, self.grid.second, keeps)

    @property
    def _own(self) -> MLPPart:
        """The MLP as its memory is counted on a grid.

        It has no bias, because on a grid the second product can recompute SwiGLU even if there is a bias.
        """
        return replace(self.part, bias=False, keeps_result=not self.grid.keeps)

    def _width(self, at: Coordinate) -> Coordinate:
        return along(at, self.grid.inner.features)

    def records(self, at: Coordinate, name: str) -> Records:
        cut = self.part.records(self._width(at), name)
        whole = self.part.records(SINGLE_RANK, name)
        key = self.part.first
        records = {f"{key}.weight": cut_weight(cut[f"{key}.weight"], at, self.grid.first, whole=False)}
        if self.part.bias:
            records[f"{key}.bias"] = held_by(cut[f"{key}.bias"], at, self.grid.inner.rows)
        records["down.weight"] = cut_weight(whole["down.weight"], at, self.grid.second, whole=True)
        if self.part.bias:
            records["down.bias"] = cut_features(whole["down.bias"], at, self.grid.second.y)
        return records

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        inner = self.part.work(self._width(at), rows_of_inner(at, batch, self.grid), kernels)
        return replace(inner, products=tuple(product.work(at, batch) for product in self.products))

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        for product in self.products:
            yield from product.collectives(at, batch)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        yield from self._own.saved(self._width(at), rows_of_inner(at, batch, self.grid), kernels)
        for product in self.products:
            yield from product.gathered_tensors(at, batch)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        core = self._own.workspace(self._width(at), rows_of_inner(at, batch, self.grid), kernels)
        return core + max(product.workspace(at, batch) for product in self.products)


@dataclass(frozen=True)
class GridTokensPart(Part):
    """The token embedding on a grid. Its table is cut like the output layer's weight.

    The lookup is the reverse of the output layer's product: the table is gathered, and the rows that ranks have looked
    up in their parts of the vocabulary are summed and cut like the input x of that product.
    """

    part: TokenEmbeddingPart
    grid: Grid

    def records(self, at: Coordinate, name: str) -> Records:
        whole = self.part.records(ends(at), name)["weight"]
        return {"weight": vocabulary_weight(whole, at, self.grid.first)}

    def _sizes(self, at: Coordinate, batch: MicroBatch) -> tuple[int, int, int]:
        m, _, k = GridProduct("", 0, self.part.hidden, self.grid.first, False).sizes(at, batch)
        return m, vocabulary_rows(self.part.vocab, at, self.grid.first), k

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        m, n, k = self._sizes(at, batch)
        return Work(moved=float((4 * m * k + 2 * n * k) * batch.element), kernels=6)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of the lookup.

        Forward: 1 all_gather of the table and 1 reduce_scatter of the looked-up rows. Backward: the reverse.
        """
        m, n, k = self._sizes(at, batch)
        r = self.grid.first
        x = m * k * batch.element
        table = n * k * batch.element
        yield Collective("forward", r.weight, "all_gather", table)
        yield Collective("forward", r.gathered, "reduce_scatter", x)
        yield Collective("backward", r.gathered, "all_gather", x)
        yield Collective("backward", r.weight, "reduce_scatter", table)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the numbers of the looked-up rows and, with dropout, its mask."""
        m, _, _ = self._sizes(at, batch)
        yield SavedTensor("rows", 8 * m)
        if self.part.dropout:
            width = self.part.hidden // at.size(STREAM.features)
            yield SavedTensor("dropout mask", batch.rows(at) * width * (kernels.mask_bytes or batch.element))

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        m, n, k = self._sizes(at, batch)
        return float((2 * n * k + m * k) * batch.element)


@dataclass(frozen=True)
class GridPositionsPart(Part):
    """Learned positions on a grid, cut by features. Ranks with different rows hold copies."""

    part: PositionEmbeddingPart
    grid: Grid

    def records(self, at: Coordinate, name: str) -> Records:
        return {"weight": cut_features(self.part.records(SINGLE_RANK, name)["weight"], at, STREAM, dim=1)}

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        yield SavedTensor("positions", batch.rows(at) * 8)


@dataclass(frozen=True)
class GridOutputPart(Part):
    """The output layer and the cross entropy on a grid. Their gradients are computed in forward, one tile of logits at
    a time."""

    part: OutputLayerPart
    grid: Grid

    def records(self, at: Coordinate, name: str) -> Records:
        return {"weight": vocabulary_weight(self.part.records(ends(at), name)["weight"], at, self.grid.first)}

    def sizes(self, at: Coordinate, batch: MicroBatch) -> tuple[int, int, int]:
        m, _, k = GridProduct("", 0, self.part.hidden, self.grid.first, False).sizes(at, batch)
        return m, vocabulary_rows(self.part.vocab, at, self.grid.first), k

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        m, n, k = self.sizes(at, batch)
        own = m // at.size(self.grid.first.summed)
        return Work((Product("logits", m, n, k, precise=True, defers=False),), moved=own * n * LOGIT_BYTES, kernels=6)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of the product and the loss, all in forward.

        The factors are gathered once, and the logits and their gradient are communicated tile by tile. Each tile of C
        rows also has 1 all_reduce of C w and 1 of 2 C w bytes over the vocabulary for the loss, where w is 8 in fp64
        and otherwise 4. The sum of the losses is all-reduced over every axis that cuts rows.
        """
        m, n, k = self.sizes(at, batch)
        r, e = self.grid.first, batch.element
        yield Collective("forward", r.gathered, "all_gather", m * k * e)
        yield Collective("forward", r.weight, "all_gather", n * k * e)
        for rows, times in tile_counts(m, n, at.size(r.summed)):
            yield Collective("forward", r.summed, "reduce_scatter", rows * n * e, times)
            yield Collective("forward", r.summed, "all_gather", rows * n * e, times)
            own = rows // at.size(r.summed) * batch.wide
            yield Collective("forward", r.y.features, "all_reduce", own, times)
            yield Collective("forward", r.y.features, "all_reduce", 2 * own, times)
        yield Collective("forward", r.gathered, "reduce_scatter", m * k * e)
        yield Collective("forward", r.weight, "reduce_scatter", n * k * batch.wide)
        for axis in r.y.rows:
            yield Collective("forward", axis, "all_reduce", batch.wide)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the gradient of the local input and, if the embedding on this stage shares the weight, the gradient of
        the local weight."""
        _, n, k = self.sizes(at, batch)
        yield SavedTensor(
            "input gradient", batch.rows(at) * self.part.hidden // at.size(STREAM.features) * batch.element
        )
        if self.part.tied and at.size("embedding") == 1:
            yield SavedTensor("weight gradient", n // at.size(self.grid.first.weight) * k * batch.wide)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of one tile of logits, both gathered factors and their gradients."""
        m, n, k = self.sizes(at, batch)
        logit_bytes = batch.element + (batch.wide if kernels.host else 0)
        tile = tile_rows(m, n, at.size(self.grid.first.summed)) * n * logit_bytes
        return float(tile + 2 * (m * k + n * k) * batch.element)


_PARTS: dict[type[Part], type] = {
    NormPart: GridNormPart, AttentionPart: GridAttentionPart, MLPPart: GridMLPPart,
    TokenEmbeddingPart: GridTokensPart, PositionEmbeddingPart: GridPositionsPart, OutputLayerPart: GridOutputPart,
}  # fmt: skip


def on_grid(model: Model, grid: Grid) -> Model:
    """Return the same model with every part cut over a grid."""

    @cache
    def cut(unit: Unit) -> Unit:
        parts = tuple(NamedPart(key, name, _on_grid(key, part, grid)) for key, name, part in unit.parts)
        changed = replace(unit, parts=parts)
        return replace(changed, hidden=changed.hidden // grid.col) if isinstance(changed, BlockUnit) else changed

    streams = tuple(stream._replace(width=stream.width // grid.col) for stream in model.streams)
    return replace(model.map_units(lambda node: cut(node.unit)), streams=streams)


def _on_grid(key: str, part: Part, grid: Grid) -> Part:
    if type(part) not in _PARTS:
        raise UserError(f"no grid of tensor-parallel ranks knows this model's {key}: leave out layout.tp_grid")
    wrapped: Part = _PARTS[type(part)](part, grid)
    return wrapped
