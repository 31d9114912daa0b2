"""Compute the speed of a run: tokens and seconds of its last steps, model FLOP/s, and their share of the peak (MFU).

No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RECENT = 50  # steps over which a run's speed is averaged, at most
BEGINS = ("start", "resume")  # kinds of events that begin a process


@dataclass(frozen=True)
class Speed:
    """The constants that convert seconds to FLOP/s.

    `flops_per_sample` are model FLOPs: forward and backward of whole sequences with full attention, without
    recomputation. `peak` is the dense FLOP/s of one device, or None if it is not known.
    """

    flops_per_sample: float
    peak: float | None

    def of(self, samples: int, seconds: float, world: int) -> tuple[float, float | None]:
        """Return the model TFLOP/s of all ranks together, and the MFU (None if the peak is not known)."""
        rate = self.flops_per_sample * samples / seconds
        return rate / 1e12, rate / (self.peak * world) if self.peak else None


@dataclass(frozen=True)
class RunSpeed:
    """The speed of a run as its display, summary, `status` and page all show it: means over its last `count` steps."""

    first: int  # index of the first of these steps in the run's list of steps
    count: int
    tokens_per_s: float  # tokens over the seconds of the steps alone
    step_s: float
    wall_s: float  # from step to step, with validations and saves in between; used to estimate the remaining time

    @property
    def steps(self) -> slice:
        """The slice of the run's list of steps that these means cover."""
        return slice(self.first, self.first + self.count)


def pace_of(
    steps: Sequence[float], tokens: Sequence[float], seconds: Sequence[float], ends: Sequence[float],
    begins: Sequence[int] = (),
) -> RunSpeed | None:  # fmt: skip
    """Return the speed of a run from the columns of its steps, or None without a step.

    `begins` are the steps that its processes resumed from. Only steps of the newest process count. Its first step is
    left out if there are others, because it fills caches and allocates memory that later steps reuse.
    """
    if not len(steps):
        return None
    resumed_from = next((step for step in reversed(begins) if step < steps[-1]), 0)
    first = bisect_right(steps, resumed_from)
    warm = len(steps) - first > 1
    first = max(first + warm, len(steps) - RECENT)
    count = len(steps) - first
    took = float(np.nansum(seconds[first:]))
    # NaN without a step before the first one, and negative if a clock was set back: `step_s` is then used instead.
    wall = float(ends[-1] - ends[first - 1]) / count if warm else math.nan
    rate = float(np.nansum(tokens[first:])) / took if took > 0 else 0.0
    return RunSpeed(first, count, rate, took / count, wall if wall >= 0 else took / count)


def pace_of_lines(lines: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> RunSpeed | None:
    """Return the speed of a run from its lines of metrics.jsonl and its events."""

    def column(key: str) -> list[float]:
        return [math.nan if line.get(key) is None else float(line[key]) for line in lines]

    ends, begins = column("time"), begins_of(events)
    return pace_of(column("step"), column("tokens"), column("step_time_s"), ends, begins)


def begins_of(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the steps that the processes of a run resumed from (0 for a start), from its events."""
    return [int(event.get("step") or 0) for event in events if event.get("kind") in BEGINS]
