"""The parts of a GPT on a grid of tensor-parallel ranks, each around the part that it cuts further. No torch.

What a part is (its sizes, its heads, its names) the inner part states; this file says who holds what of it and what
travels.
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
    ALONE,
    BlockUnit,
    Collective,
    Coordinate,
    Kept,
    Kernels,
    MicroBatch,
    NamedPart,
    Part,
    Product,
    Records,
    Unit,
    Work,
)


@dataclass(frozen=True)
class GridNormPart(Part):
    """A norm whose features are cut: ranks that share a row exchange two numbers of it (RMS: one), and two (one) again
    for its gradient, in fp32 (fp64 for fp64)."""

    part: NormPart
    grid: Grid

    def records(self, at: Coordinate, name: str) -> Records:
        return {key: cut_features(record, at, STREAM) for key, record in self.part.records(ALONE, name).items()}

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return self._own(at).work(at, batch, kernels)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield, per row: layer norm 1 all_gather of each rank's mean and sum of squares, RMS norm 1 all_reduce of the
        squares; in backward 1 all_reduce of two numbers or of one."""
        rows, axis, size = batch.rows(at) * batch.wide, STREAM.features, at.size(STREAM.features)
        if self.part.facts.centred:
            yield Collective("forward", axis, "all_gather", 2 * rows * size)
            yield Collective("backward", axis, "all_reduce", 2 * rows)
        else:
            yield Collective("forward", axis, "all_reduce", rows)
            yield Collective("backward", axis, "all_reduce", rows)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield the input, each row's statistics and the output, where the product after it keeps that."""
        rows = batch.rows(at)
        stream = rows * self._own(at).width * batch.element
        yield Kept("input", stream)
        yield Kept("statistics", self.part.facts.statistics * rows * batch.wide)
        if self.part.keeps_output and not self.grid.keeps and not self.part.fused_by(kernels):
            yield Kept("output", stream)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the input, the normed input and a gradient in the precision of sums."""
        return 3.0 * batch.rows(at) * self._own(at).width * batch.wide

    def _own(self, at: Coordinate) -> NormPart:
        return replace(self.part, width=self.part.width // at.size(STREAM.features))


@dataclass(frozen=True)
class GridAttentionPart(Part):
    """Self-attention: heads over the axis of the inner features, whole sequences over those of the inner rows, or parts
    of sequences where a micro-batch has too few."""

    part: AttentionPart
    grid: Grid

    @property
    def products(self) -> tuple[GridProduct, GridProduct]:
        p, q = self.part, self.part.heads * self.part.head_dim
        qkv = GridProduct("qkv", q + 2 * p.kv_heads * p.head_dim, p.hidden, self.grid.first, self.grid.keeps)
        return qkv, GridProduct("out", p.hidden, q, self.grid.second, self.grid.keeps)

    def _heads(self, at: Coordinate) -> Coordinate:
        return along(at, self.grid.inner.features)

    def records(self, at: Coordinate, name: str) -> Records:
        first, second, inner = self.grid.first, self.grid.second, self.grid.inner
        found: Records = {}
        for key, record in self.part.records(self._heads(at), name).items():
            if key == "qkv.weight":
                found[key] = cut_weight(record, at, first, whole=False)
            elif key == "qkv.bias" or (key.endswith("_norm.weight") and self.part.qk_norm == "all"):
                found[key] = held_by(record, at, inner.rows)
            elif key.endswith("_norm.weight"):  # one weight for all heads, of which each rank has some, of some rows
                found[key] = held_by(record, at, GRID_AXES)
        whole = self.part.records(ALONE, name)
        found["out.weight"] = cut_weight(whole["out.weight"], at, second, whole=True)
        if "out.bias" in whole:
            found["out.bias"] = cut_features(whole["out.bias"], at, second.y)
        return found

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        inner = self.part.work(*inside_attention(at, batch, self.grid), kernels)
        own = tuple(product.work(at, batch) for product in self.products)
        return replace(inner, products=(*own, *(p for p in inner.products if not p.linear)))

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of both products and, where ranks share sequences, those for others' keys and values."""
        for product in self.products:
            yield from product.collectives(at, batch)
        place, own = inside_attention(at, batch, self.grid)
        if self.part.qk_norm == "all":
            for phase in ("forward", "backward"):
                yield Collective(phase, self.grid.inner.features, "all_reduce", 2 * own.tokens(place) * batch.wide)
        for call in context_calls(place, own, *self.part.own_heads(place), self.part.core_dim):
            yield replace(call, axis=self.grid.sharing)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        yield from self.part.kept(*inside_attention(at, batch, self.grid), kernels)
        for product in self.products:
            yield from product.gathered(at, batch)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        core = self.part.working(*inside_attention(at, batch, self.grid), kernels)
        return core + max(product.working(at, batch) for product in self.products)

    def core_backward(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return self.part.core_backward(*inside_attention(at, batch, self.grid), kernels)


@dataclass(frozen=True)
class GridMLPPart(Part):
    """The MLP: inner features over the axis of the inner features, rows over those of the inner rows."""

    part: MLPPart
    grid: Grid

    @property
    def products(self) -> tuple[GridProduct, GridProduct]:
        p, keeps = self.part, self.grid.keeps
        up = GridProduct("up", (2 if p.gated else 1) * p.ffn, p.hidden, self.grid.first, keeps)
        return up, GridProduct("down", p.hidden, p.ffn, self.grid.second, keeps)

    @property
    def _own(self) -> MLPPart:
        """What it keeps: a product on a grid takes SwiGLU in whoever adds the bias."""
        return replace(self.part, bias=False, keeps_result=not self.grid.keeps)

    def _width(self, at: Coordinate) -> Coordinate:
        return along(at, self.grid.inner.features)

    def records(self, at: Coordinate, name: str) -> Records:
        cut, whole = self.part.records(self._width(at), name), self.part.records(ALONE, name)
        key = self.part.first
        found = {f"{key}.weight": cut_weight(cut[f"{key}.weight"], at, self.grid.first, whole=False)}
        if self.part.bias:
            found[f"{key}.bias"] = held_by(cut[f"{key}.bias"], at, self.grid.inner.rows)
        found["down.weight"] = cut_weight(whole["down.weight"], at, self.grid.second, whole=True)
        if self.part.bias:
            found["down.bias"] = cut_features(whole["down.bias"], at, self.grid.second.y)
        return found

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        inner = self.part.work(self._width(at), rows_of_inner(at, batch, self.grid), kernels)
        return replace(inner, products=tuple(product.work(at, batch) for product in self.products))

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        for product in self.products:
            yield from product.collectives(at, batch)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        yield from self._own.kept(self._width(at), rows_of_inner(at, batch, self.grid), kernels)
        for product in self.products:
            yield from product.gathered(at, batch)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        core = self._own.working(self._width(at), rows_of_inner(at, batch, self.grid), kernels)
        return core + max(product.working(at, batch) for product in self.products)


@dataclass(frozen=True)
class GridTokensPart(Part):
    """The token embedding. Its table is cut as the output layer's weight, and looking up is that product turned round:
    the table is gathered, and what was looked up in a rank's part of the vocabulary is summed and cut as x there."""

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
        """Yield forward 1 all_gather of the table and 1 reduce_scatter of what was looked up, backward the reverse."""
        m, n, k = self._sizes(at, batch)
        r, x, table = self.grid.first, m * k * batch.element, n * k * batch.element
        yield Collective("forward", r.weight, "all_gather", table)
        yield Collective("forward", r.gathered, "reduce_scatter", x)
        yield Collective("backward", r.gathered, "all_gather", x)
        yield Collective("backward", r.weight, "reduce_scatter", table)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield the numbers of the rows that were looked up, and a dropout mask."""
        m, _, _ = self._sizes(at, batch)
        yield Kept("rows", 8 * m)
        if self.part.dropout:
            width = self.part.hidden // at.size(STREAM.features)
            yield Kept("dropout mask", batch.rows(at) * width * (kernels.mask_bytes or batch.element))

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        m, n, k = self._sizes(at, batch)
        return float((2 * n * k + m * k) * batch.element)


@dataclass(frozen=True)
class GridPositionsPart(Part):
    """Learned positions, cut by features; ranks with other rows hold copies."""

    part: PositionEmbeddingPart
    grid: Grid

    def records(self, at: Coordinate, name: str) -> Records:
        return {"weight": cut_features(self.part.records(ALONE, name)["weight"], at, STREAM, dim=1)}

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        yield Kept("positions", batch.rows(at) * 8)


@dataclass(frozen=True)
class GridOutputPart(Part):
    """The output layer and the cross entropy, whose gradients are computed in forward, one tile of logits at a
    time."""

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
        """Yield the calls of a product, all in forward and none repeated, those of the logits and their gradient tile
        by tile. Each tile of C rows has for the loss 1 all_reduce of C w and 1 of 2 C w over the vocabulary, w as
        elsewhere; and the sum of the losses goes over every axis that cuts rows."""
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

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield the gradient of the input, cut as it is, and of a weight that an embedding here shares."""
        _, n, k = self.sizes(at, batch)
        yield Kept("input gradient", batch.rows(at) * self.part.hidden // at.size(STREAM.features) * batch.element)
        if self.part.tied and at.size("embedding") == 1:
            yield Kept("weight gradient", n // at.size(self.grid.first.weight) * k * batch.wide)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of one tile of logits, both gathered factors and their gradients."""
        m, n, k = self.sizes(at, batch)
        each = batch.element + (batch.wide if kernels.host else 0)
        return float(tile_rows(m, n, at.size(self.grid.first.summed)) * n * each + 2 * (m * k + n * k) * batch.element)


_PARTS: dict[type[Part], type] = {
    NormPart: GridNormPart, AttentionPart: GridAttentionPart, MLPPart: GridMLPPart,
    TokenEmbeddingPart: GridTokensPart, PositionEmbeddingPart: GridPositionsPart, OutputLayerPart: GridOutputPart,
}  # fmt: skip


def on_grid(model: Model, grid: Grid) -> Model:
    """Return the same model with every part cut over a grid."""

    @cache
    def cut(unit: Unit) -> Unit:
        parts = tuple(NamedPart(key, name, _on_grid(key, part, grid)) for key, name, part in unit.parts)
        found = replace(unit, parts=parts)
        return replace(found, hidden=found.hidden // grid.col) if isinstance(found, BlockUnit) else found

    streams = tuple(stream._replace(width=stream.width // grid.col) for stream in model.streams)
    return replace(model.mapped(lambda node: cut(node.unit)), streams=streams)


def _on_grid(key: str, part: Part, grid: Grid) -> Part:
    if type(part) not in _PARTS:
        raise UserError(f"no grid of tensor-parallel ranks knows this model's {key}: leave out layout.tp_grid")
    found: Part = _PARTS[type(part)](part, grid)
    return found
