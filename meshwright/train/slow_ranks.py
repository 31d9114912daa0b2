"""Ranks that are slow, step after step: named, with what they are slow in. No torch.

A rank is compared with those that do the same work, the ranks of its pipeline stage. Other programs on a machine make
some steps longer and none shorter, so the lower quartile of a rank's last steps is looked at, and it has to stay slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from meshwright.config.faults import FaultsConfig
from meshwright.layout import Layout
from meshwright.train.fault_notes import SLOW, FaultNotes
from meshwright.train.loop import Hook
from meshwright.train.result import StepResult

WARM_UP = 3  # first steps of a process, which make what later ones reuse
SHARE = 0.05  # of a step that a rank must cost to be named


class SlowRanks(Hook):
    """Names a rank once, and again after it was as fast as the others for a while."""

    def __init__(self, layout: Layout, config: FaultsConfig, notes: FaultNotes) -> None:
        self.notes, self.factor, self.steps = notes, config.slow_factor, config.slow_steps
        stages = [layout.coordinate(rank)["pp"] for rank in range(layout.world)]
        self.peers = [[r for r, stage in enumerate(stages) if stage == at] for at in range(layout.pp)]
        self.on = config.slow_factor > 0 and notes.writes and any(len(peers) > 1 for peers in self.peers)
        self.seen = 0
        self.times: deque[tuple[Sequence[float], Sequence[float], float]] = deque(maxlen=config.slow_steps)
        self.least_s = config.slow_seconds
        self.lasting: dict[int, tuple[int, float]] = {}  # steps, and seconds, for which a rank has been slow
        self.named: set[int] = set()

    def after(self, result: StepResult, last: bool) -> None:
        if not self.on or result.ranks is None:
            return
        self.seen += 1
        if self.seen <= WARM_UP:
            return
        busy, data = result.ranks.busy_s, result.ranks.data_s
        if not busy:  # on an accelerator: what is not data can't be told apart
            rest = max(0.0, result.step_time_s - max(data, default=0.0))
            busy = [rest + waited for waited in data]
        self.times.append((busy, data, result.step_time_s))
        if len(self.times) == self.steps:
            for peers in self.peers:
                self._compare(peers, result)

    def _compare(self, peers: Sequence[int], result: StepResult) -> None:
        busy = {rank: _quartile([each[0][rank] for each in self.times]) for rank in peers}
        data = {rank: _quartile([each[1][rank] for each in self.times]) for rank in peers}
        step = _quartile([each[2] for each in self.times])
        middle = max(statistics.median_low(busy.values()), SHARE * step)  # less can't be told from nothing
        for rank in peers:
            slow = busy[rank] > self.factor * middle and busy[rank] - middle > SHARE * step
            steps, seconds = self.lasting.get(rank, (0, 0.0))
            steps, seconds = (steps + 1, seconds + result.step_time_s) if slow else (0, 0.0)
            self.lasting[rank] = steps, seconds
            if steps >= max(1, self.steps // 2) and seconds >= self.least_s and rank not in self.named:
                self.named.add(rank)
                self._name(rank, busy, data, middle, result)
            elif not slow and rank in self.named and busy[rank] < middle * (1 + self.factor) / 2:
                self.named.remove(rank)
                self.notes.add(SLOW, f"rank {rank} is as fast as the others again", result.step, rank=rank)

    def _name(
        self, rank: int, busy: Mapping[int, float], data: Mapping[int, float], middle: float, result: StepResult
    ) -> None:
        reading = data[rank] - statistics.median_low(data.values())
        what = "reading data" if 2 * reading > busy[rank] - middle else "computing"
        axes = sorted(result.exposed_s, key=lambda axis: -result.exposed_s[axis])
        wait = f"; the others wait for it, most over {axes[0]}" if axes else ""
        text = f"rank {rank} takes {busy[rank] / middle:.2f} times as long as the median of its stage ({middle:.3g} s)"
        self.notes.add(SLOW, f"{text}: it is slow in {what}{wait}", result.step, rank=rank, slow_in=what)


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]
