"""Waiting for a condition. A test never concludes anything from the time that something took.

`HANG_S` is the only guard against a hang. It is so long that no load of the machine reaches it, and never a
measurement.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

HANG_S = 240.0
LOOK_S = 0.01


def until(ready: Callable[[], Any], process: subprocess.Popen[str] | None = None, why: str = "no progress") -> None:
    """Wait until `ready()` is true. Fail if `process` ends first, or after `HANG_S`."""
    end = time.monotonic() + HANG_S
    while not ready():
        if process is not None:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, why
        time.sleep(LOOK_S)
