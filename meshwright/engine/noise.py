"""The gradient noise scale: the batch size up to which more samples per step shorten training in proportion.

McCandlish et al. (2018, arXiv 1812.06162, appendix A.1) estimate it from the gradients of two batch sizes. The small
batches are those whose gradients are summed anyway: each rank's share of a step or, with ZeRO 2 and 3, of each
micro-batch. With n small batches, s the mean square of their norms and b the square of the step's norm,

    |G|^2 = (n b - s) / (n - 1)    variance = B (s - b) / (n - 1)    noise scale = variance / |G|^2 in tokens

where B are the step's tokens. The ratio of two noisy numbers is biased, so both are smoothed before they are divided.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.device import Download
from meshwright.engine.context import Context
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.spec.layout.params import DATA_AXES
from meshwright.spec.traffic.placement import shard_axes

SMOOTHING = 0.95  # the factor of the earlier steps


class NoiseScale:
    """Measures the gradients of small batches before they are summed. `smoothed` are |G|^2 and the variance.

    It leaves out gradients that are partial sums over further axes, such as those of experts: there, no rank has the
    gradient of its samples alone.
    """

    def __init__(self, ctx: Context, parallel: DataParallel) -> None:
        self.ctx, self.parallel = ctx, parallel
        buffers = [b for b in parallel.trained if b.key.data_axes == DATA_AXES and not b.key.partial]
        self.slots = {b: [s for s in b.slots if parallel.holds_first(s)] for buffer in buffers for b in buffer.buckets}
        self.ranges = [
            bucket.own_grads[low:high]
            for buffer in buffers
            for bucket, low, high in buffer.runs(slot for slot in buffer.slots if parallel.counts(buffer, slot))
        ]
        self.small = torch.zeros((), dtype=torch.float64, device=ctx.device.torch)
        self.batches = 1  # the number of small batches of this step
        self.steps, self.smoothed = 0, (0.0, 0.0)
        parallel.reduces.append(self.add)

    def begin(self, micro_batches: int) -> None:
        """Begin a step, before its gradients are computed."""
        layout = self.ctx.layout
        each = shard_axes(layout, self.ctx.config.zero).stage >= 2
        self.batches = layout.size(DATA_AXES) * (micro_batches if each else 1)
        self.small.zero_()

    @torch.no_grad()
    def add(self, bucket: Bucket, grads: Tensor) -> None:
        """Add a small batch's gradients of one bucket."""
        for slot in self.slots.get(bucket, ()):
            self.small += torch.linalg.vector_norm(slot.grad, dtype=torch.float64).square()

    @torch.no_grad()
    def sum(self) -> Download:
        """Sum the squares of the gradients of both batch sizes over all ranks."""
        big = torch.zeros_like(self.small)
        for grads in self.ranges:
            big += torch.linalg.vector_norm(grads.to(self.small.device), dtype=torch.float64).square()
        vector = torch.stack([self.small, big])
        self.ctx.mesh.world.all_reduce(vector)
        return self.ctx.device.download(vector)

    def read(self, sums: Download, divisor: float, tokens: float) -> dict[str, float]:
        """Return the figures of a step whose stored gradients / `divisor` are the mean over `tokens`."""
        (small, big), n = sums.read(), self.batches
        if n == 1 or not (tokens and math.isfinite(small + big)):
            return {}
        # Each small batch has 1 / n of the tokens, so its mean gradient is n times its share of the sum.
        s, b = n * small / divisor**2, big / divisor**2
        estimate = (n * b - s) / (n - 1), tokens * (s - b) / (n - 1)
        self.steps += 1
        # The first values are means, so the zeros before them leave no trace.
        weight = max(1.0 - SMOOTHING, 1.0 / self.steps)
        square, variance = (old + weight * (new - old) for old, new in zip(self.smoothed, estimate, strict=True))
        self.smoothed = square, variance
        figures = {"square": square, "variance": variance}
        return figures | ({"scale": variance / square} if square > 0 and variance > 0 else {})
