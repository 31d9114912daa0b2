"""A line on stderr that says how far a long job has come."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR = 24
TTY_SECONDS = 0.1
LOG_SECONDS = 10.0


class Progress:
    """Bytes done of a known total: one line redrawn on a terminal, else a line every ten seconds."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label, self._total = label, max(total, 1)
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._every = TTY_SECONDS if self._tty else LOG_SECONDS
        self._done, self._drawn = 0, False
        self._begin = self._last = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self._draw(now)

    def close(self) -> None:
        """Erase the bar, so that what is printed next begins a clean line."""
        if self._tty and self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self, now: float) -> str:
        seconds = max(now - self._begin, 1e-9)
        share = min(self._done / self._total, 1.0)
        left = seconds * (1 - share) / share if share else 0.0
        bar = ("#" * round(share * BAR)).ljust(BAR, ".")
        return (
            f"{self._label} [{bar}] {share:4.0%} {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, "
            f"{self._done / 1e6 / seconds:.1f} MB/s, {_clock(left)} left"
        )

    def _draw(self, now: float) -> None:
        text = self.line(now)
        self._stream.write(f"\r{text}\x1b[K" if self._tty else f"{text}\n")
        self._stream.flush()
        self._drawn = True


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
