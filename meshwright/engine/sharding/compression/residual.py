"""What all reducers that compress have in common: when they do, and what compression leaves out, the residual.

With error feedback everything that a rank leaves out of its gradient is added to its residual, and that to its gradient
of the next time. What is left out of a sum, where that is compressed again, is added to the same sum of the next time:
so it does not matter which rank makes it. At any time what has arrived and all that is kept are together the sum of all
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.comm import ReduceConfig
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.engine.sharding.compression.sizes import CompressionPlan

if TYPE_CHECKING:
    from meshwright.engine.sharding.reducers import SideTensors


# Sums whose second half waits, so that their first half has time to end while backward computes.
BEHIND = 2


class TwoHalves(Protocol):
    """A sum of two collectives, of which the second needs the first one's result."""

    def proceed(self) -> None:
        """Waits for the first and begins the second, unless that was done before."""


class Compressing(CompressionPlan):
    """What all reducers that compress have in common: when they do, the residual, one number for each element of a
    bucket on each rank, and when a sum's second half begins."""

    def __init__(self, config: ReduceConfig, seed: int) -> None:
        super().__init__(config)
        self.seed, self.step, self.scale = seed, 1, 1.0
        self.buffers: list[FlatBuffer] = []
        self.residuals: dict[Bucket, Tensor] = {}
        self.sum_residuals: dict[Bucket, Tensor] = {}  # what was left out of the sums that this rank makes for all
        self._halfway: list[TwoHalves] = []

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        self.buffers = [buffer for buffer in buffers if buffer.key.compressed and buffer.split.ranks > 1]
        for bucket in (bucket for buffer in self.buffers for bucket in buffer.buckets):
            if self.config.feeds_back:
                shape, like = bucket.stop - bucket.start, bucket.own_grads
                self.residuals[bucket] = torch.zeros(shape, dtype=wide(like.dtype), device=like.device)

    def begin_step(self, step: int, scale: float) -> None:
        self.step, self.scale = step, scale

    def is_plain(self, bucket: Bucket, group: Group) -> bool:
        """Whether a sum is made as it is: on one rank, and in the first steps."""
        return group.alone or self.step <= self.config.warmup_steps

    def with_residual(self, bucket: Bucket, grads: Tensor) -> Tensor:
        """Returns the gradients to send, in place where their precision allows, with what was left out before."""
        x = grads.to(wide(grads.dtype))
        residual = self.residuals.get(bucket)
        return x if residual is None else x.add_(residual, alpha=self.scale)

    def keep(self, bucket: Bucket, start: int, left_out: Tensor, anew: bool) -> None:
        """Adds what was left out of a range of the buffer to the residual, or sets it `anew`. What is not finite is
        not kept: such a step is skipped."""
        if (residual := self.residuals.get(bucket)) is None:
            return
        at = residual[start - bucket.start :][: left_out.numel()]
        left_out = finite(left_out)
        at.copy_(left_out.div_(self.scale)) if anew else at.add_(left_out, alpha=1 / self.scale)

    def begun(self, begun: TwoHalves) -> None:
        """Notes a sum whose first half has begun. Second halves begin in the same order on every rank."""
        self._halfway.append(begun)
        self.proceed(BEHIND)

    def proceed(self, behind: int = 0) -> None:
        """Begins the second halves of all sums but the last few."""
        while len(self._halfway) > behind:
            self._halfway.pop(0).proceed()

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        for buffer in self.buffers if self.residuals else []:
            yield "residual", buffer, [self.residuals[bucket] for bucket in buffer.buckets]
            if buffer.buckets[0] in self.sum_residuals:
                yield "residual.sums", buffer, [self.sum_residuals[bucket] for bucket in buffer.buckets]

    def side_states(self) -> Iterator[SideTensors]:
        return iter(())

    def counters(self) -> dict[str, float | None]:
        return {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        pass


def finite(left_out: Tensor) -> Tensor:
    return left_out.view(-1).nan_to_num(0.0, 0.0, 0.0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the precision in which sums are made and residuals kept."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
