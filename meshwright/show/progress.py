"""Show the progress of a long job on stderr: a bar on a terminal, else a line every ten seconds. No torch."""

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
def progress(
    label: str, total: int, stream: TextIO | None = None, unit: str = ""
) -> Iterator[Callable[[int], None]]:  # fmt: skip
    """Show how many of `total` bytes are done while the body runs; with `unit`, how many of these.

    Yields a function to call with the number newly done. A bar is erased at the end, so that later output
    begins on a clean line.
    """
    stream = sys.stderr if stream is None else stream
    if not is_terminal(stream):
        yield _log(label, max(total, 1), stream, unit)
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.TaskProgressColumn(),
        *([bars.MofNCompleteColumn()] if unit else [bars.DownloadColumn(), bars.TransferSpeedColumn()]),
        bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=console_for(stream), transient=True) as drawn:
        yield partial(drawn.advance, drawn.add_task(label, total=max(total, 1)))


@contextmanager
def searching(label: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """Show on a terminal how far a search is while the body runs, and its best result so far.

    Yields a function to call with the number of things done, the number of all, and the best result in words.
    """
    stream = sys.stderr if stream is None else stream
    if not is_terminal(stream):
        yield lambda done, total, best: None
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.TaskProgressColumn(),
        bars.TextColumn("{task.fields[best]}", markup=False),
    )  # fmt: skip
    with bars.Progress(*columns, console=console_for(stream), transient=True) as drawn:
        task = drawn.add_task(label, total=1, best="")
        yield lambda done, total, best: drawn.update(task, completed=done, total=max(total, 1), best=best)


def _log(label: str, total: int, stream: TextIO, unit: str) -> Callable[[int], None]:
    """Return the function that adds to the count and writes a line every ten seconds."""
    done = 0
    begin = last = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= LOG_SECONDS:
            last = now
            share = min(done / total, 1.0)
            seconds = now - begin
            left = seconds * (1 - share) / share if share else 0.0
            amount = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {done / 1e6 / seconds:.1f} MB/s"
            amount = f"{done:,} of {total:,} {unit}" if unit else amount
            stream.write(f"{label} {percent(share, 0)}, {amount}, {clock(left)} left\n")
            stream.flush()

    return advance
