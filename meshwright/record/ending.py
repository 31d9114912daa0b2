"""Report a loss and run the last actions before the watchdog ends a process. No torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# A rank that lost its peers waits this long before it ends, so that the launcher first sees which rank was lost.
LAUNCHER_SEES_S = 2.0

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
    """Call the functions that `before_sudden_end` registered."""
    for act in list(_last_acts):
        with contextlib.suppress(Exception):  # no failure here may keep the process from ending
            act()


# At most one function, which reports a loss to the launcher that started this process.
_reports: list[Report] = []


def report_losses_by(report: Report) -> None:
    """Send loss reports to the launcher instead of stderr, since the launcher knows best which rank died."""
    _reports[:] = [report]


def report_loss(text: str, speaks: bool) -> None:
    """Report a loss to the launcher. If no launcher listens, the one rank with `speaks` writes it to stderr."""
    if _reports:
        with contextlib.suppress(OSError):
            _reports[0](text)
    elif speaks:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"meshwright: {text}\n")
            sys.stderr.flush()
