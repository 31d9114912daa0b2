"""Shifts `time.monotonic` in every Python process that has this folder on its path, for `pytest --clock-offset`.

A clock that counts from the start of the machine is small on some machines and large on others, and floating-point
differences of large times are rounded. A test must pass on all of them. Python imports a module of this name when it
starts, so ranks, launchers and commands have the same clock as the tests.
"""

from __future__ import annotations

import os
import time

VARIABLE = "MESHWRIGHT_TEST_CLOCK_OFFSET"


def shift() -> None:
    """Shift the clock by the seconds that the environment names, once."""
    offset = float(os.environ.get(VARIABLE, "0"))
    real = time.monotonic
    if offset and not hasattr(time, "unshifted"):
        time.unshifted = real  # type: ignore[attr-defined]
        time.monotonic = lambda: real() + offset


shift()
