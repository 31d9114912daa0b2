"""Exposed communication on a device whose stream waits instead of the host, with a simulated stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwright.device as device_module
from meshwright.config.faults import FaultsConfig
from meshwright.device import Device, StreamTimer
from meshwright.engine.result import StepResult
from meshwright.engine.stream_waits import EVERY, FIRST, READ_DELAY, SampledWaits
from meshwright.faults.slow_ranks import WARM_UP, SlowRanks
from meshwright.record.rank_figures import RankFigures, RankFile
from meshwright.spec.layout import Layout
from meshwright.spec.traffic.ledger import Ledger
from tests.faults.test_slow_ranks import Told
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks


class FakeStream:
    """A stream that advances one millisecond up to each mark. Marks have times only while `is_reached` is true."""

    def __init__(self) -> None:
        self.now, self.marks, self.is_reached = 0, 0, True

    def mark(self) -> int:
        self.now += 1
        self.marks += 1
        return self.now

    def seconds(self, begin: int, end: int) -> float | None:
        return (end - begin) * 1e-3 if self.is_reached else None

    def forget(self, marks: Any) -> None:
        self.marks -= len(list(marks))


def trained(rank: int, world: int) -> list[tuple[dict[str, float], dict[str, Any], Any, int]]:
    trainer = make_trainer(small_config(layout={"tp": 2}, train={"global_batch": 4}), rank, world)
    stream = FakeStream()
    trainer.sampled = SampledWaits(stream, trainer.ctx.ledger)
    found = []
    for _ in range(FIRST + EVERY + READ_DELAY):
        result = trainer.step()
        found.append((result.exposed_s, result.comm, result.ranks, stream.marks))
    return found


def test_waits_of_a_sampled_step_are_exposed_two_steps_later() -> None:
    """One millisecond passes in each wait and one before it. The sum of the counts comes after the end of the step."""
    for steps in run_ranks(4, trained):
        for number, (exposed, comm, ranks, marks) in enumerate(steps, 1):
            if number % EVERY != FIRST + READ_DELAY:
                assert exposed == {} and not ranks.busy_s and not ranks.waited_s
                assert marks == 0 or number % EVERY in (FIRST, FIRST + 1), "nothing is recorded in other steps"
                continue
            waits = {axis: counts["calls"] / 4 - (axis == "world") for axis, counts in comm.items()}
            assert exposed == pytest.approx({axis: 1e-3 * calls for axis, calls in waits.items()})
            total = sum(waits.values())
            assert list(ranks.waited_s) == pytest.approx([1e-3 * total] * 4)
            assert list(ranks.busy_s) == pytest.approx([1e-3 * (total + 1)] * 4)
            assert marks == 0, "marks are used again"


def test_a_device_that_is_far_behind_is_not_waited_for() -> None:
    stream, ledger = FakeStream(), Ledger()
    sampled = SampledWaits(stream, ledger)
    stream.is_reached = False
    seen = []
    for _ in range(2 * EVERY + FIRST + READ_DELAY):
        sampled.begin_step()
        if ledger.stream_waits is not None:
            ledger.stream_waits.end_wait("dp", ledger.stream_waits.begin_wait())
        seen.append(sampled.end_step(0))
        assert ledger.stream_waits is None
        stream.is_reached = len(seen) > EVERY
    assert [number for number, each in enumerate(seen, 1) if each] == [FIRST + READ_DELAY + n * EVERY for n in (1, 2)]


class FakeEvent:
    """An event of a device that fails if the host waits for it."""

    made = 0

    def __init__(self, device: Any, enable_timing: bool = False) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.reached, self.at = False, 0.0

    def record(self) -> None:
        self.reached, self.at = False, self.at + 1.0

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.reached and end.reached
        return 250.0

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


def test_the_timer_reads_marks_that_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.torch, "Event", FakeEvent)
    timer = StreamTimer(Device("cpu"))
    begin, end = timer.mark(), timer.mark()
    assert timer.seconds(begin, end) is None
    begin.reached = True
    assert timer.seconds(begin, end) is None, "one of the two is not enough"
    end.reached = True
    assert timer.seconds(begin, end) == 0.25
    timer.forget([begin, end])
    timer.mark()
    assert FakeEvent.made == 2
    assert Device("cpu").stream_timer() is None and Device("meta").stream_timer() is None


def slow_run(slow: int | None) -> Told:
    """Return the reports about slow ranks of a run on accelerators, in which every tenth step has the ranks' times."""
    reports = Told()
    hook = SlowRanks(Layout(4), FaultsConfig(slow_seconds=0.0, slow_steps=4), reports)
    for step in range(1, WARM_UP + 6 * EVERY):
        result = StepResult(step, 1.0, 1.0, 0.0, None, False, 1, 1, step_time_s=0.3)
        busy = [0.1 + 0.1 * (rank == slow) for rank in range(4)] if step % EVERY == 0 else []
        result.ranks = RankFigures(busy, [], [0.001] * 4, [])
        hook.after(result, False)
    return reports


def test_a_rank_that_computes_slowly_on_an_accelerator_is_named() -> None:
    ((_, text, rank),) = slow_run(2).lines
    assert rank == 2 and "computing" in text
    assert slow_run(None).lines == []


def test_the_file_of_ranks_keeps_what_was_timed_before(tmp_path: Path) -> None:
    file = RankFile(tmp_path)
    file.add(1, RankFigures([1.0, 2.0], [0.5, 0.0], [0.0, 0.0], [1.0, 1.0]), False)
    file.add(2, RankFigures([], [], [0.0, 0.0], [1.0, 1.0]), True)
    assert file.means["busy_s"] == [1.0, 2.0]
