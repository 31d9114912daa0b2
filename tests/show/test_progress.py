"""The progress of a search: a line every ten seconds where no bar can be drawn."""

from __future__ import annotations

import io

import pytest

from meshwright.show import progress


def test_a_search_says_how_far_it_is_and_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with progress.searching("searching", stream) as show:
        show(1, 4, "")
        now += 10
        show(2, 4, "best so far 1.5 s")
        show(3, 4, "best so far 1.4 s")
        now += 10
        show(4, 4, "")
    assert stream.getvalue().splitlines() == ["searching 50 %, best so far 1.5 s", "searching 100 %"]
