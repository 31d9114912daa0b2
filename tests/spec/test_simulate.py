"""The simulator against closed formulas, and the drawings that it feeds."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.show.schedule_drawing import timeline_svg, timeline_text
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.schedule.table import Op

TIMES = st.floats(1e-3, 1e3, allow_nan=False)


@settings(max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 16), st.integers(1, 64), TIMES, TIMES)
def test_bubble_of_gpipe_and_1f1b(kind: str, pp: int, m: int, forward: float, backward: float) -> None:
    simulation = simulate(build(kind, pp, m), forward, backward)
    assert simulation.bubble == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-9)
    assert simulation.makespan == pytest.approx((m + pp - 1) * (forward + backward), rel=1e-9)


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), TIMES, TIMES)
def test_bubble_of_interleaved(pp: int, groups: int, chunks: int, forward: float, backward: float) -> None:
    m = groups * pp
    simulation = simulate(build("interleaved", pp, m, chunks), forward, backward)
    assert simulation.bubble == pytest.approx((pp - 1) / (chunks * m + pp - 1), abs=1e-9)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_group_that_is_not_full_costs_no_more_than_a_full_one(chunks: int) -> None:
    for pp in (2, 3, 4, 8):
        for m in range(1, 4 * pp):
            full = simulate(build("interleaved", pp, -(-m // pp) * pp, chunks))
            simulation = simulate(build("interleaved", pp, m, chunks))
            assert simulation.makespan <= full.makespan + 1e-9
            assert simulation.makespan >= 3 * (m + (pp - 1) / chunks) - 1e-9
            pairs = zip(simulation.peak_activations, full.peak_activations, strict=True)
            assert all(peak <= most for peak, most in pairs)


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (4, 8), (4, 2), (8, 8), (16, 5)])
def test_peak_activations(pp: int, m: int) -> None:
    assert simulate(build("1f1b", pp, m)).peak_activations == tuple(min(pp - rank, m) for rank in range(pp))
    assert simulate(build("gpipe", pp, m)).peak_activations == (m,) * pp
    assert simulate(build("forward_only", pp, m)).peak_activations == (1,) * pp


def test_peak_activations_of_interleaved() -> None:
    pp, m, v = 4, 16, 2
    expected = tuple((2 * (pp - rank - 1) + (v - 1) * pp + 1) / v for rank in range(pp))
    assert simulate(build("interleaved", pp, m, v)).peak_activations == expected


def test_transfers_take_time_and_overlap_compute() -> None:
    """A single micro-batch crosses each boundary twice. The many of gpipe hide all transfers but the first and last
    ones.
    """
    assert simulate(build("1f1b", 4, 1), 1.0, 2.0, send=0.5).makespan == pytest.approx(4 * 3 + 6 * 0.5)
    assert simulate(build("gpipe", 4, 8), 1.0, 2.0, send=0.5).makespan == pytest.approx(33 + 6 * 0.5)
    assert simulate(build("interleaved", 1, 4, 3), 1.0, 2.0, send=9.0).makespan == pytest.approx(12)


def test_actions_are_timed_as_the_model_says() -> None:
    simulation = simulate(build("interleaved", 4, 8, 2), 1.0, 2.0, send=0.25)
    table = simulation.table
    ends = {
        (timed.action.op, timed.action.micro_batch, table.stage(rank, timed.action.chunk)): timed.end
        for rank, row in enumerate(simulation.ranks)
        for timed in row
        if timed.action.peer is None
    }
    for rank, row in enumerate(simulation.ranks):
        assert tuple(timed.action for timed in row) == table.ranks[rank]
        clock = 0.0
        for action, start, end in row:
            stage = table.stage(rank, action.chunk)
            if action.op is Op.RECV_FORWARD:
                assert start == pytest.approx(ends[Op.FORWARD, action.micro_batch, stage - 1])
            if action.op is Op.SEND_BACKWARD:
                assert start == pytest.approx(ends[Op.BACKWARD, action.micro_batch, stage])
            if action.peer is not None:
                assert end - start == pytest.approx(0.25)
                continue
            assert start >= clock
            clock = end
            assert end - start == pytest.approx(0.5 if action.op is Op.FORWARD else 1.0)
            if action.op is Op.FORWARD and stage > 0:
                assert start >= ends[Op.FORWARD, action.micro_batch, stage - 1] + 0.25 - 1e-12
            if action.op is Op.BACKWARD and stage < len(table.placement) - 1:
                assert start >= ends[Op.BACKWARD, action.micro_batch, stage + 1] + 0.25 - 1e-12


def test_durations_by_rank_and_chunk() -> None:
    """A slow last stage determines the duration: its own work, and the way there and back."""
    simulation = simulate(build("1f1b", 4, 8), lambda rank, _: 3.0 if rank == 3 else 1.0, lambda *_: 2.0)
    assert simulation.makespan == pytest.approx(3 * 1.0 + 8 * 5.0 + 3 * 2.0)
    assert simulation.busy == (24.0, 24.0, 24.0, 40.0)
    with pytest.raises(UserError, match="forward time nan"):
        simulate(build("1f1b", 2, 2), lambda *_: float("nan"))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_times_must_be_durations(bad: float) -> None:
    table = build("1f1b", 2, 2)
    for name in ("forward", "backward", "send"):
        with pytest.raises(UserError, match=f"{name} time"):
            simulate(table, **{name: bad})
    with pytest.raises(UserError, match="too large"):
        simulate(table, 1e308, 1e308)


def test_no_time_at_all() -> None:
    simulation = simulate(build("1f1b", 2, 2), 0.0, 0.0)
    assert (simulation.makespan, simulation.bubble) == (0.0, 0.0)
    assert "rank 1" in timeline_text(simulation, 80)
    ElementTree.fromstring(timeline_svg(simulation))


def test_text_golden() -> None:
    text = timeline_text(simulate(build("1f1b", 2, 2)), width=40)
    assert text.splitlines() == [
        "rank 0 0--1--......0=====...1=====",
        "rank 1 ...0--0=====1--1=====......",
        "       +--------------+------------",
        "       0              5",
        "forward 3--   backward 3==   idle ...   (micro-batch 3)",
    ]


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize(
    "size", [("gpipe", 4, 8, 1), ("1f1b", 12, 200, 1), ("interleaved", 4, 8, 2), ("forward_only", 2, 3, 3)]
)
def test_text_fits_and_says_the_same_in_colour(size: tuple[str, int, int, int], width: int) -> None:
    simulation = simulate(build(*size), 1.0, 2.2)
    plain = timeline_text(simulation, width)
    rows = plain.splitlines()[: size[1] + 2]
    assert plain.isascii() and all(len(row) <= width for row in rows)
    assert len({len(row) for row in rows[: size[1]]}) == 1
    coloured = timeline_text(simulation, width, colour=True)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()
    assert "\x1b[" in coloured and [len(row) for row in bare[: size[1] + 1]] == [
        len(row) for row in rows[: size[1] + 1]
    ]


def test_text_tells_chunks_and_directions_apart() -> None:
    row = timeline_text(simulate(build("interleaved", 2, 4, 2)), 80).splitlines()[0]
    assert set("abAB") <= set(row)
    assert "~ left out" in timeline_text(simulate(build("1f1b", 2, 100)), 80)


@pytest.mark.parametrize("size", [("gpipe", 4, 8, 1), ("interleaved", 4, 8, 2), ("interleaved", 1, 1, 20)])
def test_svg_is_xml_with_one_titled_block_per_compute(size: tuple[str, int, int, int]) -> None:
    kind, pp, m, chunks = size
    root = ElementTree.fromstring(timeline_svg(simulate(build(*size))))
    space = {"svg": "http://www.w3.org/2000/svg"}
    blocks = root.findall("svg:g", space)
    assert len(blocks) == 2 * pp * m * chunks
    assert all(block.find("svg:title", space) is not None for block in blocks)
    texts = " ".join(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert kind in texts and "makespan" in texts and "bubble" in texts
