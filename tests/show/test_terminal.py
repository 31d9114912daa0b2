"""Tables as text, and the output for streams of other kinds."""

from __future__ import annotations

import io
import sys

import pytest

from meshwright.errors import divisors, either, nearest
from meshwright.show.terminal import encodable, has_colour, is_terminal, table

WORDS = "tp 8, pp 4, dp 8, zero 1, recompute none"
ROWS = [("layout", "step", "MFU"), (WORDS, "18.07 s", "50.3 %"), ("[bold]", "", "-")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned_and_lines_end_where_the_words_do() -> None:
    assert table(ROWS).splitlines() == [
        "  layout                                       step     MFU",
        "  tp 8, pp 4, dp 8, zero 1, recompute none  18.07 s  50.3 %",
        "  [bold]                                                  -",
    ]
    assert table([("a", "bb"), ("ccc", "d")], left=(), indent="").splitlines() == ["  a  bb", "ccc   d"]


def test_a_narrow_terminal_wraps_words_but_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", Terminal())
    lines = table(ROWS).splitlines()
    assert max(map(len, lines)) <= 40 and lines[1].endswith("18.07 s  50.3 %")
    assert " ".join(line[:20].strip() for line in lines[1:-1]) == WORDS


def test_what_a_stream_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_terminal(Terminal()) and has_colour(Terminal()) and not is_terminal(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_terminal(Terminal()) and not has_colour(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert encodable("│ 0 ┼ ⣿ ▁█ é", plain) == "| 0 + * _# ?"
    assert encodable("│", io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) == "│"


def test_choices_and_suggestions() -> None:
    assert [either(divisors(n)) for n in (1, 2, 4)] == ["1", "1 or 2", "1, 2 or 4"]
    clusters = ["v100-32g", "h100-80g-dgx", "laptop"]
    assert "'h100-80g-dgx'" in nearest("h100", clusters) and "'laptop'" in nearest("labtop", clusters)
    assert nearest("mamba", ["llama", "qwen2"]) == "" and nearest("help", ["schedule", "layout"]) == ""
