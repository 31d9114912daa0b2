"""Choosing how gradients are sent from what was measured (`comm.reduce.adaptive`).

The first steps sum plainly. Then each candidate, from the mildest to the harshest, sums one bucket, and what a step
would take with it is compared: making messages delays the computing, and what is left of their way hides behind the
backward, as far as that is long enough. The mildest candidate is taken that no harsher one beats by much. What it
leaves out is kept (error feedback), whatever the candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.comm import ReduceConfig
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.compression.exchange import ExchangeReducer, codec_of
from meshwright.engine.sharding.compression.sizes import candidates
from meshwright.engine.sharding.reducers import PendingReduction

WORTH = 0.05  # of a step, that a harsher candidate must save
CHOICE, RANKS = "reduce.", "reduce.ranks"  # names of what a checkpoint holds of the choice


class Trial(NamedTuple):
    """A candidate, the seconds of a step's sums by it where nothing else is done, and those of them that its messages
    take to be made and read."""

    config: ReduceConfig
    seconds: float
    making: float

    def delay(self, room: float) -> float:
        """Returns by how much the sums make a step longer that can hide `room` seconds of them."""
        return self.making + max(0.0, self.seconds - self.making - room)


def best(trials: Sequence[Trial], room: float, step_s: float) -> Trial:
    """Returns the first of the candidates, which are in the order of what they leave out, that no other beats by a part
    `WORTH` of a step."""
    least = min(trial.delay(room) for trial in trials)
    return next(trial for trial in trials if trial.delay(room) <= least + WORTH * step_s)


class AdaptiveReducer(ExchangeReducer):
    """Sums plainly until it is told what to choose."""

    def __init__(self, config: ReduceConfig, seed: int) -> None:
        super().__init__(replace(config, adaptive=False, kind="topk"), seed)  # it keeps residuals, and cuts no block
        self.adaptive, self.choice = config, None  # type: tuple[ReduceConfig, ReduceConfig | None]
        self._owed: set[Bucket] = set()  # whose residuals are to be sent with the next plain sum

    @property
    def candidates(self) -> list[ReduceConfig]:
        return candidates(self.adaptive)

    @property
    def ranks(self) -> int:
        """The most ranks that sum a gradient."""
        return max((buffer.split.ranks for buffer in self.buffers), default=1)

    def choose(self, choice: ReduceConfig) -> None:
        self.choice = choice
        if choice.kind != "plain":
            self.codec = codec_of(choice)
            assert not self.codec.fills_gaps
            self._owed.clear()

    def is_plain(self, bucket: Bucket, group: Group) -> bool:
        return super().is_plain(bucket, group) or self.choice is None or self.choice.kind == "plain"

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if not bucket.stage:
            self._pay(bucket, grads, group)
        return super().all_reduce(bucket, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        self._pay(bucket, grads, group)
        return super().reduce_scatter(bucket, out, grads, group)

    def _pay(self, bucket: Bucket, grads: Tensor, group: Group) -> None:
        """Adds to a plain sum what a run that was elsewhere before, and compressed there, had left out."""
        if bucket not in self._owed or not self.is_plain(bucket, group):
            return
        self._owed.discard(bucket)
        low, _ = bucket.buffer.split.written(bucket.start, bucket.stop)
        for kept, start in ((self.residuals, bucket.start), (self.sum_residuals, low)):
            if bucket in kept:
                part = grads[start - bucket.start :][: kept[bucket].numel()]
                part.add_(kept[bucket].to(part.dtype), alpha=self.scale)
                kept[bucket].zero_()

    def counters(self) -> dict[str, float | None]:
        return {} if self.choice is None else {f"{CHOICE}{self.choice.kind}": self.choice.ratio, RANKS: self.ranks}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes the choice of the run that goes on, unless another number of ranks made it."""
        self.choice, self._owed = None, set(self.residuals)
        if counters.get(RANKS) == self.ranks:
            for each in self.candidates:
                if counters.get(f"{CHOICE}{each.kind}") == each.ratio:
                    self.choose(each)
