"""Running one step ahead of the result that is read: who waits for whom, and where a stop takes hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from meshwright.train.loop import Ahead


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
    """A trainer that only writes down what is asked of it; a request is seen in the step that it was launched with."""

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


def ahead_of(trainer: Any, *pauses: int) -> Ahead:
    return Ahead(trainer, lambda step: step in pauses)


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
        wanted |= call == asked  # asked for again and again until it is done
        result = ahead.next(False, wanted)
        if result.save:
            assert trainer.step_number == result.step
            saves.append(result.step)
            wanted = False
    assert len(saves) == 1 and asked <= saves[0] <= asked + 2 * runs_ahead, saves
