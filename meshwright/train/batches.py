"""Micro-batches for a rank: which samples, read by one rank of each tensor-parallel group and broadcast to it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.train.context import Context


class Dataset(Protocol):
    """Sample n of a run, for any n: a pure function of the seed and n."""

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]: ...


def sample_ids(consumed: int, micro_batch: int, size: int, dp_rank: int, dp: int) -> range:
    """The samples of one micro-batch of one data-parallel rank, in the step that begins at `consumed`."""
    first = consumed + (micro_batch * dp + dp_rank) * size
    return range(first, first + size)


class MicroBatches:
    """Loads what this rank's chunks need; `fields` are the names of the batch's tensors that they read."""

    def __init__(self, ctx: Context, dataset: Dataset, fields: set[str] | None) -> None:
        self.ctx, self.dataset = ctx, dataset
        self.size = ctx.config.train.micro_batch
        probe = dataset.sample(0)
        names = [name for name in sorted(probe) if fields is None or name in fields]
        # One broadcast a dtype: fields of one dtype travel packed.
        self.packs: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
        for name in names:
            value = torch.as_tensor(probe[name])
            self.packs.setdefault(value.dtype, []).append((name, tuple(value.shape)))

    def load(self, consumed: int, micro_batch: int) -> dict[str, Tensor]:
        if not self.packs:
            return {}
        ctx, tp = self.ctx, self.ctx.mesh.tp
        readers = ctx.mesh.samples
        ids = sample_ids(consumed, micro_batch, self.size, readers.index, readers.size)
        reads = tp.alone or tp.index == 0
        samples = [self.dataset.sample(n) for n in ids] if reads else []
        batch: dict[str, Tensor] = {}
        for dtype, fields in self.packs.items():
            sizes = [self.size * int(np.prod(shape)) for _, shape in fields]
            if reads:
                parts = [np.stack([s[name] for s in samples]).reshape(-1) for name, _ in fields]
                packed = ctx.device.upload(torch.from_numpy(np.concatenate(parts)))
            else:
                packed = torch.empty(sum(sizes), dtype=dtype, device=ctx.device.torch)
            tp.broadcast(packed)
            for (name, shape), part in zip(fields, packed.split(sizes), strict=True):
                batch[name] = part.view(self.size, *shape)
        return batch
