"""While ranks meet, rank 0 says which ones it waits for, and when it gives up."""

from __future__ import annotations

import pytest

from meshwright.comm import meeting
from meshwright.errors import UserError


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Arrivals:
    """A store in which ranks arrive one after the other, `pause` seconds apart."""

    def __init__(self, clock: Clock, pause: float) -> None:
        self.clock, self.begun, self.pause = clock, clock.now, pause

    def add(self, key: str, count: int) -> int:
        assert (key, count) == (meeting.ARRIVED, 0)
        return 1 + int((self.clock.now - self.begun) / self.pause)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    played = Clock()
    monkeypatch.setattr(meeting, "time", played)
    return played


def test_it_is_said_for_whom_rank_0_waits(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """Rank 0 says it after 5 s and then every 30 s. The ranks arrive after 31 s and after 62 s."""
    meeting._wait_for_all(Arrivals(clock, 31.0), 1, 3, "node0:29500", 100.0)  # type: ignore[arg-type]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" at ")[0] for line in said] == [
        "waiting for 2 of 3 ranks", "waiting for 1 of 3 ranks",
    ], said  # fmt: skip
    assert [line.split(", ")[1] for line in said] == ["5 s", "35 s"], said
    with pytest.raises(UserError, match="only 1 of 3 ranks met at node0:29500 within 20 s: start all ranks"):
        meeting._wait_for_all(Arrivals(clock, 60.0), 1, 3, "node0:29500", 20.0)  # type: ignore[arg-type]


def test_ranks_that_have_come_are_not_talked_of(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    meeting._wait_for_all(Arrivals(clock, 2.0), 1, 3, "node0:29500", 50.0)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
