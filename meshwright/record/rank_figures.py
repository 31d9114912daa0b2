"""What each rank did in a step, beside the sums over all of them: how long it computed, how long it waited for others
and for data, and the most memory that it held. No torch."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.spec.layout import Layout
from meshwright.spec.traffic.counts import RANK_COUNTS

RANKS_FILE = "ranks.json"
WRITTEN_EVERY_S = 5.0
SMOOTHING = 0.2  # of a rank's seconds, the share of the newest step in the mean that is written


def process_peak_bytes() -> int:
    """Returns the most memory that this process held so far, torch itself included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@dataclass(frozen=True)
class RankFigures:
    """The figures of a step by rank. Seconds are those of the host and `data_s` are a part of `busy_s`. On an
    accelerator, which the host does not wait for, `busy_s` and `waited_s` are those of the device's stream in a step
    that was timed two steps before (`engine/stream_waits.py`), as `data_s` are then; in other steps they are empty."""

    busy_s: Sequence[float]
    waited_s: Sequence[float]
    data_s: Sequence[float]
    peak_bytes: Sequence[float]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> RankFigures:
        """From the ranks' part of the counts that a step sums."""
        width = len(RANK_COUNTS)
        busy, waited, data, peak, _ = (numbers[i::width] for i in range(width))
        times = [[n / 1e6 for n in own] for own in (busy, waited)] if any(busy) else [[], []]
        return cls(times[0], times[1], [n / 1e6 for n in data], peak)

    def summary(self) -> dict[str, dict[str, float]]:
        """The least, the median and the most over the ranks, and which rank has the most."""
        return {name: _spread(values) for name, values in vars(self).items() if any(values)}


def check_opened(numbers: Sequence[int], layout: Layout, step: int) -> None:
    """Raises where ranks that hold parts of the same weights opened different units in ZeRO stage 3, by their checksums
    in the ranks' part of the counts. (Ranks that are not there, in a dry run, have none.)"""
    opened = numbers[len(RANK_COUNTS) - 1 :: len(RANK_COUNTS)]
    if len(set(opened)) <= 1:
        return
    first: dict[tuple[int, int], int] = {}
    for rank, (place, own) in enumerate(zip(_places(layout), opened, strict=True)):
        other = first.setdefault(place, rank) if own else rank
        if own != opened[other]:
            raise UserError(
                f"ranks {other} and {rank} went through different blocks in step {step}, and in ZeRO stage 3 each got "
                "parts of the other's weights: let all ranks go through the same blocks (no dropping of layers at "
                "random, no choice by the data), or set zero.stage=2"
            )


@lru_cache(maxsize=8)
def _places(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Returns the replica of each rank, which may have another number of micro-batches than others, and its pipeline
    stage."""
    each = layout.world // layout.replicas
    return tuple((rank // each, layout.coordinate(rank)["pp"]) for rank in range(layout.world))


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered, most = sorted(values), max(range(len(values)), key=values.__getitem__)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1], "rank": most}


class RankFile:
    """`ranks.json`: every rank's figures, its seconds as running means; replaced every few seconds."""

    def __init__(self, folder: Path) -> None:
        self.path, self.written = folder / RANKS_FILE, 0.0
        self.means: dict[str, list[float]] = {"busy_s": [], "waited_s": [], "data_s": []}

    def add(self, step: int, figures: RankFigures, last: bool) -> None:
        for name, means in self.means.items():
            now: Sequence[float] = getattr(figures, name)
            if not now:  # of an accelerator, which is timed in some steps only
                continue
            kept = zip(means or now, now, strict=True)
            self.means[name] = [(1 - SMOOTHING) * mean + SMOOTHING * new for mean, new in kept]
        if last or time.monotonic() - self.written >= WRITTEN_EVERY_S:
            self.written = time.monotonic()
            found: dict[str, Any] = {"step": step, "time": time.time()} | self.means
            aside = self.path.with_suffix(".part")
            aside.write_text(json.dumps(found | {"peak_bytes": list(figures.peak_bytes)}), encoding="utf-8")
            aside.replace(self.path)  # whole or not at all; what a crash loses is written again
