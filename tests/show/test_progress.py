"""The progress of a search: a bar and the best result so far on a terminal, nothing elsewhere."""

from __future__ import annotations

import io

import pytest

from meshwright.show.progress import searching


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_search_says_how_far_it_is_and_what_it_has_found(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with searching("searching", stream) as show:
        show(1, 4, "")
        show(3, 4, "best so far 1.4 s")
    shown = stream.getvalue()
    assert ("best so far 1.4 s" in shown and "75%" in shown) == stream.isatty() and bool(shown) == stream.isatty()
