"""How fast a run is: tokens and seconds of its last steps, its model's FLOP/s, and their share of what the devices
could do (MFU). No torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RECENT = 50  # steps over which a run's speed is taken
BEGINS = ("start", "resume")  # the events with which a process begins


@dataclass(frozen=True)
class Speed:
    """What it takes to turn seconds into FLOP/s. The FLOPs are the model's: forward and backward of whole sequences,
    full attention, nothing that is computed again. `peak` is the dense rate of one device; None: not known."""

    flops_per_sample: float
    peak: float | None

    def of(self, samples: int, seconds: float, world: int) -> tuple[float, float | None]:
        """Model TFLOP/s of all ranks together, and the MFU."""
        rate = self.flops_per_sample * samples / seconds
        return rate / 1e12, rate / (self.peak * world) if self.peak else None


@dataclass(frozen=True)
class Pace:
    """The one speed of a run that its display, its summary, `status` and its page show: the means of its last `steps`
    steps. `tokens_per_s` are tokens through the model over the seconds of the steps alone; from `wall_s`, the seconds
    from step to step with the validations and saves between them, the time that is left is estimated."""

    first: int  # the place of the first of them among all steps that the run has
    count: int
    tokens_per_s: float
    step_s: float
    wall_s: float

    @property
    def steps(self) -> slice:
        return slice(self.first, self.first + self.count)


def pace_of(
    steps: Sequence[float], tokens: Sequence[float], seconds: Sequence[float], ends: Sequence[float],
    begins: Sequence[int] = (),
) -> Pace | None:  # fmt: skip
    """The speed of a run, from what its steps say and the steps from which its processes went on. Only steps of its
    newest process count, without the first, which makes what later ones reuse; None without a step."""
    if not len(steps):
        return None
    begun = next((step for step in reversed(begins) if step < steps[-1]), 0)
    first = bisect_right(steps, begun)
    warm = len(steps) - first > 1
    first = max(first + warm, len(steps) - RECENT)
    count = len(steps) - first
    took = float(np.nansum(seconds[first:]))
    wall = float(ends[-1] - ends[first - 1]) / count if warm else math.nan
    rate = float(np.nansum(tokens[first:])) / took if took > 0 else 0.0
    return Pace(first, count, rate, took / count, wall if wall >= 0 else took / count)


def pace_of_lines(lines: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> Pace | None:
    """The same of a run's lines of metrics.jsonl and its events."""

    def column(key: str) -> list[float]:
        return [math.nan if line.get(key) is None else float(line[key]) for line in lines]

    ends, begins = column("time"), begins_of(events)
    return pace_of(column("step"), column("tokens"), column("step_time_s"), ends, begins)


def begins_of(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """The steps from which the processes of a run went on, by its events."""
    return [int(event.get("step") or 0) for event in events if event.get("kind") in BEGINS]
