"""The schedules with split backwards: their tables are sound, their bubbles are the published formulas, and their
activations stay within the published peaks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

from meshwright.spec.schedule.kinds import (
    KINDS,
    Order,
    build,
    compute_table,
    interleaved,
    zero_bubble_h1,
    zero_bubble_h2,
)
from meshwright.spec.schedule.simulate import Simulation, simulate
from meshwright.spec.schedule.table import MEANING, Action, Op, Table, most_held
from meshwright.spec.schedule.v_shaped import dual_pipe_v, v_half, zero_bubble_v
from meshwright.spec.schedule.verify import verify

SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "dualpipev")
TIMES = ((1, 1, 1), (3, 3, 2), (2, 3, 1), (4, 3, 2), (5, 4, 3))  # F, I and W of one chunk
RANKS = range(2, 17)


@cache
def table_of(kind: str, pp: int, micro_batches: int) -> Table:
    return compute_table(kind, pp, micro_batches, KINDS[kind].chunks[0])


def timed(table: Table, times: tuple[float, float, float]) -> Simulation:
    forward, inputs, weights = (time * table.chunks for time in times)
    return simulate(table, forward, inputs + weights, 0.0, weights)


def idle(simulation: Simulation) -> float:
    """Return the most time that a rank is idle between its first and its last compute."""
    return max(active - busy for active, busy in zip(simulation.active, simulation.busy, strict=True))


def check(kind: str, pp: int, micro_batches: int) -> None:
    """Raise AssertionError unless bubble and peak are the published ones."""
    table, hops = table_of(kind, pp, micro_batches), pp - 1
    peak = {"zb-h1": pp, "zb-h2": 2 * pp - 1, "zb-v": 2 * pp, "v-half": pp + 2, "dualpipev": 2 * pp + 1}[kind]
    assert {most_held(actions) for actions in table.ranks} == {peak}
    simulation = timed(table, (1, 1, 1))
    if kind == "zb-v":
        assert idle(simulation) == 0
        assert simulation.makespan - simulation.busy[0] == hops  # The last rank begins that much later.
    if kind == "v-half":  # Half of 1F1B's 6 (pp - 1) half-size slots. The parity of pp changes it by one.
        assert idle(simulation) == 3 * hops + (1 if pp % 2 else -1)
    if kind == "dualpipev":
        assert simulation.makespan - simulation.busy[0] == hops
    for times in TIMES if kind in ("zb-h1", "zb-h2") else ():
        forward, inputs, weights = times
        simulation, deferred = timed(table, times), 1 if kind == "zb-h1" else 2
        assert idle(simulation) == hops * (forward + inputs - deferred * weights)
        if kind == "zb-h1":
            assert simulation.makespan - simulation.busy[0] == idle(simulation)


@pytest.mark.parametrize("kind", SPLIT)
def test_bubbles_and_peaks_are_the_published_ones(kind: str) -> None:
    for pp in RANKS:
        for micro_batches in {2 * pp, 2 * pp + 1, 8 * pp if pp < 9 else 3 * pp}:
            check(kind, pp, micro_batches)


@pytest.mark.wide
@pytest.mark.parametrize("kind", SPLIT)
def test_bubbles_and_peaks_are_the_published_ones_for_any_size(kind: str) -> None:
    for pp in RANKS:
        for micro_batches in range(2 * pp, 8 * pp + 1):
            check(kind, pp, micro_batches)


def paired(pp: int, micro_batches: int, f: float, i: float, w: float, both: float) -> list[float]:
    """Return the idle time of each rank under DualPipeV, as its authors count.

    A forward and the whole backward after it run as one: they take the time `both`, and give their results at the end.
    """
    table = table_of("dualpipev", pp, micro_batches)
    takes = {Op.FORWARD: f, Op.BACKWARD: i + w, Op.INPUT_GRAD: i, Op.WEIGHT_GRAD: w}
    rows = [_pairs(actions, alone=rank == pp - 1) for rank, actions in enumerate(table.ranks)]
    clock, busy, ready = [0.0] * pp, [0.0] * pp, {}
    while any(rows):
        for rank, row in enumerate(rows):
            while row and all(
                (source := table.beside(-MEANING[a.op].direction, rank, a.chunk)) is None
                or (MEANING[a.op].direction, a.micro_batch, source) in ready for a in row[0]
            ):  # fmt: skip
                group = row.pop(0)
                keys = [(MEANING[a.op].direction, a.micro_batch, (rank, a.chunk)) for a in group]
                inputs = [(d, m, table.beside(-d, *place)) for d, m, place in keys]
                seconds = both if len(group) == 2 else takes[group[0].op]
                clock[rank] = max(clock[rank], *(ready.get(key, 0.0) for key in inputs)) + seconds
                busy[rank] += seconds
                ready |= dict.fromkeys((key for key in keys if key[0]), clock[rank])
    return [max(clock) - each for each in busy]


def _pairs(actions: tuple[Action, ...], alone: bool) -> list[list[Action]]:
    """Group each forward with the whole backward after it. `alone`: the first such pair stays apart."""
    rows: list[list[Action]] = []
    for action in actions:
        before = rows[-1] if rows else []
        if action.op is Op.BACKWARD and [each.op for each in before] == [Op.FORWARD] and not alone:
            before.append(action)
        else:
            alone = alone and action.op is not Op.BACKWARD
            rows.append([action])
    return rows


def test_the_bubble_of_dualpipev_as_its_authors_count() -> None:
    """(stages / 2 - 1) (F&B + B - 3 W) on the last rank, where F = I, with B a whole backward of a chunk."""
    for pp in RANKS:
        for f, w, both in ((1, 1, 3.0), (1, 1, 2.0), (1, 1, 2.5), (3, 2, 8.0), (3, 2, 7.0)):
            backward = f + w
            assert paired(pp, 3 * pp, f, f, w, both)[-1] == pytest.approx((pp - 1) * (both + backward - 3 * w))


def verify_all(pp: int, counts: range | tuple[int, ...]) -> None:
    for kind in SPLIT:
        for micro_batches in counts:
            verify(build(kind, pp, micro_batches, KINDS[kind].chunks[0]))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_every_table_is_sound_if_sends_wait_for_their_receives(pp: int) -> None:
    verify_all(pp, (*range(1, 2 * pp + 2), 4 * pp + 1))
    for kind in SPLIT:
        for stage in (2, 3):
            verify(build(kind, pp, 2 * pp + 1, KINDS[kind].chunks[0], stage))
            verify(build(kind, pp, 2 * pp + 1, KINDS[kind].chunks[0], stage, validation=True))


@pytest.mark.wide
@pytest.mark.parametrize("pp", RANKS)
def test_every_table_of_up_to_64_micro_batches_is_sound(pp: int) -> None:
    verify_all(pp, range(1, 65))


def test_the_numbers_of_micro_batches_in_flight_are_the_formulas() -> None:
    for kind in SPLIT:
        formula = KINDS[kind].in_flight
        assert formula is not None
        for pp in (1, 2, 3, 4, 5, 8):
            for micro_batches in range(1, 3 * pp + 1):
                table = table_of(kind, pp, micro_batches)
                found = [most_held(actions) for actions in table.ranks]
                assert found == [formula(pp, micro_batches, table.chunks, rank) for rank in range(pp)], kind


def whole_backwards(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return DualPipeV without any split backward."""
    actions = dual_pipe_v(pp, micro_batches, chunks, rank)
    kept = [action for action in actions if action.op is not Op.WEIGHT_GRAD]
    return [replace(each, op=Op.BACKWARD) if each.op is Op.INPUT_GRAD else each for each in kept]


def late_weights(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return ZB-V with each weight gradient one place later."""
    actions = zero_bubble_v(pp, micro_batches, chunks, rank)
    for at in reversed(range(len(actions) - 1)):
        if actions[at].op is Op.WEIGHT_GRAD:
            actions[at : at + 2] = actions[at + 1], actions[at]
    return actions


def other_turn(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return V-Half with the turn of one more rank, in which two computes of a rank get one slot."""
    return v_half(pp + 1, micro_batches, chunks, rank)


BUGS: dict[str, tuple[str, Order]] = {
    "a short warm-up": ("zb-h2", zero_bubble_h1),
    "a long warm-up": ("zb-h1", zero_bubble_h2),
    "no split backward": ("dualpipev", whole_backwards),
    "late weight gradients": ("zb-v", late_weights),
    "the turn of another parity": ("v-half", other_turn),
    "another schedule's order": ("zb-v", dual_pipe_v),
}


@pytest.mark.parametrize("name", list(BUGS))
def test_a_wrong_order_has_another_bubble_or_peak(name: str) -> None:
    kind, order = BUGS[name]
    table_of.cache_clear()
    with mock.patch.dict(KINDS, {kind: replace(KINDS[kind], order=order)}), pytest.raises(AssertionError):
        check(kind, 4, 12)
    table_of.cache_clear()
    check(kind, 4, 12)


def test_an_order_for_another_placement_is_found() -> None:
    """An order that goes round the ranks waits for itself on the ranks of a V."""
    with mock.patch.dict(KINDS, {"zb-v": replace(KINDS["zb-v"], order=interleaved)}), pytest.raises(AssertionError):
        verify(build("zb-v", 4, 8, 2))
