"""Report a loss and run the last actions before the watchdog ends a process. No torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

LAUNCHER_SEES_S = 2.0  # a rank that lost its peers waits so long before it ends: the launcher sees first who was lost

Report = Callable[[str], None]

_last_acts: list[Callable[[], None]] = []


@contextlib.contextmanager
def before_sudden_end(act: Callable[[], None]) -> Iterator[None]:
    """Register `act` for the duration of the context. A watchdog thread calls it before it ends the process."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def act_before_end() -> None:
    """Calls the acts of `before_sudden_end`."""
    for act in list(_last_acts):
        with contextlib.suppress(Exception):  # nothing may keep a rank from its end
            act()


_reports: list[Report] = []  # at most one: how the launcher that started this process hears of a loss


def report_losses_by(report: Report) -> None:
    """Send loss reports to the launcher instead of stderr, since the launcher knows best which rank died."""
    _reports[:] = [report]


def report_loss(text: str, speaks: bool) -> None:
    """Tells the launcher of a loss. Without one that listens, the rank that `speaks` for all writes it to stderr."""
    if _reports:
        with contextlib.suppress(OSError):
            _reports[0](text)
    elif speaks:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"meshwright: {text}\n")
            sys.stderr.flush()
