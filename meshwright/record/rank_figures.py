"""Record the figures of each rank in a step: its compute time, its waits for other ranks and for data, its peak memory.

They complement the step's metrics, which are sums over all ranks. No torch.
"""

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
SMOOTHING = 0.2  # weight of the newest step in the running means of a rank's seconds


def process_peak_bytes() -> int:
    """Return the peak memory of this process so far, including torch itself."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is bytes on macOS and KiB on Linux.
    return peak if sys.platform == "darwin" else 1024 * peak


@dataclass(frozen=True)
class RankFigures:
    """The figures of all ranks in a step; each field has one number per rank.

    On a CPU, seconds are measured by the host, and `data_s` is part of `busy_s`. The host does not wait for an
    accelerator, so there all seconds belong to the step two steps earlier, if that one was timed on the device's
    stream (`engine/stream_waits.py`). In other steps `busy_s` and `waited_s` are empty.
    """

    busy_s: Sequence[float]
    waited_s: Sequence[float]
    data_s: Sequence[float]
    peak_bytes: Sequence[float]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> RankFigures:
        """Convert the ranks' part of the counts that a step sums over all ranks."""
        width = len(RANK_COUNTS)
        busy, waited, data, peak, _ = (numbers[i::width] for i in range(width))
        times = [[n / 1e6 for n in microseconds] for microseconds in (busy, waited)] if any(busy) else [[], []]
        return cls(times[0], times[1], [n / 1e6 for n in data], peak)

    def summary(self) -> dict[str, dict[str, float]]:
        """Return the minimum, median and maximum over the ranks, and the rank with the maximum, for each figure."""
        return {name: _spread(values) for name, values in vars(self).items() if any(values)}


def check_opened(numbers: Sequence[int], layout: Layout, step: int) -> None:
    """Raise a UserError if ranks that shard the same weights all-gathered different units in ZeRO stage 3.

    `numbers` is the ranks' part of the step's counts. It has a checksum of the units that each rank gathered, which is
    0 for ranks that are absent in a dry run.
    """
    checksums = numbers[len(RANK_COUNTS) - 1 :: len(RANK_COUNTS)]
    if len(set(checksums)) <= 1:
        return
    first: dict[tuple[int, int], int] = {}
    for rank, (place, checksum) in enumerate(zip(_places(layout), checksums, strict=True)):
        other = first.setdefault(place, rank) if checksum else rank
        if checksum != checksums[other]:
            raise UserError(
                f"ranks {other} and {rank} went through different blocks in step {step}, and in ZeRO stage 3 each got "
                "parts of the other's weights: let all ranks go through the same blocks (no dropping of layers at "
                "random, no choice by the data), or set zero.stage=2"
            )


@lru_cache(maxsize=8)
def _places(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return the replica and the pipeline stage of each rank. Replicas may have different numbers of micro-batches."""
    replica_ranks = layout.world // layout.replicas
    return tuple((rank // replica_ranks, layout.coordinate(rank)["pp"]) for rank in range(layout.world))


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    most = max(range(len(values)), key=values.__getitem__)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1], "rank": most}


class RankFile:
    """A writer of `ranks.json`: the figures of every rank, with running means of the seconds, every few seconds."""

    def __init__(self, folder: Path) -> None:
        self.path, self.written = folder / RANKS_FILE, 0.0
        self.means: dict[str, list[float]] = {"busy_s": [], "waited_s": [], "data_s": []}

    def add(self, step: int, figures: RankFigures, last: bool) -> None:
        for name, means in self.means.items():
            now: Sequence[float] = getattr(figures, name)
            if not now:  # an accelerator is timed in some steps only
                continue
            pairs = zip(means or now, now, strict=True)
            self.means[name] = [(1 - SMOOTHING) * mean + SMOOTHING * new for mean, new in pairs]
        if last or time.monotonic() - self.written >= WRITTEN_EVERY_S:
            self.written = time.monotonic()
            content: dict[str, Any] = {"step": step, "time": time.time()} | self.means
            # The rename makes the file complete for readers. It is not synced: after a crash it is written again.
            aside = self.path.with_suffix(".part")
            aside.write_text(json.dumps(content | {"peak_bytes": list(figures.peak_bytes)}), encoding="utf-8")
            aside.replace(self.path)
