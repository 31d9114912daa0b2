"""Sums over a group as rounds of sends and receives: what each rank sends to whom, as plain data. No torch.

A tensor is cut into as many equal pieces as there are ranks. After the rounds of `reduce` rank i holds the sum of piece
i; those of `gather` bring all pieces to all ranks. In every algorithm each rank sends n-1 pieces in either half, which
is the least there can be. They differ in the number of rounds, and in who talks to whom:

    ring               n-1 rounds, with the neighbours alone
    tree               log2 n rounds: piece j goes up a binomial tree with root j, so that all ranks send alike
    halving_doubling   log2 n rounds between pairs, half of what is left in each; n must be a power of two
    mesh               two rings, along the rows and the columns of a mesh that is as square as n allows
    hierarchical       the same, where a row is the ranks of a node: between nodes travels what a node has summed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isqrt
from typing import NamedTuple

Pieces = tuple[int, ...]


class Round(NamedTuple):
    """One rank's round: it sends pieces to one rank and receives pieces from one, places in the group."""

    to: int
    sent: Pieces
    source: int
    received: Pieces


class Sum(NamedTuple):
    """One rank's rounds: what is received in `reduce` is added to what the rank has, in `gather` it replaces it."""

    reduce: list[Round]
    gather: list[Round]


def ring(size: int, place: int, on_node: int = 1) -> Sum:
    return _ring(range(size), place, [(piece,) for piece in range(size)])


def _ring(members: Sequence[int], at: int, parts: Sequence[Pieces]) -> Sum:
    """A ring of some ranks of the group, in which member k is to have the pieces of part k; `at`: this member."""
    count = len(members)
    right, left = members[(at + 1) % count], members[at - 1]
    reduce = [Round(right, parts[at - s], left, parts[(at - 1 - s) % count]) for s in range(1, count)]
    gather = [Round(right, parts[at - s], left, parts[(at - 1 - s) % count]) for s in range(count - 1)]
    return Sum(reduce, gather)


def tree(size: int, place: int, on_node: int = 1) -> Sum:
    def held(rank: int, wanted: Callable[[int], bool]) -> Pieces:
        """The pieces in whose tree, counted from the root, `rank` has a number that is wanted."""
        return tuple(piece for piece in range(size) if wanted((rank - piece) % size))

    reduce, gather = [], []
    for step in (1 << bit for bit in range((size - 1).bit_length())):
        up, down = (place - step) % size, (place + step) % size

        def sends(number: int, step: int = step) -> bool:
            return number % (2 * step) == step

        def passes(number: int, step: int = step) -> bool:
            return number % (2 * step) == 0 and number + step < size

        reduce.append(Round(up, held(place, sends), down, held(down, sends)))
        gather.append(Round(down, held(place, passes), up, held(up, passes)))
    return Sum(reduce, gather[::-1])


def halving_doubling(size: int, place: int, on_node: int = 1) -> Sum:
    assert size & (size - 1) == 0, f"{size} ranks are no power of two"

    def half(rank: int, step: int) -> Pieces:
        """The pieces that `rank` is left with after it has halved down to `step`."""
        return tuple(piece for piece in range(size) if piece // step == rank // step)

    steps = [1 << bit for bit in range((size - 1).bit_length())]
    partners = [(place ^ step, step) for step in steps]
    gather = [Round(other, half(place, step), other, half(other, step)) for other, step in partners]
    reduce = [Round(other, half(other, step), other, half(place, step)) for other, step in reversed(partners)]
    return Sum(reduce, gather)


def mesh(size: int, place: int, on_node: int = 1) -> Sum:
    return _two_rings(size, place, mesh_width(size))


def mesh_width(size: int) -> int:
    """Returns the shorter side of a mesh that is as square as can be; 1: there is none."""
    return next(width for width in range(isqrt(size), 0, -1) if size % width == 0)


def hierarchical(size: int, place: int, on_node: int = 1) -> Sum:
    return _two_rings(size, place, on_node if size % on_node == 0 else 1)


def _two_rings(size: int, place: int, width: int) -> Sum:
    """Rows are `width` neighbours. What a rank has summed in its row it sums further along its column."""
    row, column = divmod(place, width)
    beside = _ring(
        range(row * width, (row + 1) * width), column, [tuple(range(first, size, width)) for first in range(width)]
    )
    below = range(column, size, width)
    along = _ring(below, row, [(piece,) for piece in below])
    return Sum([*beside.reduce, *along.reduce], [*along.gather, *beside.gather])


ALGORITHMS: dict[str, Callable[[int, int, int], Sum]] = {
    "ring": ring, "tree": tree, "halving_doubling": halving_doubling, "mesh": mesh, "hierarchical": hierarchical,
}  # fmt: skip


def rounds_of(
    kind: str, size: int, place: int, op: str, on_node: int = 1, order: Sequence[int] | None = None
) -> Iterator[tuple[Round, bool]]:
    """Yields the rounds of an all_reduce or reduce_scatter, each with whether what is received is added. `on_node`:
    so many neighbours in the group are on one node. `order`: the places of the group as a ring goes through them (see
    `ring_order`); None: as they are."""
    order = order or range(size)
    found = ALGORITHMS[kind](size, order.index(place), on_node)
    yield from ((_named(each, order), True) for each in found.reduce)
    if op == "all_reduce":
        yield from ((_named(each, order), False) for each in found.gather)


def _named(each: Round, order: Sequence[int]) -> Round:
    """Returns a round that numbers places and pieces along a ring, by their numbers in the group."""
    sent, received = (tuple(order[piece] for piece in pieces) for pieces in (each.sent, each.received))
    return Round(order[each.to], sent, order[each.source], received)


def ring_order(ranks: Sequence[int], node_size: int, switches: Sequence[int] = ()) -> list[int]:
    """Returns the places of a group in the order in which a ring goes through them: ranks of a node beside each other,
    and nodes of a switch too, so that a ring leaves each of them once. `switches`: that of each node, or none where
    nodes are numbered by them. (A layout's groups are in ascending order of ranks, so without switches nothing moves.)
    """
    nodes = [rank // node_size for rank in ranks]
    return sorted(range(len(ranks)), key=lambda at: (switches[nodes[at]] if switches else 0, ranks[at]))


def neighbours_on_node(ranks: Sequence[int], node_size: int) -> int:
    """Returns how many neighbours of a group are on one node, where all nodes hold equally many; else 1."""
    nodes = [rank // node_size for rank in ranks]
    first = nodes.count(nodes[0])
    return first if nodes == [nodes[at - at % first] for at in range(len(nodes))] and len(nodes) % first == 0 else 1
