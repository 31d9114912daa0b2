"""Running one step ahead of the result that is read: the order of launches and reads, and the steps of stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from meshwright.engine.losses import Normalisation, StepSums, UpdateGate
from meshwright.run.loop import LaunchAhead


@dataclass
class Result:
    step: int
    stop: bool
    save: bool
    held: bool = False


@dataclass
class Launch:
    result: Result


@dataclass
class Recorder:
    """A trainer that only records its calls. A request is seen in the step that it was launched with."""

    runs_ahead: bool
    step_number: int = 0
    seen: list[str] = field(default_factory=list)

    def launch(self, stop_requested: bool, save_requested: bool) -> Launch:
        self.step_number += 1
        self.seen.append(f"launch {self.step_number}")
        return Launch(Result(self.step_number, stop_requested, save_requested))

    def read(self, launched: Launch) -> Result:
        self.seen.append(f"read {launched.result.step}")
        return launched.result

    def take_back(self, result: Result) -> None:
        self.seen.append(f"back {result.step}")
        self.step_number = result.step - 1


def ahead_of(trainer: Any, *pauses: int) -> LaunchAhead:
    return LaunchAhead(trainer, lambda step: step in pauses)


def test_the_next_step_is_launched_before_one_is_read_but_not_beyond_a_pause() -> None:
    trainer = Recorder(True)
    ahead = ahead_of(trainer, 2, 4)
    assert [ahead.next(False).step for _ in range(4)] == [1, 2, 3, 4]
    assert trainer.seen == [
        "launch 1", "launch 2", "read 1", "read 2", "launch 3", "launch 4", "read 3", "read 4"
    ]  # fmt: skip


def test_without_a_device_that_runs_ahead_every_step_is_read_at_once() -> None:
    trainer = Recorder(False)
    ahead = ahead_of(trainer, 4)
    assert [ahead.next(n == 2).stop for n in range(1, 3)] == [False, True]
    assert trainer.seen == ["launch 1", "read 1", "launch 2", "read 2"]


def test_a_step_that_was_launched_after_a_bad_one_is_dropped_and_what_it_asked_for_is_not() -> None:
    trainer, bad = Recorder(True), [2]

    def settle(result: Any, again: Any) -> Any:
        if result.step in bad:
            bad.clear()
            trainer.take_back(result)
            return again()
        return result

    launch = trainer.launch

    def launched(*asked: bool) -> Launch:
        found = launch(*asked)
        found.result.held = found.result.step in bad
        found.result.stop = found.result.step == 3 and "back 3" not in trainer.seen
        return found

    trainer.launch = launched  # type: ignore[method-assign]
    ahead = LaunchAhead(trainer, lambda step: False, settle)  # type: ignore[arg-type]
    first, second = (ahead.next(False) for _ in range(2))
    assert (first.step, first.stop, second.step, second.stop) == (1, False, 2, True)
    ahead_of_two = ["launch 3", "read 2", "read 3", "back 3", "back 2", "launch 2", "read 2"]
    assert trainer.seen == ["launch 1", "launch 2", "read 1", *ahead_of_two]
    assert trainer.step_number == 2


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_a_stop_takes_hold_where_the_trainer_stands(asked: int) -> None:
    trainer = Recorder(True)
    ahead = ahead_of(trainer, 6)
    for call in range(1, 7):
        result = ahead.next(stop_requested=call == asked)
        if result.stop:
            break
    assert result.stop and trainer.step_number == result.step and asked <= result.step <= asked + 2


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("asked", [1, 2, 3, 4])
def test_a_save_takes_hold_once_where_the_trainer_stands(asked: int, runs_ahead: bool) -> None:
    trainer = Recorder(runs_ahead)
    ahead, wanted, saves = ahead_of(trainer, 4, 8), False, []
    for call in range(1, 9):
        wanted |= call == asked  # repeated until the save is done
        result = ahead.next(False, wanted)
        if result.save:
            assert trainer.step_number == result.step
            saves.append(result.step)
            wanted = False
    assert len(saves) == 1 and asked <= saves[0] <= asked + 2 * runs_ahead, saves


def test_a_bad_step_holds_back_those_after_it_until_it_is_released() -> None:
    gate, normal = UpdateGate(1), Normalisation(1.0)
    good, nan, spike = ([6.0, 2.0, 4.0], [float("nan"), 2.0, 4.0], [60.0, 2.0, 4.0])

    def held(numbers: list[float]) -> tuple[float, float]:
        sums = torch.tensor(numbers, dtype=torch.float64)
        passed, held_back = gate.pass_on(StepSums(sums, sums), normal)
        assert held_back is not None and passed.own is passed.all
        return float(held_back), float(passed.all[2])

    assert gate.pass_on(StepSums(*2 * [torch.tensor(nan)]), normal)[1] is None, "nobody looks"
    gate.active = gate.nonfinite = True
    assert held(good) == (0.0, 4.0) and held(spike) == (0.0, 4.0)
    gate.loss_bound = 10.0
    assert [held(each) for each in (spike, good)] == 2 * [(1.0, float("inf"))]
    gate.release()
    assert held(good)[0] == 0.0 and [held(each)[0] for each in (nan, good)] == [1.0, 1.0]
    gate.release()
    gate.nonfinite, gate.loss_bound, gate.norm_bound = False, float("inf"), 0.5
    assert held([6.0, 2.0, float("inf")])[0] == 0.0, "the loss scale's business"
    assert held(nan)[0] == 1.0, "its norm stands out"
