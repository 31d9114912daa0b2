"""Monitored values: `forward_step` returns them with the loss; they are averaged over ranks and micro-batches.

Any stage may return any value in any step, so a rank can't know in advance which names the other ranks have. The ranks
agree on a list of names. A rank with a new name sets a flag in the metrics that all ranks sum in every step, and then
all ranks exchange their names. From then on the value is part of one small asynchronous all-reduce over the world.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.device import Download
from meshwright.engine.context import Context
from meshwright.engine.output import Totals


class PendingSums(NamedTuple):
    """Sums in flight: of the monitored values and of their counts."""

    names: tuple[str, ...]
    sums: Download

    def means(self) -> dict[str, float]:
        """Return the mean of each value that any rank had."""
        rows = zip(self.names, *self.sums.read(), strict=True)
        return {name: total / count for name, total, count in rows if count}


class Monitored:
    """The names that all ranks know, and the sums of their values."""

    def __init__(self, ctx: Context, names: tuple[str, ...] = ()) -> None:
        """Begin with the names that all ranks know from the start."""
        self.ctx, self.names = ctx, names

    def is_new(self, totals: Totals) -> bool:
        """Return True if this rank has a value whose name the other ranks don't know."""
        return not set(totals.monitored) <= set(self.names)

    def begin(self, totals: Totals) -> PendingSums | None:
        """Begin to sum the values of the known names. Return None if there are no names."""
        return PendingSums(self.names, self._sum(totals, self.names)) if self.names else None

    def learn(self, totals: Totals, begun: PendingSums | None) -> PendingSums:
        """Exchange names between all ranks, and sum the values of this step that `begun` does not include.

        All ranks must call it together. `begun` may lack names that are known by now: the step after one with a new
        name may have been launched before the exchange.
        """
        with self.ctx.ledger.phase("metrics"):
            gathered = gather_bytes(self.ctx.mesh.world, json.dumps(sorted(totals.monitored)).encode(), self.ctx)
            self.names = tuple(sorted({name for text in gathered for name in json.loads(text)}.union(self.names)))
            rest = tuple(name for name in self.names if begun is None or name not in begun.names)
            return PendingSums(rest, self._sum(totals, rest))

    def _sum(self, totals: Totals, names: Sequence[str]) -> Download:
        """Sum values and counts over the world.

        All tensor-parallel ranks of a stage have the same values, so only the first one contributes.
        """
        vector = torch.zeros(2, len(names), dtype=torch.float64, device=self.ctx.device.torch)
        if self.ctx.mesh.tp.index <= 0:
            for i, name in enumerate(names):
                vector[0, i], vector[1, i] = totals.monitored.get(name, 0.0), totals.times.get(name, 0.0)
        self.ctx.mesh.world.all_reduce(vector)
        return self.ctx.device.download(vector)


def gather_bytes(group: Group, own: bytes, ctx: Context) -> list[bytes]:
    """Return the bytes of every rank, in the order of the group's ranks."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    length = torch.tensor([len(own)], device=ctx.device.torch)
    # All-gather needs equal sizes, so the ranks first agree on the longest and pad to it.
    lengths: Tensor = length.new_empty(group.size)
    group.all_gather(lengths, length)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=ctx.device.torch)
    padded[: len(own)] = data
    everyone = padded.new_empty(group.size * longest)
    group.all_gather(everyone, padded)
    parts = zip(everyone.cpu().view(group.size, longest), lengths.tolist(), strict=True)
    return [bytes(part[:size].numpy()) for part, size in parts]
