"""Values that `forward_step` returns beside the loss, averaged over the ranks and micro-batches that have them.

Any stage may return any of them in any step, so a rank can't know beforehand which names the others bring. The ranks
agree on a list of names; a rank that brings a new one says so in the metrics that all sum in every step, and all then
exchange their names. From then on the value takes part in one small sum over the world, which nobody waits for.
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


class Summing(NamedTuple):
    """Sums under way: of the values, and of how often each was given."""

    names: tuple[str, ...]
    sums: Download

    def means(self) -> dict[str, float]:
        """The mean of each value that any rank had."""
        found = zip(self.names, *self.sums.read(), strict=True)
        return {name: total / times for name, total, times in found if times}


class Monitored:
    """The names that all ranks know, and the sums of their values."""

    def __init__(self, ctx: Context, names: tuple[str, ...] = ()) -> None:
        """`names`: those that all ranks know from the beginning."""
        self.ctx, self.names = ctx, names

    def is_new(self, totals: Totals) -> bool:
        """Whether this rank has a value whose name the others don't know."""
        return not set(totals.monitored) <= set(self.names)

    def begin(self, totals: Totals) -> Summing | None:
        """Begins to sum the values of the known names; returns None without any."""
        return Summing(self.names, self._sum(totals, self.names)) if self.names else None

    def learn(self, totals: Totals, begun: Summing | None) -> Summing:
        """Exchanges the names, which all ranks must do together, and sums what `begun` left out of this step. (The step
        after one with a new name may have been launched before the names were exchanged.)"""
        with self.ctx.ledger.phase("metrics"):
            told = gather_bytes(self.ctx.mesh.world, json.dumps(sorted(totals.monitored)).encode(), self.ctx)
            self.names = tuple(sorted({name for text in told for name in json.loads(text)}.union(self.names)))
            rest = tuple(name for name in self.names if begun is None or name not in begun.names)
            return Summing(rest, self._sum(totals, rest))

    def _sum(self, totals: Totals, names: Sequence[str]) -> Download:
        """All tensor-parallel ranks of a stage have the same values, and one of them gives them."""
        vector = torch.zeros(2, len(names), dtype=torch.float64, device=self.ctx.device.torch)
        if self.ctx.mesh.tp.index <= 0:
            for i, name in enumerate(names):
                vector[0, i], vector[1, i] = totals.monitored.get(name, 0.0), totals.times.get(name, 0.0)
        self.ctx.mesh.world.all_reduce(vector)
        return self.ctx.device.download(vector)


def gather_bytes(group: Group, own: bytes, ctx: Context) -> list[bytes]:
    """Everybody's bytes, in the order of the group's ranks."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    length = torch.tensor([len(own)], device=ctx.device.torch)
    lengths: Tensor = length.new_empty(group.size)
    group.all_gather(lengths, length)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=ctx.device.torch)
    padded[: len(own)] = data
    everyone = padded.new_empty(group.size * longest)
    group.all_gather(everyone, padded)
    parts = zip(everyone.cpu().view(group.size, longest), lengths.tolist(), strict=True)
    return [bytes(part[:size].numpy()) for part, size in parts]
