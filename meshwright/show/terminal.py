"""Detect the capabilities of an output stream, and make `rich` consoles and text tables that respect them. No torch."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, TextIO, cast

from meshwright.errors import notice

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 100  # columns of a page that is written to a file
STYLES = {
    "title": "bold color(75)", "bar": "color(75)", "curve": "color(80)", "loss": "bold color(80)",
    "valid": "bold color(220)", "bad": "bold color(203)", "good": "color(114)", "most": "color(214)",
    "data": "color(246)", "forward": "color(75)", "backward": "color(214)", "reduce": "color(141)",
    "optimizer": "color(114)",
}  # fmt: skip
UNLIMITED = 100_000  # columns of a table that is not shown on a terminal, so that it is never wrapped

# ASCII replacements for streams that can't encode these characters; a braille cell with any dot becomes a star.
ASCII: dict[int, int] = {0x2800: ord(" ")} | {0x2800 + dots: ord("*") for dots in range(1, 256)}
ASCII |= str.maketrans("▁▂▃▄▅▆▇█━╸╺·×→⇄…⋮◆•", "_.-~=+*###.-x>=~:o.")
ASCII |= str.maketrans("╵╷│╴┘┐┤╶└┌├─┴┬┼", "'.|-'.|-'.|-+++")


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can redraw."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def terminal_width(otherwise: int) -> int:
    """Return the columns of the terminal (or of $COLUMNS), or `otherwise` if there is none."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def encodable(text: str, stream: TextIO) -> str:
    """Return `text` in characters that `stream` can encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "replace").decode(encoding)


def printable(text: str) -> str:
    """Return untrusted `text` with a question mark for every character that could control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


class _Stream:
    """A stream whose writes never fail: a run must not end because its terminal went away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(encodable(text, self._stream))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def console_for(stream: TextIO, width: int | None = None) -> Console:
    """Return a console on `stream`: styled and redrawable on a terminal, plain text anywhere else."""
    from rich.console import Console
    from rich.theme import Theme

    live = is_terminal(stream)
    return Console(
        file=cast(IO[str], _Stream(stream)), force_terminal=live, force_jupyter=False, legacy_windows=False,
        color_system="auto" if has_colour(stream) else None, width=width or (None if live else PLAIN_WIDTH),
        highlight=False, markup=False, emoji=False, theme=Theme(STYLES),
    )  # fmt: skip


def show(console: Console, *parts: RenderableType) -> None:
    """Print `parts` below each other. Lines of text are never wrapped, and plain text has no trailing spaces."""
    from rich.text import Text

    with contextlib.nullcontext() if console.is_terminal else console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    # `rich` pads lines with spaces, which are removed from plain text.
    if captured is not None:
        console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
        console.file.flush()


def say_next(*commands: str) -> None:
    """Print on stderr the commands that users usually run next."""
    for number, command in enumerate(commands):
        notice(f"{'' if number else 'next:':<5} {command}")


def table(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,), indent: str = "  ") -> str:
    """Format rows of cells as a table, whose first row is the header.

    The columns `left` are left-aligned, all others right-aligned. On a terminal that is too narrow, the text in the
    left-aligned columns is wrapped.
    """
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for column in range(len(rows[0])):
        justify = "left" if column in left else "right"
        grid.add_column(justify=justify, no_wrap=column not in left)  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*row)
    width = terminal_width(80) - len(indent) if is_terminal(sys.stdout) else UNLIMITED
    out = io.StringIO()
    show(console_for(out, width), grid)
    return textwrap.indent(out.getvalue(), indent).removesuffix("\n")
