"""The base class of compressing reducers: it decides when to compress, and manages residuals (error feedback).

With error feedback, the error of compressing a rank's gradient is stored in its residual, which is added to its next
gradient. If a sum is compressed again, that error is added to the next sum of the same elements, so it does not matter
which rank computes the sum. At any time, the decoded sums and all residuals add up to the sum of all gradients.
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


# The number of sums whose second half is delayed, so that their first half can finish during backward.
DELAYED_SUMS = 2


class TwoPhaseSum(Protocol):
    """A sum of two collectives, the second of which needs the result of the first."""

    def proceed(self) -> None:
        """Wait for the first collective and begin the second."""


class CompressingReducer(CompressionPlan):
    """The base class of reducers that compress.

    It holds the residuals, with one number for each element of a bucket on each rank. It decides when sums are
    compressed and when the second half of a sum begins.
    """

    def __init__(self, config: ReduceConfig, seed: int) -> None:
        super().__init__(config)
        self.seed, self.step, self.scale = seed, 1, 1.0
        self.buffers: list[FlatBuffer] = []
        self.residuals: dict[Bucket, Tensor] = {}
        self.sum_residuals: dict[Bucket, Tensor] = {}  # of the sums that this rank computes for all ranks
        self._halfway: list[TwoPhaseSum] = []

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        self.buffers = [buffer for buffer in buffers if buffer.key.compressed and buffer.split.ranks > 1]
        for bucket in (bucket for buffer in self.buffers for bucket in buffer.buckets):
            if self.config.feeds_back:
                shape = bucket.stop - bucket.start
                like = bucket.own_grads
                self.residuals[bucket] = torch.zeros(shape, dtype=wide(like.dtype), device=like.device)

    def begin_step(self, step: int, scale: float) -> None:
        self.step, self.scale = step, scale

    def is_plain(self, bucket: Bucket, group: Group) -> bool:
        """Return True if a sum is not compressed: on one rank, and in the first steps."""
        return group.alone or self.step <= self.config.warmup_steps

    def with_residual(self, bucket: Bucket, grads: Tensor) -> Tensor:
        """Return the gradients plus the residual, in the same tensor if its precision allows."""
        x = grads.to(wide(grads.dtype))
        residual = self.residuals.get(bucket)
        return x if residual is None else x.add_(residual, alpha=self.scale)

    def keep(self, bucket: Bucket, start: int, left_out: Tensor, replaces: bool) -> None:
        """Add the error of a range of the buffer to the residual, or, with `replaces`, replace the residual.

        Numbers that are not finite are stored as zero, because such a step is skipped.
        """
        if (residual := self.residuals.get(bucket)) is None:
            return
        stored = residual[start - bucket.start :][: left_out.numel()]
        left_out = finite(left_out)
        # Residuals are stored without the loss scale, which may change between steps.
        if replaces:
            stored.copy_(left_out.div_(self.scale))
        else:
            stored.add_(left_out, alpha=1 / self.scale)

    def register(self, begun: TwoPhaseSum) -> None:
        """Register a sum whose first half has begun. Second halves begin in the same order on every rank."""
        self._halfway.append(begun)
        self.proceed(DELAYED_SUMS)

    def proceed(self, behind: int = 0) -> None:
        """Begin the second halves of all sums except the last `behind`."""
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
    """Return the dtype in which sums are computed and residuals stored: float32 or wider."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
