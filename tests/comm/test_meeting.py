"""Ranks that meet: rank 0 says for whom it waits, and when it gives up."""

from __future__ import annotations

import time

import pytest

from meshwright.comm import meeting
from meshwright.errors import UserError


class Arrivals:
    """A store in which ranks arrive one after the other."""

    def __init__(self, pause: float) -> None:
        self.begun, self.pause = time.monotonic(), pause

    def add(self, key: str, count: int) -> int:
        assert (key, count) == (meeting.ARRIVED, 0)
        return 1 + int((time.monotonic() - self.begun) / self.pause)


def test_it_is_said_for_whom_rank_0_waits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "FIRST_WORD_S", 0.1)
    monkeypatch.setattr(meeting, "NEXT_WORD_S", 0.2)
    meeting._wait_for_all(Arrivals(0.25), 1, 3, "node0:29500", 5.0)  # type: ignore[arg-type]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" at ")[0] for line in said] == [
        "waiting for 2 of 3 ranks", "waiting for 1 of 3 ranks",
    ], said  # fmt: skip
    assert all(" at node0:29500, 0 s" in line for line in said)
    with pytest.raises(UserError, match="only 1 of 3 ranks met at node0:29500 within 0 s: start all ranks"):
        meeting._wait_for_all(Arrivals(60.0), 1, 3, "node0:29500", 0.2)  # type: ignore[arg-type]


def test_ranks_that_have_come_are_not_talked_of(capsys: pytest.CaptureFixture[str]) -> None:
    meeting._wait_for_all(Arrivals(0.05), 1, 3, "node0:29500", 5.0)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
