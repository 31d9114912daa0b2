"""Random numbers for dropout, keyed by seed, step, micro-batch, chunk, layer and stream, never by execution order.

So a recomputed block, a repeated step and a resumed run draw the same numbers, and no state has to be saved. The stream
`same` agrees across tensor-parallel ranks. The stream `own`, and torch's default generator, which attention's dropout
uses, differ between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.device import accelerator, generator
from meshwright.spec.layout.params import stream_seed


class Streams:
    """The random generators of one rank, reseeded for each layer of each micro-batch."""

    def __init__(self, seed: int, data_rank: int, tp_rank: int, device: torch.device, pp_rank: int = 0) -> None:
        self.seed, self.data_rank, self.tp_rank, self.pp_rank = seed, data_rank, tp_rank, pp_rank
        self.same, self.own = generator(device), generator(device)
        # Seeded directly, because torch.manual_seed would keep the stack trace of every call.
        self.default = accelerator(device) or torch.default_generator
        # True if the model has dropout.
        self.active = False
        # The step, micro-batch and chunk.
        self.where: tuple[int, int, int] = (0, 0, 0)

    def begin(self, step: int, micro_batch: int, chunk: int) -> None:
        self.where = (step, micro_batch, chunk)

    @contextmanager
    def replay(self, where: tuple[int, int, int]) -> Iterator[None]:
        """Draw the numbers of an earlier step, micro-batch and chunk again, to recompute blocks after others began."""
        before, self.where = self.where, where
        try:
            yield
        finally:
            self.where = before

    def seed_default(self) -> None:
        """Seed torch's default generator, for a module that does not use these streams."""
        torch.manual_seed(stream_seed(self.seed, *self.where, self.data_rank, "default", self.pp_rank))

    def seed_layer(self, number: int) -> None:
        """Seed the streams for a block, or for the embedding (-1), before it runs. Without dropout, do nothing."""
        if not self.active:
            return
        base = (self.seed, *self.where, number, self.data_rank)
        self.same.manual_seed(stream_seed(*base, "same"))
        self.own.manual_seed(stream_seed(*base, "own", self.tp_rank))
        self.default.manual_seed(stream_seed(*base, "default", self.tp_rank))


def dropout(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Return x with each element zeroed with probability p and the others scaled by 1 / (1 - p)."""
    if p == 0.0:
        return x
    keep = torch.empty_like(x).bernoulli_(1.0 - p, generator=generator)
    return x * keep.div_(1.0 - p)
