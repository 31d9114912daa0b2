"""The plan of a redistribution, executed in numpy for any two ownerships."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.spec.layout.params import Box, rectangles
from meshwright.spec.layout.redistribute import Ownership, Redistribution, redistribution

Shape = tuple[int, ...]


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> tuple[Shape, Shape]:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return start, tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, start, strict=True))


def stacked(found: list[tuple[Shape, Shape]]) -> tuple[Box, ...]:
    """Return boxes that are one below the other in the local tensor, with an unused row between them."""
    boxes, row = [], 0
    for start, shape in found:
        boxes.append(Box(start, shape, (row, *(0 for _ in shape[1:])) if shape else ()))
        row += (shape[0] if shape else 0) + 1
    return tuple(boxes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Ownership, Ownership]:
    """Draw a tensor's shape and its ownership before and after.

    Before, the tensor is cut into parts, each held by one or several ranks, and some more boxes overlap others. After,
    the boxes are arbitrary.
    """
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    ranks = draw(st.integers(1, 5))
    held: list[list[tuple[Shape, Shape]]] = [[] for _ in range(ranks)]
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    for cut in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        part = tuple(low for low, _ in cut), tuple(high - low for low, high in cut)
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(part)
    more = st.lists(regions(shape), max_size=2 if shape else 0)
    before = [stacked(parts + draw(more)) for parts in held]
    after = [stacked(draw(st.lists(regions(shape), max_size=3 if shape else 1))) for _ in range(ranks)]
    return shape, before, after


def local(boxes: tuple[Box, ...], whole: np.ndarray | None, shape: Shape) -> np.ndarray:
    """Return a rank's local tensor: the boxes of `whole` if it is given, and -1 elsewhere."""
    rows = max((box.local_start[0] + box.shape[0] for box in boxes if shape), default=0) + 1
    found = np.full((rows, *shape[1:]) if shape else (), -1)
    for box in boxes:
        if whole is not None:
            found[at(box.local_start, box.shape)] = whole[at(box.start, box.shape)]
    return found


def at(start: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def exchange(plan: Redistribution, xs: list[list[np.ndarray]], outs: list[list[np.ndarray]]) -> None:
    """Exchange the boxes of all ranks at once, as comm does. Tensors are listed by rank, then by number."""
    wires = []
    for rank in range(plan.ranks):
        for move in plan.kept(rank):
            outs[rank][move.tensor][move.slices(move.target_start)] = xs[rank][move.tensor][
                move.slices(move.source_start)
            ]
        parts = [xs[rank][move.tensor][move.slices(move.source_start)].ravel() for move in plan.sends(rank)]
        wire = np.concatenate([*parts, np.zeros(0, np.int64)])
        wires.append(np.split(wire, np.cumsum(plan.sent_counts(rank))))
    for rank in range(plan.ranks):
        arrived = np.concatenate([wires[source][rank] for source in range(plan.ranks)])
        assert [len(wires[source][rank]) for source in range(plan.ranks)] == plan.received_counts(rank)
        for move in plan.receives(rank):
            box_values, arrived = arrived[: move.numel], arrived[move.numel :]
            outs[rank][move.tensor][move.slices(move.target_start)] = box_values.reshape(move.shape)
        assert not len(arrived)


@settings(max_examples=150)
@given(cases(), cases())
def test_any_two_ownerships(first: tuple[Shape, Ownership, Ownership], second: tuple) -> None:
    ranks = min(len(first[1]), len(second[1]))
    chosen = [case for case in (first, second) if len(case[1]) == ranks]
    wholes = [np.arange(int(np.prod(shape))).reshape(shape) for shape, _, _ in chosen]
    plan = redistribution([before for _, before, _ in chosen], [after for _, _, after in chosen])
    found = list(zip(chosen, wholes, strict=True))
    xs = [[local(before[rank], whole, shape) for (shape, before, _), whole in found] for rank in range(ranks)]
    outs = [[local(after[rank], None, shape) for (shape, _, after), _ in found] for rank in range(ranks)]
    exchange(plan, xs, outs)
    for rank in range(ranks):
        missing = 0
        for number, ((shape, before, after), whole) in enumerate(found):
            assert (outs[rank][number] == local(after[rank], whole, shape)).all()
            own = np.zeros(shape, bool)
            for box in before[rank]:
                own[at(box.start, box.shape)] = True
            missing += sum(int((~own[at(box.start, box.shape)]).sum()) for box in after[rank])
        assert sum(plan.received_counts(rank)) == missing, "nothing comes from others that the rank holds itself"


def test_copies_share_the_sending() -> None:
    """Four ranks hold all of a matrix, and eight others want 24 of its rows in uneven parts."""
    whole = (Box((0, 0), (24, 6), (0, 0)),)
    cuts = [0, 1, 3, 6, 10, 14, 17, 22, 24]
    after = [()] * 4 + [(Box((a, 0), (b - a, 6), (0, 0)),) for a, b in itertools.pairwise(cuts)]
    plan = redistribution([[whole] * 4 + [()] * 8], [after])
    sent = [sum(plan.sent_counts(rank)) for rank in range(12)]
    assert sum(sent) == 24 * 6 and not any(sent[4:])
    assert max(sent) <= 7 * 6, "no more than a row above the mean of six"


def test_a_matrix_at_its_owner_and_back() -> None:
    """Flat shards of a matrix go to one rank and back, as for a matrix optimizer. (d - 1) / d of the matrix moves each
    way.
    """
    shape, ranks = (10, 7), 4
    cuts = [70 * rank // ranks for rank in range(ranks + 1)]
    shares = [tuple(rectangles(shape, a, b)) for a, b in itertools.pairwise(cuts)]
    owner = [(Box((0, 0), shape, (0, 0)),) if rank == 2 else () for rank in range(ranks)]
    there, back = redistribution([shares], [owner]), redistribution([owner], [shares])
    assert [sum(row) for row in there.counts] == [b - a for a, b in itertools.pairwise(cuts)]
    assert np.array(back.counts).T.tolist() == there.counts
    assert sum(there.received_counts(2)) == 70 - (cuts[3] - cuts[2])


def test_a_rank_keeps_what_it_holds_though_others_hold_more() -> None:
    """Rank 1 holds four of the six elements that it wants. Rank 0 has a smaller box, which overlaps two of these
    four.
    """
    before = [(Box((2,), (4,), (0,)), Box((3,), (3,), (4,))), (Box((0,), (4,), (0,)),)]
    plan = redistribution([before], [[(), (Box((0,), (6,), (0,)),)]])
    assert plan.received_counts(1) == [2, 0]


def test_what_nobody_holds_is_an_error() -> None:
    half = [(Box((0,), (2,), (0,)),), ()]
    with pytest.raises(ValueError, match=r"rank 1 needs the elements from \(2,\) to \(4,\), which no rank holds"):
        redistribution([half], [[(), (Box((0,), (4,), (0,)),)]])
