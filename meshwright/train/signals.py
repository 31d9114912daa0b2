"""A scheduler's request to stop: SIGTERM or SIGUSR1 ask for a checkpoint and a clean end at the next step."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# A scheduler may signal a launcher and its ranks, and the launcher passes on what it gets: within so many seconds all
# of them are one request.
SAME_REQUEST_S = 5.0


class StopRequests:
    """While entered, `seen` says whether one of the signals has come. One that comes later than the first request ends
    the process as usual. What an outer one has seen, an inner one knows."""

    def __init__(self, after: Any = None) -> None:
        """`after`: how the signals are handled when this is left (None: as before)."""
        self._since: float | None = None
        self._after = after
        self._before: dict[int, Any] = {}

    @property
    def seen(self) -> bool:
        return self._since is not None

    def request(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                before = self._before[number] = signal.signal(number, self._note)
                outer = getattr(before, "__self__", None)
                if isinstance(outer, StopRequests) and outer.seen:
                    self.request()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._since is not None and time.monotonic() - self._since > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.request()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if self._after is None else self._after)
