"""How a grid of tensor-parallel ranks cuts parameters, and what one product on it communicates. No torch.

T are the tokens of a micro-batch. A product [T, k] x [k, n] has, on a rank, the gathered x [T / rows, k / s], the
gathered weight [n / c, k / s] and y [T / rows, n / c], where c is the size of the axis that cuts the output's features,
s that of the axis over which it sums, and `rows` those that cut the gathered rows (`spec/layout/grid.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from meshwright.spec.layout.context import CONTEXT_PLANS
from meshwright.spec.layout.grid import Cut, Grid, Roles
from meshwright.spec.layout.params import Box, ParamRecord, overlap
from meshwright.spec.model.part import Collective, Coordinate, Kept, MicroBatch, Product

SHARED_BY = CONTEXT_PLANS[
    "gather"
]  # how ranks that share sequences attend to each other's tokens (`nn/attention/context.py`)


def along(at: Coordinate, axis: str) -> Coordinate:
    """Return the place of a rank as if the tensor-parallel ranks were those along one axis of the grid."""
    axes = [each for each in at.axes if not each[0].startswith("tp")]
    axes += [("tp", at.size(axis), at.index(axis))] if at.size(axis) > 1 else []
    return Coordinate(tuple(sorted(axes)))


def cut_record(record: ParamRecord, dim: int, parts: int, index: int) -> ParamRecord:
    """Return the record of one of several equal blocks of a local tensor, cut along a dim; the last may hold padding
    alone."""
    if parts == 1:
        return record
    assert record.local_shape[dim] % parts == 0, f"{record.name}: {record.local_shape[dim]} rows in {parts} parts"
    shape = tuple(n // (parts if d == dim else 1) for d, n in enumerate(record.local_shape))
    start = tuple(n * index if d == dim else 0 for d, n in enumerate(shape))
    boxes = []
    for box in record.boxes:  # of the local tensor, so that the local and the global one change places
        if where := overlap(start, shape, Box(box.local_start, box.shape, box.start)):
            inside, found = where
            sizes = tuple(each.stop - each.start for each in found)
            boxes.append(Box(tuple(each.start for each in found), sizes, tuple(each.start for each in inside)))
    return replace(record, local_shape=shape, boxes=tuple(boxes))


def held_by(record: ParamRecord, at: Coordinate, copies: Iterable[str]) -> ParamRecord:
    """Return the record of a parameter that ranks along `copies` hold too, and apply to other rows. What a tie across
    stages says stays."""
    own = tuple(axis for axis in copies if at.size(axis) > 1)
    kept = tuple(axis for axis in record.copies if not axis.startswith("tp"))
    return replace(record, copies=(*kept, *own), partial=(*kept, *own))


def cut_features(record: ParamRecord, at: Coordinate, cut: Cut, dim: int = 0) -> ParamRecord:
    """Return the record of a whole vector (or table, along its last dim) of features that is cut as an activation."""
    return held_by(cut_record(record, dim, at.size(cut.features), at.index(cut.features)), at, cut.rows)


def cut_weight(record: ParamRecord, at: Coordinate, roles: Roles, whole: bool) -> ParamRecord:
    """Return the record of a weight [out, in]. `whole`: the given one has all rows, and not those of the output's
    features alone."""
    if whole:
        record = cut_record(record, 0, at.size(roles.y.features), at.index(roles.y.features))
    record = cut_record(record, 0, at.size(roles.weight), at.index(roles.weight))
    if roles.summed:
        record = cut_record(record, 1, at.size(roles.summed), at.index(roles.summed))
    return held_by(record, at, roles.copies)


@dataclass(frozen=True)
class GridProduct:
    """One product [T, k] x [k, n] on a grid, and what it communicates: n and k are the whole sizes."""

    name: str
    n: int
    k: int
    roles: Roles
    keeps: bool

    def sizes(self, at: Coordinate, batch: MicroBatch) -> tuple[int, int, int]:
        """Return (m, n, k) of the product on one rank."""
        rows = prod(at.size(axis) for axis in self.roles.rows)
        return batch.tokens(at) // rows, self.n // at.size(self.roles.y.features), self.k // at.size(self.roles.summed)

    def work(self, at: Coordinate, batch: MicroBatch) -> Product:
        return Product(self.name, *self.sizes(at, batch), defers=False)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield forward 1 all_gather of x and 1 of W, 1 reduce_scatter of y; backward 1 all_gather of y's gradient, 1
        of W and 1 of x again, unless they are kept, and 1 reduce_scatter of each one's gradient."""
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

    def gathered(self, at: Coordinate, batch: MicroBatch) -> Iterator[Kept]:
        """Yield what is kept in place of x and the weight, where gathered factors are kept."""
        m, n, k = self.sizes(at, batch)
        if self.keeps:
            yield Kept(f"gathered {self.name} input", m * k * batch.element)
            if at.size(self.roles.weight) > 1:
                yield Kept(f"gathered {self.name} weight", n * k * batch.element)

    def working(self, at: Coordinate, batch: MicroBatch) -> float:
        """Return the bytes of both gathered factors and the gathered gradient of the output; with them, in forward, of
        the blocks of x before they are joined or, in backward, of a rank's own blocks of the gradients. In place of a
        factor its gradient of the same size may be there. The output's own gradient is counted where it is made."""
        m, n, k = self.sizes(at, batch)
        r = self.roles
        joined = m * k if r.joins and at.size(r.gathered) > 1 else 0
        own = m * k // at.size(r.gathered) + n * k // at.size(r.weight)
        gathered = m * n if at.size(r.summed) > 1 else 0
        return float((m * k + n * k + gathered + max(joined, own)) * batch.element)


def rows_of_inner(at: Coordinate, batch: MicroBatch, grid: Grid) -> MicroBatch:
    """Return the rows of a micro-batch that a rank has inside the MLP, as one sequence."""
    rows = prod(at.size(axis) for axis in grid.inner.rows)
    return replace(batch, sequences=1, seq=batch.tokens(at) // rows)


def inside_attention(at: Coordinate, batch: MicroBatch, grid: Grid) -> tuple[Coordinate, MicroBatch]:
    """Return the place of a rank and its micro-batch as attention sees them: some of the heads of whole sequences or,
    where there are too few to deal out, of sequences that the ranks along an axis share."""
    heads, shared = along(at, grid.inner.features), grid.shares(batch.sequences)
    if shared == 1 or at.size(grid.sharing) == 1:
        return heads, replace(batch, sequences=max(1, batch.sequences // prod(at.size(x) for x in grid.inner.rows)))
    axes = (*heads.axes, ("cp", shared, at.index(grid.sharing)))
    others = prod(at.size(axis) for axis in grid.inner.rows if axis != grid.sharing)
    return Coordinate(tuple(sorted(axes)), context=SHARED_BY), replace(batch, sequences=batch.sequences // others)


def vocabulary_rows(vocab: int, at: Coordinate, roles: Roles) -> int:
    """Return the rows of the vocabulary in a gathered table, which is padded until the grid divides it."""
    parts = at.size(roles.y.features) * at.size(roles.weight)
    return -(-vocab // parts) * at.size(roles.weight)


def vocabulary_weight(record: ParamRecord, at: Coordinate, roles: Roles) -> ParamRecord:
    """Return the record of a whole table [vocabulary, hidden] as the grid cuts it, its rows padded at the end."""
    rows = vocabulary_rows(record.shape[0], at, roles) * at.size(roles.y.features)
    return cut_weight(replace(record, local_shape=(rows, *record.local_shape[1:])), at, roles, whole=True)


def ends(at: Coordinate) -> Coordinate:
    """Return the place of a rank without tensor parallelism: what ties across stages is there."""
    return Coordinate(tuple(each for each in at.axes if not each[0].startswith("tp")))
