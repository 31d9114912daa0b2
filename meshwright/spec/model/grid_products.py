"""The cut of parameters over a grid of tensor-parallel ranks, and the communication of one product. No torch.

T is the number of tokens of a micro-batch. In a product [T, k] x [k, n], a rank has the gathered x [T / r, k / s], the
gathered weight [n / c, k / s] and y [T / r, n / c]. Here c is the size of the axis that cuts the output's features, s
the size of the axis over which the product sums, and r the product of the axes that cut the gathered rows
(`spec/layout/grid.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from meshwright.spec.layout.context import CONTEXT_PLANS
from meshwright.spec.layout.grid import Grid, GridSharding, Roles
from meshwright.spec.layout.params import Box, ParamRecord, overlap
from meshwright.spec.model.part import Collective, Coordinate, MicroBatch, Product, SavedTensor

# Ranks of a grid that share sequences gather each other's keys and values (`nn/attention/context.py`).
SHARED_BY = CONTEXT_PLANS["gather"]


def along(at: Coordinate, axis: str) -> Coordinate:
    """Return the coordinate of a rank as if tp only consisted of the ranks along one axis of the grid."""
    axes = [entry for entry in at.axes if not entry[0].startswith("tp")]
    axes += [("tp", at.size(axis), at.index(axis))] if at.size(axis) > 1 else []
    return Coordinate(tuple(sorted(axes)))


def cut_record(record: ParamRecord, dim: int, parts: int, index: int) -> ParamRecord:
    """Return the record of block `index` of a local tensor that is cut along a dim into `parts` equal blocks. The last
    blocks may only hold padding."""
    if parts == 1:
        return record
    assert record.local_shape[dim] % parts == 0, f"{record.name}: {record.local_shape[dim]} rows in {parts} parts"
    shape = tuple(n // (parts if d == dim else 1) for d, n in enumerate(record.local_shape))
    start = tuple(n * index if d == dim else 0 for d, n in enumerate(shape))
    boxes = []
    for box in record.boxes:
        # The block is a region of the local tensor, so the box is passed with local and global corners swapped.
        if where := overlap(start, shape, Box(box.local_start, box.shape, box.start)):
            inside, held = where
            sizes = tuple(span.stop - span.start for span in held)
            boxes.append(Box(tuple(span.start for span in held), sizes, tuple(span.start for span in inside)))
    return replace(record, local_shape=shape, boxes=tuple(boxes))


def held_by(record: ParamRecord, at: Coordinate, copies: Iterable[str]) -> ParamRecord:
    """Return the record of a parameter that is replicated along the axes `copies`, whose ranks apply it to different
    rows. Axes of ties across stages are kept."""
    grid_axes = tuple(axis for axis in copies if at.size(axis) > 1)
    tie_axes = tuple(axis for axis in record.copies if not axis.startswith("tp"))
    return replace(record, copies=(*tie_axes, *grid_axes), partial=(*tie_axes, *grid_axes))


def cut_features(record: ParamRecord, at: Coordinate, cut: GridSharding, dim: int = 0) -> ParamRecord:
    """Return the record of a vector of features, or of a table along dim `dim`, that is cut like an activation."""
    return held_by(cut_record(record, dim, at.size(cut.features), at.index(cut.features)), at, cut.rows)


def cut_weight(record: ParamRecord, at: Coordinate, roles: Roles, whole: bool) -> ParamRecord:
    """Return the record of a weight [out, in] as a product cuts it.

    If `whole`, `record` has all rows. Otherwise it only has the rows of the local output features.
    """
    if whole:
        record = cut_record(record, 0, at.size(roles.y.features), at.index(roles.y.features))
    record = cut_record(record, 0, at.size(roles.weight), at.index(roles.weight))
    if roles.summed:
        record = cut_record(record, 1, at.size(roles.summed), at.index(roles.summed))
    return held_by(record, at, roles.copies)


@dataclass(frozen=True)
class GridProduct:
    """One product [T, k] x [k, n] on a grid, with its communication and memory. n and k are the global sizes."""

    name: str
    n: int
    k: int
    roles: Roles
    keeps: bool  # the gathered factors are saved for backward

    def sizes(self, at: Coordinate, batch: MicroBatch) -> tuple[int, int, int]:
        """Return (m, n, k) of the product on one rank."""
        rows = prod(at.size(axis) for axis in self.roles.rows)
        return batch.tokens(at) // rows, self.n // at.size(self.roles.y.features), self.k // at.size(self.roles.summed)

    def work(self, at: Coordinate, batch: MicroBatch) -> Product:
        return Product(self.name, *self.sizes(at, batch), defers=False)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of the product y = x W^T.

        Forward: 1 all_gather of x and 1 of W, and 1 reduce_scatter of y. Backward: 1 all_gather of y's gradient; unless
        they were saved, 1 all_gather of W and 1 of x again; 1 reduce_scatter of the gradients of x and of W.
        """
        m, n, k = self.sizes(at, batch)
        x, weight, y = (size * batch.element for size in (m * k, n * k, m * n))
        r = self.roles
        yield Collective("forward", r.gathered, "all_gather", x)
        yield Collective("forward", r.weight, "all_gather", weight)
        yield Collective("forward", r.summed, "reduce_scatter", y)
        yield Collective("backward", r.summed, "all_gather", y)
        if not self.keeps:
            yield Collective("backward", r.weight, "all_gather", weight)
            yield Collective("backward", r.gathered, "all_gather", x, repeated=True)
        yield Collective("backward", r.gathered, "reduce_scatter", x)
        yield Collective("backward", r.weight, "reduce_scatter", weight)

    def gathered_tensors(self, at: Coordinate, batch: MicroBatch) -> Iterator[SavedTensor]:
        """Yield the tensors that are saved instead of x and the weight, if gathered factors are saved."""
        m, n, k = self.sizes(at, batch)
        if self.keeps:
            yield SavedTensor(f"gathered {self.name} input", m * k * batch.element)
            if at.size(self.roles.weight) > 1:
                yield SavedTensor(f"gathered {self.name} weight", n * k * batch.element)

    def workspace(self, at: Coordinate, batch: MicroBatch) -> float:
        """Return the workspace of the product in bytes.

        It holds both gathered factors and the gathered gradient of the output. In forward, the blocks of x before they
        are joined are added; in backward, the local blocks of the gradients. A gradient may take the place of its
        factor, since they have the same size. The local gradient of the output belongs to the part that produces it.
        """
        m, n, k = self.sizes(at, batch)
        r = self.roles
        joined = m * k if r.joins and at.size(r.gathered) > 1 else 0
        local = m * k // at.size(r.gathered) + n * k // at.size(r.weight)
        gathered = m * n if at.size(r.summed) > 1 else 0
        return float((m * k + n * k + gathered + max(joined, local)) * batch.element)


def rows_of_inner(at: Coordinate, batch: MicroBatch, grid: Grid) -> MicroBatch:
    """Return the micro-batch of a rank inside the MLP: its rows, as one sequence."""
    rows = prod(at.size(axis) for axis in grid.inner.rows)
    return replace(batch, sequences=1, seq=batch.tokens(at) // rows)


def inside_attention(at: Coordinate, batch: MicroBatch, grid: Grid) -> tuple[Coordinate, MicroBatch]:
    """Return the coordinate and the micro-batch of a rank inside attention.

    A rank has some heads of whole sequences. If there are too few sequences to distribute, the ranks along one axis
    share sequences, as context parallelism does.
    """
    heads = along(at, grid.inner.features)
    shared = grid.shares(batch.sequences)
    if shared == 1 or at.size(grid.sharing_axis) == 1:
        return heads, replace(batch, sequences=max(1, batch.sequences // prod(at.size(x) for x in grid.inner.rows)))
    axes = (*heads.axes, ("cp", shared, at.index(grid.sharing_axis)))
    others = prod(at.size(axis) for axis in grid.inner.rows if axis != grid.sharing_axis)
    return Coordinate(tuple(sorted(axes)), context=SHARED_BY), replace(batch, sequences=batch.sequences // others)


def vocabulary_rows(vocab: int, at: Coordinate, roles: Roles) -> int:
    """Return the number of rows of a gathered vocabulary table. The table is padded until the grid divides it."""
    parts = at.size(roles.y.features) * at.size(roles.weight)
    return -(-vocab // parts) * at.size(roles.weight)


def vocabulary_weight(record: ParamRecord, at: Coordinate, roles: Roles) -> ParamRecord:
    """Return the record of a table [vocabulary, hidden] as the grid cuts it. Its rows are padded at the end."""
    rows = vocabulary_rows(record.shape[0], at, roles) * at.size(roles.y.features)
    return cut_weight(replace(record, local_shape=(rows, *record.local_shape[1:])), at, roles, whole=True)


def ends(at: Coordinate) -> Coordinate:
    """Return the coordinate of a rank without tensor parallelism, which keeps the axes of ties across stages."""
    return Coordinate(tuple(entry for entry in at.axes if not entry[0].startswith("tp")))
