"""Finds ranks that are slow step after step, and names them with the work in which they are slow. No torch.

A rank is compared with the ranks of its pipeline stage, which do the same work. Other programs on a machine make some
steps longer and none shorter, so the lower quartile of a rank's last steps counts. It must also be above the upper
quartile of the other ranks, which is far from their lower one on a busy machine, and it must stay above it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config.faults import FaultsConfig
from meshwright.engine.hooks import Hook
from meshwright.engine.result import StepResult
from meshwright.record.run_notes import SLOW, FaultNotes
from meshwright.spec.layout import Layout

WARM_UP = 3  # The first steps of a process are left out: they make objects that later steps reuse.
SHARE = 0.05  # A rank is named only if it costs at least this share of a step.


Values = NDArray[np.float64]


class SlowRanks(Hook):
    """Names slow ranks.

    Computing on an accelerator is timed only in some steps. Then all other steps find ranks that are slow in reading
    data, and the timed steps, compared among themselves, find ranks that are slow in computing.
    """

    def __init__(self, layout: Layout, config: FaultsConfig, notes: FaultNotes) -> None:
        stages = np.array([layout.coordinate(rank)["pp"] for rank in range(layout.world)])
        peers = [np.flatnonzero(stages == stage) for stage in range(layout.pp)]
        self.on = config.slow_factor > 0 and notes.writes and any(len(ranks) > 1 for ranks in peers)
        self.seen = 0
        self.is_sampled = False  # True if a step without timed computing was seen.
        self.since_timed = 0.0
        self.every_step, self.timed = _Watch(peers, config, notes), _Watch(peers, config, notes)

    def after(self, result: StepResult, last: bool) -> None:
        if not self.on or result.ranks is None:
            return
        self.seen += 1
        self.since_timed += result.step_time_s
        busy, data = np.array(result.ranks.busy_s), np.array(result.ranks.data_s)
        self.is_sampled |= not busy.size
        if self.seen <= WARM_UP:
            return
        if busy.size and self.is_sampled:
            self.timed.add(np.maximum(0.0, busy - data), np.zeros_like(data), result, self.since_timed)
            self.since_timed = 0.0
        elif busy.size:
            self.every_step.add(busy, data, result, result.step_time_s)
        else:
            # Only the time of reading is known for each rank, so the rest of the step is the same for all.
            rest = max(0.0, result.step_time_s - float(data.max(initial=0.0)))
            self.every_step.add(rest + data, data, result, result.step_time_s)


class _Watch:
    """Finds slow ranks in a sequence of comparable steps. A rank is named again only after it has recovered."""

    def __init__(self, peers: list[NDArray[np.int64]], config: FaultsConfig, notes: FaultNotes) -> None:
        self.peers, self.notes, self.factor, self.steps = peers, notes, config.slow_factor, config.slow_steps
        self.times: deque[tuple[Values, Values, float]] = deque(maxlen=config.slow_steps)
        self.least_s = config.slow_seconds
        self.lasting: dict[int, tuple[int, float]] = {}  # For each slow rank, the steps and seconds it has been slow.
        self.named: set[int] = set()

    def add(self, busy: Values, data: Values, result: StepResult, passed_s: float) -> None:
        """Examine the ranks' seconds in one more step, `passed_s` seconds after the step before."""
        self.times.append((busy, data, result.step_time_s))
        if len(self.times) == self.steps:
            busy, data = (_quartile([times[kind] for times in self.times]) for kind in (0, 1))
            worse = _quartile([times[0] for times in self.times], 3)
            step = float(_quartile([times[2] for times in self.times]))
            for peers in self.peers:
                self._compare(peers, busy, data, _median(worse[peers]), step, result, passed_s)

    def _compare(
        self, peers: NDArray[np.int64], busy: Values, data: Values, usual: float, step: float, result: StepResult,
        passed_s: float,
    ) -> None:  # fmt: skip
        """Compare the ranks of one stage. `usual`: seconds that its ranks may take in a longer step."""
        # Smaller times than this share can't be distinguished from zero.
        median = max(_median(busy[peers]), SHARE * step)
        is_slow = (busy > max(self.factor * median, usual)) & (busy - median > SHARE * step)
        slow = set(peers[is_slow[peers]].tolist())
        candidates = slow | (self.lasting.keys() | self.named) & set(peers.tolist())
        for rank in sorted(candidates):
            # A rank that is no longer slow loses its count here.
            steps, seconds = self.lasting.pop(rank, (0, 0.0))
            if rank in slow:
                steps, seconds = self.lasting[rank] = steps + 1, seconds + passed_s
                if steps >= max(1, self.steps // 2) and seconds >= self.least_s and rank not in self.named:
                    self.named.add(rank)
                    self._name(rank, float(busy[rank]), float(data[rank]) - _median(data[peers]), median, result)
            # Recovery needs a lower time than the limit, so that a rank near the limit is not named again and again.
            elif rank in self.named and busy[rank] < median * (1 + self.factor) / 2:
                self.named.remove(rank)
                self.notes.add(SLOW, f"rank {rank} is as fast as the others again", result.step, rank=rank)

    def _name(self, rank: int, busy: float, reading: float, median: float, result: StepResult) -> None:
        """Write an event for a slow rank. `reading`: the seconds that it reads data longer than the median."""
        work = "reading data" if 2 * reading > busy - median else "computing"
        axes = sorted(result.exposed_s, key=lambda axis: -result.exposed_s[axis])
        wait = f"; the others wait for it, most over {axes[0]}" if axes else ""
        text = f"rank {rank} takes {busy / median:.2f} times as long as the median of its stage ({median:.3g} s)"
        self.notes.add(SLOW, f"{text}: it is slow in {work}{wait}", result.step, rank=rank, slow_in=work)


def _quartile(values: Any, which: int = 1) -> Any:
    """Return the lower quartile over the steps, or another one, for each rank."""
    return np.sort(np.array(values), axis=0)[which * len(values) // 4]


def _median(values: Values) -> float:
    """Return the median; of an even number of values the lower of the two in the middle."""
    return float(np.sort(values)[(values.size - 1) // 2])
