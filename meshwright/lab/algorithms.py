"""Algorithms of all-reduce and reduce-scatter, as plain data: the rounds of sends and receives of each rank. No torch.

A tensor is cut into as many equal chunks as there are ranks. After the rounds of `reduce`, rank i holds the sum of
chunk i. The rounds of `gather` bring all chunks to all ranks. In every algorithm each rank sends n-1 chunks in either
half, which is the minimum. The algorithms differ in the number of rounds and in the pairs of ranks that communicate:

    ring               n-1 rounds, between neighbours only
    tree               log2 n rounds: chunk j goes up a binomial tree with root j, so that all ranks send equally much
    halving_doubling   log2 n rounds between pairs, which halve the remaining chunks; n must be a power of two
    mesh               two rings, along the rows and the columns of a mesh that is as square as n allows
    hierarchical       the same, with the ranks of a node as a row: only sums over a node travel between nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from meshwright.spec.layout.layout import mesh_width
from meshwright.spec.traffic.ledger import OPERATIONS

Pieces = tuple[int, ...]


class Round(NamedTuple):
    """One rank's round: it sends chunks to one rank and receives chunks from one. Ranks are positions in the group."""

    to: int
    sent: Pieces
    source: int
    received: Pieces


class Sum(NamedTuple):
    """One rank's rounds. Received chunks are added to the rank's in `reduce`, and replace them in `gather`."""

    reduce: list[Round]
    gather: list[Round]


def ring(size: int, place: int, on_node: int = 1) -> Sum:
    return _ring(range(size), place, [(chunk,) for chunk in range(size)])


def _ring(members: Sequence[int], at: int, parts: Sequence[Pieces]) -> Sum:
    """Return the rounds of member `at` of a ring of some ranks of the group. Member k reduces the chunks parts[k]."""
    count = len(members)
    right = members[(at + 1) % count]
    left = members[at - 1]
    # In `reduce`, a chunk starts at the right neighbour of the member that reduces it, goes once around the ring and
    # ends at that member. In `gather` it starts there.
    reduce = [Round(right, parts[at - s], left, parts[(at - 1 - s) % count]) for s in range(1, count)]
    gather = [Round(right, parts[at - s], left, parts[(at - 1 - s) % count]) for s in range(count - 1)]
    return Sum(reduce, gather)


def tree(size: int, place: int, on_node: int = 1) -> Sum:
    def chunks_of(rank: int, wanted: Callable[[int], bool]) -> Pieces:
        """Return the chunks for which `wanted` accepts the number of `rank`, counted from the root of their tree."""
        return tuple(chunk for chunk in range(size) if wanted((rank - chunk) % size))

    reduce, gather = [], []
    for step in (1 << bit for bit in range((size - 1).bit_length())):
        # In the tree of chunk j, rank r has number r - j. Parents and children are `step` apart in every tree, so one
        # message carries the chunks of all trees in which this rank sends.
        up = (place - step) % size
        down = (place + step) % size

        def sends(number: int, step: int = step) -> bool:
            return number % (2 * step) == step

        def passes(number: int, step: int = step) -> bool:
            return number % (2 * step) == 0 and number + step < size

        reduce.append(Round(up, chunks_of(place, sends), down, chunks_of(down, sends)))
        gather.append(Round(down, chunks_of(place, passes), up, chunks_of(up, passes)))
    return Sum(reduce, gather[::-1])


def halving_doubling(size: int, place: int, on_node: int = 1) -> Sum:
    assert size & (size - 1) == 0, f"{size} ranks are not a power of two"

    def half(rank: int, step: int) -> Pieces:
        """Return the chunks that `rank` is left with after it has halved down to `step` chunks."""
        return tuple(chunk for chunk in range(size) if chunk // step == rank // step)

    steps = [1 << bit for bit in range((size - 1).bit_length())]
    # In each round, partners differ in one bit of their place.
    partners = [(place ^ step, step) for step in steps]
    gather = [Round(other, half(place, step), other, half(other, step)) for other, step in partners]
    reduce = [Round(other, half(other, step), other, half(place, step)) for other, step in reversed(partners)]
    return Sum(reduce, gather)


def mesh(size: int, place: int, on_node: int = 1) -> Sum:
    return _two_rings(size, place, mesh_width(size))


def hierarchical(size: int, place: int, on_node: int = 1) -> Sum:
    return _two_rings(size, place, on_node if size % on_node == 0 else 1)


def _two_rings(size: int, place: int, width: int) -> Sum:
    """Return the rounds of two rings. Ranks reduce over a row of `width` neighbours, then over their column."""
    row, column = divmod(place, width)
    # In its row, a rank reduces the chunks of all ranks of its column, which the column then divides.
    beside = _ring(
        range(row * width, (row + 1) * width), column, [tuple(range(first, size, width)) for first in range(width)]
    )
    below = range(column, size, width)
    along = _ring(below, row, [(chunk,) for chunk in below])
    return Sum([*beside.reduce, *along.reduce], [*along.gather, *beside.gather])


ALGORITHMS: dict[str, Callable[[int, int, int], Sum]] = {
    "ring": ring, "tree": tree, "halving_doubling": halving_doubling, "mesh": mesh, "hierarchical": hierarchical,
}  # fmt: skip


def rounds_of(
    kind: str, size: int, place: int, op: str, on_node: int = 1, order: Sequence[int] | None = None
) -> Iterator[tuple[Round, bool]]:
    """Yield the rounds of an all_reduce or reduce_scatter, each with True if received chunks are added.

    `on_node` is the number of neighbours in the group that share a node. `order` lists the positions of the group in
    ring order (see `ring_order`); None keeps the group's order.
    """
    order = order or range(size)
    rounds = ALGORITHMS[kind](size, order.index(place), on_node)
    yield from ((_in_group_order(round_, order), True) for round_ in rounds.reduce)
    if OPERATIONS[op].rounds == 2:
        yield from ((_in_group_order(round_, order), False) for round_ in rounds.gather)


def _in_group_order(round_: Round, order: Sequence[int]) -> Round:
    """Return a round whose ranks and chunks are numbered along the ring, with their numbers in the group instead."""
    sent, received = (tuple(order[chunk] for chunk in chunks) for chunks in (round_.sent, round_.received))
    return Round(order[round_.to], sent, order[round_.source], received)


def ring_order(ranks: Sequence[int], node_size: int, switches: Sequence[int] = ()) -> list[int]:
    """Return the positions of a group in the order in which a ring visits them.

    Ranks of a node are next to each other, and so are nodes of a switch. The ring therefore leaves each node and each
    switch only once. `switches` is the switch of each node, or empty if nodes are already numbered by switch. (The
    groups of a layout list their ranks in ascending order, so without switches the order stays the same.)
    """
    nodes = [rank // node_size for rank in ranks]
    return sorted(range(len(ranks)), key=lambda at: (switches[nodes[at]] if switches else 0, ranks[at]))
