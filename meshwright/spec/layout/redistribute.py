"""Plans that move boxes of tensors from one set of owners to another by one all-to-all. No torch.

An ownership lists the boxes of one global tensor that each rank holds. A `Box` gives the position in the global tensor
and in the rank's local one. The plan is a pure function of the ownership before and after. Every rank computes the
same plan, and derives from it the boxes that it sends to each rank, their order and their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.spec.layout.params import Box

Ownership = Sequence[Sequence[Box]]  # by rank, the boxes that it holds
Region = tuple[tuple[int, ...], tuple[int, ...]]  # the first corner in the global tensor, and the corner past the last


@dataclass(frozen=True)
class Move:
    """A box of one tensor that is sent from `source` to `target`, with its first corner in their local tensors."""

    tensor: int
    source: int
    target: int
    shape: tuple[int, ...]
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self, start: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(at, at + n) for at, n in zip(start, self.shape, strict=True))


@dataclass(frozen=True)
class Redistribution:
    """All moves of a plan over `ranks` ranks.

    A rank's send and receive buffers hold its moves in the order of `moves`: the send buffer is sorted by receiver,
    and the receive buffer by sender.
    """

    ranks: int
    moves: tuple[Move, ...]

    @cached_property
    def counts(self) -> list[list[int]]:
        """The number of elements by (source rank, target rank). The diagonal counts the elements that ranks keep."""
        counts = [[0] * self.ranks for _ in range(self.ranks)]
        for move in self.moves:
            counts[move.source][move.target] += move.numel
        return counts

    @cached_property
    def communicates(self) -> bool:
        return any(move.source != move.target for move in self.moves)

    def sends(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.source == rank != move.target]

    def receives(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.target == rank != move.source]

    def kept(self, rank: int) -> list[Move]:
        return [move for move in self.moves if move.target == rank == move.source]

    def sent_counts(self, rank: int) -> list[int]:
        """Return the number of elements that a rank sends to each rank; 0 for itself."""
        return [0 if other == rank else count for other, count in enumerate(self.counts[rank])]

    def received_counts(self, rank: int) -> list[int]:
        """Return the number of elements that a rank receives from each rank; 0 for itself."""
        return [0 if other == rank else row[rank] for other, row in enumerate(self.counts)]


def redistribution(before: Sequence[Ownership], after: Sequence[Ownership]) -> Redistribution:
    """Plan how every box of `after` is filled from the boxes of `before`. Both list one ownership per tensor.

    A rank copies from itself whatever it holds. Any holder can send the rest. If there are several, the largest boxes
    are assigned first, each to the rank that has the least to send so far.
    """
    ranks = len(before[0])
    wanted: list[tuple[int, int, Region, Box, dict[int, Box]]] = []
    for tensor, (old, new) in enumerate(zip(before, after, strict=True)):
        held = _Held(old)
        for target, boxes in enumerate(new):
            wanted.extend((tensor, target, *part) for box in boxes for part in held.cover(target, box))
    load = [0] * ranks
    moves = []
    # Assigning the largest regions first balances the load better: small ones fill the gaps at the end.
    for tensor, target, region, box, holders in sorted(wanted, key=lambda entry: -_numel(entry[2])):
        # Among equals, the next rank after the receiver: simultaneous sends then spread over the group.
        source = target if target in holders else min(holders, key=lambda rank: (load[rank], (rank - target) % ranks))
        shape = tuple(high - low for low, high in zip(*region, strict=True))
        load[source] += _numel(region) if source != target else 0
        local = (_local(region[0], holders[source]), _local(region[0], box))
        moves.append(Move(tensor, source, target, shape, *local))
    moves.sort(key=lambda move: (move.source, move.target, move.tensor, move.target_start))
    return Redistribution(ranks, tuple(moves))


class _Held:
    """The holders of one tensor: each distinct region once, the smallest first, with its ranks and their boxes."""

    def __init__(self, ownership: Ownership) -> None:
        holders: dict[Region, dict[int, Box]] = {}
        for rank, boxes in enumerate(ownership):
            for box in boxes:
                if box.numel:
                    holders.setdefault(_region(box), {}).setdefault(rank, box)
        self.regions = sorted(holders, key=lambda region: (_numel(region), region))
        self.boxes = [holders[region] for region in self.regions]
        # Arrays allow comparing a part with all regions at once. A thousand ranks hold thousands of regions.
        dims = len(self.regions[0][0]) if self.regions else 0
        corners = np.array(self.regions, np.int64).reshape(len(self.regions), 2, dims)
        self.low, self.high = corners[:, 0], corners[:, 1]

    def cover(self, target: int, box: Box) -> Iterator[tuple[Region, Box, dict[int, Box]]]:
        """Yield disjoint regions that together cover a rank's new box.

        Each comes with that box, and with the ranks that hold the region and the box in which each of them holds it.
        """
        open_parts = [_region(box)] if box.numel else []
        while open_parts:
            part = open_parts.pop()
            low, high = map(np.array, part)
            # The regions that overlap the part.
            near = np.flatnonzero(((self.low < high) & (self.high > low)).all(axis=-1))
            if not len(near):
                raise ValueError(f"rank {target} needs the elements from {part[0]} to {part[1]}, which no rank holds")
            # The rank's own regions are cut out first, so that no other rank sends any of them.
            first = next((i for i in near if target in self.boxes[i]), near[0])
            met = _meet(part, self.regions[first])
            open_parts.extend(_without(part, met))
            # The regions that contain all of it: any of their ranks can send it.
            low, high = map(np.array, met)
            around = np.flatnonzero(((self.low <= low) & (self.high >= high)).all(axis=-1))
            yield met, box, {rank: held for i in around for rank, held in self.boxes[i].items()}


def _region(box: Box) -> Region:
    return box.start, tuple(at + n for at, n in zip(box.start, box.shape, strict=True))


def _numel(region: Region) -> int:
    return math.prod(high - low for low, high in zip(*region, strict=True))


def _local(corner: tuple[int, ...], box: Box) -> tuple[int, ...]:
    """Return the local position of a global corner inside a box."""
    return tuple(at - first + local for at, first, local in zip(corner, box.start, box.local_start, strict=True))


def _meet(a: Region, b: Region) -> Region:
    return tuple(map(max, a[0], b[0])), tuple(map(min, a[1], b[1]))


def _without(part: Region, hole: Region) -> Iterator[Region]:
    """Yield the slabs that are left when `hole` is cut out of a region: at most two per dim."""
    low, high = list(part[0]), list(part[1])
    for dim, (begin, end) in enumerate(zip(*hole, strict=True)):
        if low[dim] < begin:
            yield tuple(low), (*high[:dim], begin, *high[dim + 1 :])
        if end < high[dim]:
            yield (*low[:dim], end, *low[dim + 1 :]), tuple(high)
        low[dim], high[dim] = begin, end
