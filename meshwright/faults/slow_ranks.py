"""Ranks that are slow, step after step: named, with what they are slow in. No torch.

A rank is compared with those that do the same work, the ranks of its pipeline stage. Other programs on a machine make
some steps longer and none shorter, so the lower quartile of a rank's last steps is looked at: it has to be above the
upper quartile of the others' too, which on a busy machine is far from the lower one, and to stay so.
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

WARM_UP = 3  # first steps of a process, which make what later ones reuse
SHARE = 0.05  # of a step that a rank must cost to be named


Values = NDArray[np.float64]


class SlowRanks(Hook):
    """Names slow ranks. A device is timed in some steps only: there, ranks that are slow in reading are found by every
    step, and those that are slow in computing by the timed ones, which are compared among themselves."""

    def __init__(self, layout: Layout, config: FaultsConfig, notes: FaultNotes) -> None:
        stages = np.array([layout.coordinate(rank)["pp"] for rank in range(layout.world)])
        peers = [np.flatnonzero(stages == stage) for stage in range(layout.pp)]
        self.on = config.slow_factor > 0 and notes.writes and any(len(each) > 1 for each in peers)
        self.seen, self.is_sampled, self.since_timed = 0, False, 0.0
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
        else:  # nothing but data can be told apart
            rest = max(0.0, result.step_time_s - float(data.max(initial=0.0)))
            self.every_step.add(rest + data, data, result, result.step_time_s)


class _Watch:
    """Names a rank once, and again after it was as fast as the others for a while."""

    def __init__(self, peers: list[NDArray[np.int64]], config: FaultsConfig, notes: FaultNotes) -> None:
        self.peers, self.notes, self.factor, self.steps = peers, notes, config.slow_factor, config.slow_steps
        self.times: deque[tuple[Values, Values, float]] = deque(maxlen=config.slow_steps)
        self.least_s = config.slow_seconds
        self.lasting: dict[int, tuple[int, float]] = {}  # steps, and seconds, for which a rank has been slow
        self.named: set[int] = set()

    def add(self, busy: Values, data: Values, result: StepResult, passed_s: float) -> None:
        """Looks at the ranks' seconds of one more step; `passed_s` have passed since the one before."""
        self.times.append((busy, data, result.step_time_s))
        if len(self.times) == self.steps:
            busy, data = (_quartile([each[kind] for each in self.times]) for kind in (0, 1))
            worse = _quartile([each[0] for each in self.times], 3)
            step = float(_quartile([each[2] for each in self.times]))
            for peers in self.peers:
                self._compare(peers, busy, data, _median(worse[peers]), step, result, passed_s)

    def _compare(
        self, peers: NDArray[np.int64], busy: Values, data: Values, usual: float, step: float, result: StepResult,
        passed_s: float,
    ) -> None:  # fmt: skip
        """`usual`: what a rank of the stage may take in a longer step."""
        middle = max(_median(busy[peers]), SHARE * step)  # less can't be told from nothing
        is_slow = (busy > max(self.factor * middle, usual)) & (busy - middle > SHARE * step)
        slow = set(peers[is_slow[peers]].tolist())
        own = slow | (self.lasting.keys() | self.named) & set(peers.tolist())
        for rank in sorted(own):
            steps, seconds = self.lasting.pop(rank, (0, 0.0))
            if rank in slow:
                steps, seconds = self.lasting[rank] = steps + 1, seconds + passed_s
                if steps >= max(1, self.steps // 2) and seconds >= self.least_s and rank not in self.named:
                    self.named.add(rank)
                    self._name(rank, float(busy[rank]), float(data[rank]) - _median(data[peers]), middle, result)
            elif rank in self.named and busy[rank] < middle * (1 + self.factor) / 2:
                self.named.remove(rank)
                self.notes.add(SLOW, f"rank {rank} is as fast as the others again", result.step, rank=rank)

    def _name(self, rank: int, busy: float, reading: float, middle: float, result: StepResult) -> None:
        what = "reading data" if 2 * reading > busy - middle else "computing"
        axes = sorted(result.exposed_s, key=lambda axis: -result.exposed_s[axis])
        wait = f"; the others wait for it, most over {axes[0]}" if axes else ""
        text = f"rank {rank} takes {busy / middle:.2f} times as long as the median of its stage ({middle:.3g} s)"
        self.notes.add(SLOW, f"{text}: it is slow in {what}{wait}", result.step, rank=rank, slow_in=what)


def _quartile(values: Any, which: int = 1) -> Any:
    """The lower or another quartile over the steps, rank by rank."""
    return np.sort(np.array(values), axis=0)[which * len(values) // 4]


def _median(values: Values) -> float:
    """The lower one of two."""
    return float(np.sort(values)[(values.size - 1) // 2])
