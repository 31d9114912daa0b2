"""The progress of a long job, on stderr: a bar on a terminal, else a line every ten seconds. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from meshwright.show.terminal import console_for, is_terminal
from meshwright.show.units import clock, percent

LOG_SECONDS = 10.0


@contextmanager
def progress(label: str, total: int, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` bytes are done while the block runs; it yields the function to call with each further
    number of bytes. A bar is erased at the end, so that later output begins on a clean line."""
    stream = sys.stderr if stream is None else stream
    if not is_terminal(stream):
        yield _Log(label, max(total, 1), stream).advance
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.TaskProgressColumn(),
        bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console_for(stream), transient=True) as drawn:
        yield partial(drawn.advance, drawn.add_task(label, total=max(total, 1)))


class _Log:
    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label, self._total, self._stream = label, total, stream
        self._done = 0
        self._begin = self._last = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last >= LOG_SECONDS:
            self._last = now
            self._stream.write(self._line(max(now - self._begin, 1e-9)) + "\n")
            self._stream.flush()

    def _line(self, seconds: float) -> str:
        share = min(self._done / self._total, 1.0)
        left = seconds * (1 - share) / share if share else 0.0
        return (
            f"{self._label} {percent(share, 0)}, {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, "
            f"{self._done / 1e6 / seconds:.1f} MB/s, {clock(left)} left"
        )
