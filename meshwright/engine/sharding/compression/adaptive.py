"""Adaptive compression: choose the format of gradient messages from measurements (`comm.reduce.adaptive`).

The first steps sum without compression. Then each candidate, from the mildest to the harshest, sums one bucket, and the
resulting step times are compared. Compressing and decompressing delays compute, while the transfer overlaps with
backward as far as backward is long enough. The mildest candidate is chosen that no harsher one beats by much. All
candidates use error feedback.
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

MIN_SAVING = 0.05  # the share of a step that a harsher candidate must save
CHOICE, RANKS = "reduce.", "reduce.ranks"  # the names of the choice and of the number of ranks in a checkpoint


class Trial(NamedTuple):
    """The measurements of a candidate.

    `seconds` is the time of all sums of a step if nothing else runs, and `making` the part of it for compressing and
    decompressing messages.
    """

    config: ReduceConfig
    seconds: float
    making: float

    def delay(self, room: float) -> float:
        """Return the seconds by which the sums prolong a step in which `room` seconds of transfer can overlap."""
        return self.making + max(0.0, self.seconds - self.making - room)


def best(trials: Sequence[Trial], room: float, step_s: float) -> Trial:
    """Return the first candidate that no other beats by more than `MIN_SAVING` of a step.

    `trials` are ordered from the mildest to the harshest.
    """
    least = min(trial.delay(room) for trial in trials)
    return next(trial for trial in trials if trial.delay(room) <= least + MIN_SAVING * step_s)


class AdaptiveReducer(ExchangeReducer):
    """A reducer that sums without compression until `choose` sets a candidate."""

    def __init__(self, config: ReduceConfig, seed: int) -> None:
        # Until the choice, behave as top-k, which has residuals and aligns parameters to blocks.
        super().__init__(replace(config, adaptive=False, kind="topk"), seed)
        self.adaptive, self.choice = config, None  # type: tuple[ReduceConfig, ReduceConfig | None]
        self._owed: set[Bucket] = set()  # buckets whose residuals are added to their next plain sum

    @property
    def candidates(self) -> list[ReduceConfig]:
        return candidates(self.adaptive)

    @property
    def ranks(self) -> int:
        """The largest number of ranks that sum a gradient."""
        return max((buffer.split.ranks for buffer in self.buffers), default=1)

    def choose(self, choice: ReduceConfig) -> None:
        self.choice = choice
        if choice.compresses:
            self.codec = codec_of(choice)
            assert not self.codec.fills_gaps
            self._owed.clear()

    def is_plain(self, bucket: Bucket, group: Group) -> bool:
        return super().is_plain(bucket, group) or self.choice is None or not self.choice.compresses

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if not bucket.stage:
            self._pay(bucket, grads, group)
        return super().all_reduce(bucket, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        self._pay(bucket, grads, group)
        return super().reduce_scatter(bucket, out, grads, group)

    def _pay(self, bucket: Bucket, grads: Tensor, group: Group) -> None:
        """Add a residual to a plain sum, if this run resumed one that compressed with another number of ranks."""
        if bucket not in self._owed or not self.is_plain(bucket, group):
            return
        self._owed.discard(bucket)
        low, _ = bucket.buffer.split.written(bucket.start, bucket.stop)
        for residuals, start in ((self.residuals, bucket.start), (self.sum_residuals, low)):
            if bucket in residuals:
                part = grads[start - bucket.start :][: residuals[bucket].numel()]
                part.add_(residuals[bucket].to(part.dtype), alpha=self.scale)
                residuals[bucket].zero_()

    def counters(self) -> dict[str, float | None]:
        return {} if self.choice is None else {f"{CHOICE}{self.choice.kind}": self.choice.ratio, RANKS: self.ranks}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Restore the choice of the resumed run, unless it was made with another number of ranks."""
        # The checkpoint's residuals must not get lost if this run does not compress (`choose` clears them otherwise).
        self.choice, self._owed = None, set(self.residuals)
        if counters.get(RANKS) == self.ranks:
            for candidate in self.candidates:
                if counters.get(f"{CHOICE}{candidate.kind}") == candidate.ratio:
                    self.choose(candidate)
