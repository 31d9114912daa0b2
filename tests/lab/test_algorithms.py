"""Simulations of our algorithms for sums: every rank gets the sum, and sends as little as possible."""

from __future__ import annotations

from math import ceil, log2

import pytest

from meshwright.lab.algorithms import ALGORITHMS, Round, ring_order, rounds_of
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout import neighbours_on_node

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 12, 16]
CASES = [(kind, size) for kind in ALGORITHMS for size in SIZES if kind != "halving_doubling" or size & (size - 1) == 0]


def run(rounds: list[list[Round]], held: list[list[int]], adds: bool) -> None:
    """Run the rounds of all ranks in step. The chunks that one rank sends must be those that the other one receives."""
    for step in range(len(rounds[0])):
        before = [list(chunks) for chunks in held]
        for place, each in enumerate(rounds):
            to, sent, source, received = each[step]
            assert rounds[source][step].to == place and rounds[source][step].sent == received
            assert rounds[to][step].source == place and rounds[to][step].received == sent
            for chunk in received:
                held[place][chunk] = before[source][chunk] + (before[place][chunk] if adds else 0)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_every_rank_gets_the_sum(kind: str, size: int) -> None:
    on_node = next(width for width in (4, 3, 2, 1) if size % width == 0)
    sums = [ALGORITHMS[kind](size, place, on_node) for place in range(size)]
    held = [[(1 << place) * (chunk + 1) for chunk in range(size)] for place in range(size)]
    true = [((1 << size) - 1) * (chunk + 1) for chunk in range(size)]
    run([each.reduce for each in sums], held, adds=True)
    assert [held[place][place] for place in range(size)] == true
    held = [[value if chunk == place else -1 for chunk, value in enumerate(row)] for place, row in enumerate(held)]
    run([each.gather for each in sums], held, adds=False)
    assert held == [true] * size
    for each in sums:
        assert sum(len(one.sent) for one in each.reduce) == sum(len(one.sent) for one in each.gather) == size - 1
    rounds = len(sums[0].reduce)
    wide = {"mesh": next(w for w in range(int(size**0.5), 0, -1) if size % w == 0), "hierarchical": on_node}
    logarithmic = ceil(log2(size))
    hops = {kind: width - 1 + size // width - 1 for kind, width in wide.items()} | {"ring": size - 1}
    assert rounds == hops.get(kind, logarithmic)


def test_between_nodes_travels_what_a_node_has_summed() -> None:
    """Eight ranks on nodes of four send two chunks in each of 3 rounds inside a node, and one chunk in 1 round to the
    other.
    """
    for place in range(8):
        found = ALGORITHMS["hierarchical"](8, place, 4)
        across = [len(one.sent) for one in (*found.reduce, *found.gather) if one.to // 4 != place // 4]
        assert across == [1, 1]
        ring = ALGORITHMS["ring"](8, place, 4)
        crossing = sum(len(one.sent) for one in (*ring.reduce, *ring.gather) if one.to // 4 != place // 4)
        assert crossing == (14 if place % 4 == 3 else 0), "a ring sends all of it between two of them"


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-dp-ep-cp-tp", "dp-pp-tp-cp-ep", "tp-ep-dp-cp-pp"])
def test_a_ring_leaves_each_node_once(order: str) -> None:
    """Ranks of one node are neighbours in every group, whatever the order of the axes."""
    layout = Layout(32, tp=2, pp=2, cp=2, order=order, node_size=8)
    for axes in ("dp-cp", "dp", "tp", "pp"):
        for group in layout.groups(axes):
            nodes = [rank // 8 for rank in group]
            left = sum(a != b for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
            assert left == (len(set(nodes)) if len(set(nodes)) > 1 else 0), (axes, group)


def test_neighbours_on_a_node() -> None:
    assert neighbours_on_node(range(8), 4) == 4
    assert neighbours_on_node(range(0, 16, 2), 8) == 4
    assert neighbours_on_node(range(0, 16, 4), 4) == 1
    assert neighbours_on_node((0, 1, 2, 4), 4) == 1


def crossings(ranks: list[int], switches: list[int], order: list[int] | None, kind: str = "ring") -> list[int]:
    """Return, for each round, the number of messages from one switch to another, with two ranks on a node."""
    by_place = [list(rounds_of(kind, len(ranks), place, "all_reduce", 2, order)) for place in range(len(ranks))]
    at = [switches[rank // 2] for rank in ranks]
    return [
        sum(at[place] != at[rounds[number][0].to] for place, rounds in enumerate(by_place))
        for number in range(len(by_place[0]))
    ]


def test_a_ring_leaves_each_switch_once() -> None:
    """Eight nodes of two ranks are at two switches alternately, as a scheduler may number them."""
    ranks, switches = list(range(16)), [0, 1] * 4
    order = ring_order(ranks, 2, switches)
    assert neighbours_on_node([ranks[at] for at in order], 2) == 2, "ranks of a node stay neighbours"
    assert crossings(ranks, switches, None) == [8] * 30 and crossings(ranks, switches, order) == [2] * 30
    # One round in the node's ring, then two rings between nodes, each of which leaves a switch once.
    inside, across = [0] * 1, [4] * 7
    assert crossings(ranks, switches, order, "hierarchical") == [*inside, *across, *across, *inside]
    assert ring_order(ranks, 2) == ranks and ring_order([1, 3, 9, 11], 2, switches) == [0, 2, 1, 3]


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_sums_in_any_order(kind: str) -> None:
    """Positions and chunks are renumbered together: rank i has the sum of chunk i."""
    size, order = 8, [3, 2, 7, 6, 0, 1, 4, 5]
    rounds = [list(rounds_of(kind, size, place, "all_reduce", 2, order)) for place in range(size)]
    held = [[(1 << place) * (chunk + 1) for chunk in range(size)] for place in range(size)]
    half = len(rounds[0]) // 2
    run([[each for each, adds in of[:half] if adds] for of in rounds], held, adds=True)
    assert [held[place][place] for place in range(size)] == [255 * (place + 1) for place in range(size)]
    run([[each for each, adds in of[half:] if not adds] for of in rounds], held, adds=False)
    assert held == [[255 * (chunk + 1) for chunk in range(size)]] * size
