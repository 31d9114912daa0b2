"""The assignment of whole matrices to ranks, for rules that update matrices and not elements. Does not import torch.

A matrix may be sharded twice: at arbitrary offsets over the ranks that shard its flat buffer (ZeRO), and by rows or
columns over tensor-parallel ranks (tp, or etp for experts). It is assembled in two hops. First each parameter of a
bucket is gathered on one of the ranks that shard the bucket. Then the tensor-parallel ranks that hold its slices send
each of its matrices (queries, keys and values are three, and every expert has its own) to one owner. The results return
the same way. The plan is a pure function of sizes and records, so every rank and the planner compute the same one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.layout.params import Box, ParamRecord, overlap
from meshwright.spec.model.experts import EXPERT_DATA_AXES

if TYPE_CHECKING:
    from meshwright.spec.layout.redistribute import Ownership, Redistribution

TOGETHER = 2**22  # the most elements of equally shaped matrices that are transformed in one batch
# A round has at least the work of this many of its most costly matrices per rank, so that the ranks' shares are even.
FILL = 4


class MatrixParameter(NamedTuple):
    """A parameter that holds matrices.

    `start` is its first element in its bucket. `peers` are its records on the tensor-parallel ranks that hold its
    slices, in the order of their group.
    """

    start: int
    peers: tuple[ParamRecord, ...]

    @property
    def numel(self) -> int:
        return self.peers[0].numel


class Matrix(NamedTuple):
    """A matrix, as a rectangle of its global tensor. Leading dimensions, if any, have the size 1.

    `parameter` is the number of its parameter in the bucket.
    """

    parameter: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.shape[-1] * self.shape[-2]


BucketParameters = tuple[int, Sequence[MatrixParameter]]  # the number of elements of a bucket, and its parameters
Cost = Callable[[int, int], float]  # the cost of a matrix, from its rows and columns


@dataclass(frozen=True)
class BucketPlan:
    """One rank's part in assembling the matrices of a bucket.

    First hop: `shares` and `whole` are the ranges of the bucket that each of its shard ranks has before and after it.
    Before, they are slices of parameters. After, they are whole parameters in a flat tensor of `held` elements, in
    which the parameter of each of `matrices` begins at `offsets`.

    Second hop: `parts` and `owned` are, by matrix and tensor-parallel rank, the rectangles before it (the rank's slice)
    and after it (the whole matrix on its owner).
    """

    index: tuple[int, int]  # of this rank among the ranks that shard the bucket and among the tensor-parallel ranks
    shares: list[list[Box]]
    whole: list[list[Box]]
    held: int
    matrices: list[Matrix]
    offsets: list[int]
    parts: list[list[list[Box]]]
    owned: list[list[list[Box]]]

    @cached_property
    def gather(self) -> Redistribution:
        return _redistribution([self.shares], [self.whole])

    @cached_property
    def scatter(self) -> Redistribution:
        return _redistribution([self.whole], [self.shares])

    @cached_property
    def assemble(self) -> Redistribution:
        return _redistribution(self.parts, self.owned)

    @cached_property
    def disperse(self) -> Redistribution:
        return _redistribution(self.owned, self.parts)

    @property
    def mine(self) -> list[int]:
        """The numbers of the matrices that this rank updates."""
        return [number for number, ranks in enumerate(self.owned) if ranks[self.index[1]]]

    def first_owner(self, number: int) -> int:
        """Return the first tensor-parallel rank that updates a matrix."""
        return next(rank for rank, boxes in enumerate(self.owned[number]) if boxes)

    def calls(self) -> Iterator[tuple[int, int]]:
        """Yield (hop, elements that this rank sends) of each call.

        The first hop is counted without its `Redistribution`, which is slow to compute for thousands of ranks.
        """
        kept = [
            sum(max(0, min(_end(a), _end(b)) - max(a.start[0], b.start[0])) for a in own for b in wanted)
            for own, wanted in zip(self.shares, self.whole, strict=True)
        ]
        if sum(kept) < sum(box.numel for own in self.shares for box in own):
            for sides in (self.shares, self.whole):
                yield 0, sum(box.numel for box in sides[self.index[0]]) - kept[self.index[0]]
        for plan in (self.assemble, self.disperse) if self.matrices else ():
            if plan.communicates:
                yield 1, sum(plan.sent_counts(self.index[1]))


def _redistribution(before: Sequence[Ownership], after: Sequence[Ownership]) -> Redistribution:
    # The import is local because it imports numpy, which would slow down commands that plan no matrices.
    from meshwright.spec.layout.redistribute import redistribution

    return redistribution(before, after)


def _end(box: Box) -> int:
    return box.start[0] + box.shape[0]


def cut_axis(data_axes: str) -> str:
    """Return the tensor-parallel axis of the matrices whose gradients are summed over `data_axes`."""
    return "etp" if data_axes == EXPERT_DATA_AXES else "tp"


def plan_rounds(
    buckets: Sequence[BucketParameters], shards: tuple[int, int], cuts: tuple[int, int], cost: Cost
) -> Iterator[list[BucketPlan]]:
    """Yield the plans of one rank for all buckets, round by round.

    `shards` and `cuts` are (size, index) of the rank in the group that shards the buckets and in the tensor-parallel
    group. All ranks wait for each other at the end of a round, so work is balanced within it: the most costly matrices
    are assigned first, each to the rank with the least work so far.
    """
    for chosen in _rounds(buckets, shards[0] * cuts[0], cost):
        costs = {
            (number, at): _cost(parameter, cost)
            for number, (_, parameters) in enumerate(chosen)
            for at, parameter in enumerate(parameters)
        }
        owners = _assigned(costs, shards[0])
        plans = [
            _first_hop(bucket, [owners[number, at] for at in range(len(bucket[1]))], shards, cuts[1])
            for number, bucket in enumerate(chosen)
        ]
        _assign_matrices(plans, cuts[0], cost)
        yield plans


def _rounds(buckets: Sequence[BucketParameters], ranks: int, cost: Cost) -> Iterator[list[BucketParameters]]:
    """Yield runs of buckets that have enough matrices to give all ranks about the same work.

    The last run may have fewer.
    """
    chosen: list[BucketParameters] = []
    total = largest = 0.0
    for bucket in buckets:
        chosen.append(bucket)
        total += sum(_cost(parameter, cost) for parameter in bucket[1])
        matrices = (matrix for parameter in bucket[1] for matrix in matrices_of(0, parameter))
        largest = max(largest, max((cost(*matrix.shape[-2:]) for matrix in matrices), default=0.0))
        if total >= FILL * ranks * largest:
            yield chosen
            chosen, total, largest = [], 0.0, 0.0
    if chosen:
        yield chosen


def _cost(parameter: MatrixParameter, cost: Cost) -> float:
    return sum(cost(*matrix.shape[-2:]) for matrix in matrices_of(0, parameter))


def _assigned(costs: Mapping[tuple[int, int], float], ranks: int) -> dict[tuple[int, int], int]:
    """Return a rank for each item: the most costly first, each to the rank with the least work so far."""
    work = [(0.0, rank) for rank in range(ranks)]
    owners = {}
    # Ties are broken by the item and by the rank, so that all ranks compute the same assignment.
    for item in sorted(costs, key=lambda item: (-costs[item], item)):
        done, rank = heapq.heappop(work)
        owners[item] = rank
        heapq.heappush(work, (done + costs[item], rank))
    return owners


def _first_hop(bucket: BucketParameters, owners: Sequence[int], shards: tuple[int, int], index: int) -> BucketPlan:
    """Return the plan of a bucket whose parameters have these owners, without the owners of its matrices."""
    size, parameters = bucket
    whole: list[list[Box]] = [[] for _ in range(shards[0])]
    held = [0] * shards[0]
    offsets: list[int] = []
    for parameter, owner in zip(parameters, owners, strict=True):
        offsets.append(held[owner])
        whole[owner].append(Box((parameter.start,), (parameter.numel,), (held[owner],)))
        held[owner] += parameter.numel
    shares = [list(_share(parameters, size // shards[0], shard)) for shard in range(shards[0])]
    mine = [number for number, owner in enumerate(owners) if owner == shards[1]]
    matrices = [matrix for number in mine for matrix in matrices_of(number, parameters[number])]
    parts = [[_held_parts(m, peer) for peer in parameters[m.parameter].peers] for m in matrices]
    starts = [offsets[matrix.parameter] for matrix in matrices]
    return BucketPlan((shards[1], index), shares, whole, held[shards[1]], matrices, starts, parts, [])


def _assign_matrices(plans: Sequence[BucketPlan], ranks: int, cost: Cost) -> None:
    """Choose the owners of all matrices among the tensor-parallel ranks, and add them to the plans."""
    costs = {}
    for number, plan in enumerate(plans):
        for at, (matrix, parts) in enumerate(zip(plan.matrices, plan.parts, strict=True)):
            if is_cut(matrix, parts):
                costs[number, at] = cost(*matrix.shape[-2:])
    owners = _assigned(costs, ranks)
    for number, plan in enumerate(plans):
        for at, matrix in enumerate(plan.matrices):
            box = Box(matrix.start, matrix.shape, (0,) * len(matrix.shape))
            # All ranks that hold the whole matrix compute it, which is faster than sending.
            holders = [rank for rank, parts in enumerate(plan.parts[at]) if parts]
            chosen = [owners[number, at]] if (number, at) in owners else holders
            plan.owned.append([[box] if rank in chosen else [] for rank in range(ranks)])


def is_cut(matrix: Matrix, parts: Sequence[Sequence[Box]]) -> bool:
    """Return whether some rank holds only a part of a matrix. `parts` are the boxes of it by rank."""
    return any(0 < sum(box.numel for box in boxes) < matrix.numel for boxes in parts)


def record_is_cut(record: ParamRecord) -> bool:
    """Return whether a rank holds only a part of some matrix of a parameter."""
    matrices = matrices_of(0, MatrixParameter(0, (record,)))
    return any(is_cut(matrix, [_held_parts(matrix, record)]) for matrix in matrices)


def _share(parameters: Sequence[MatrixParameter], width: int, shard: int) -> Iterator[Box]:
    """Yield the ranges of parameters in a rank's shard of a bucket, with their offsets in that shard."""
    for start, peers in parameters:
        low, high = max(start, shard * width), min(start + peers[0].numel, (shard + 1) * width)
        if low < high:
            yield Box((low,), (high - low,), (low - shard * width,))


def matrices_of(number: int, parameter: MatrixParameter) -> Iterator[Matrix]:
    """Yield the matrices of which the tensor-parallel ranks hold slices in this parameter."""
    record = parameter.peers[0]
    *leading, _, columns = record.shape
    bounds = list(accumulate(record.matrices, initial=0))
    for index in product(*(range(n) for n in leading)):
        for low, high in zip(bounds, bounds[1:], strict=False):
            matrix = Matrix(number, (*index, low, 0), (*(1 for _ in index), high - low, columns))
            if any(_held_parts(matrix, peer) for peer in parameter.peers):
                yield matrix


def _held_parts(matrix: Matrix, record: ParamRecord) -> list[Box]:
    """Return the slices of a matrix that a rank's parameter holds, with their offsets in the parameter."""
    parts = []
    for box in record.boxes:
        if where := overlap(matrix.start, matrix.shape, box):
            inside, local = where
            start = tuple(at + part.start for at, part in zip(matrix.start, inside, strict=True))
            shape = tuple(part.stop - part.start for part in inside)
            parts.append(Box(start, shape, tuple(part.start for part in local)))
    return parts
