"""Every rank must see the folder of a run: a disk may show a new file late, or may not be shared at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.device import Device
from meshwright.errors import UserError
from meshwright.run import pretrain
from meshwright.run.pretrain import SHARED_S, check_shared


class World:
    """An agreement of all ranks on the largest number, which is that of the writer."""

    def __init__(self, writer: float) -> None:
        self.numbers = [writer]

    def max_over_ranks(self, value: float, device: Any) -> float:
        return max(value, self.numbers.pop(0) if self.numbers else 0.0)


def rank_of(writes: bool, number: float = 0.0, timeout: float = 600.0) -> Any:
    config, mesh = SimpleNamespace(comm=SimpleNamespace(timeout=timeout)), SimpleNamespace(world=World(number))
    ctx = SimpleNamespace(config=config, mesh=mesh, device=Device("cpu"), rank=3)
    return SimpleNamespace(ctx=ctx, writes=writes)


class Clock:
    """A clock that moves only when a rank sleeps. A file appears at its time."""

    def __init__(self, path: Path, appears: float) -> None:
        self.now, self.path, self.appears = 0.0, path, appears

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.appears:
            self.path.touch()


def test_a_file_that_a_network_disk_shows_after_a_minute_is_waited_for(tmp_path: Path) -> None:
    clock = Clock(tmp_path / ".seen-by-all-ff", 60.0)
    check_shared(rank_of(False, 255.0), tmp_path, lambda: clock.now, clock.sleep)
    assert 60.0 <= clock.now < 63.0


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "other", 1e9)
    with pytest.raises(UserError, match=f"rank 3 does not see {tmp_path}, which another rank made: put run.dir on"):
        check_shared(rank_of(False, 255.0), tmp_path, lambda: clock.now, clock.sleep)
    assert SHARED_S <= clock.now < SHARED_S + 3.0


def test_the_wait_ends_before_the_watchdog_takes_it_for_a_hang(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "other", 1e9)
    with pytest.raises(UserError, match="rank 3 does not see"):
        check_shared(rank_of(False, 255.0, timeout=20.0), tmp_path, lambda: clock.now, clock.sleep)
    assert 10.0 <= clock.now < 13.0


def test_the_name_is_a_new_one_each_time_and_nothing_is_left(tmp_path: Path, monkeypatch: Any) -> None:
    """A restart must not look for a name that the disk remembers as removed."""
    made: list[str] = []
    real = Path.touch

    def touch(self: Path, *given: Any, **named: Any) -> None:
        made.append(self.name)
        real(self, *given, **named)

    monkeypatch.setattr(pretrain.Path, "touch", touch)
    for _ in range(3):
        check_shared(rank_of(True), tmp_path)
    assert len(set(made)) == 3 and list(tmp_path.iterdir()) == []
