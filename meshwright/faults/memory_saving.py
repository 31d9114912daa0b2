"""Copies of the ranks' shares in memory, every so many steps."""

from __future__ import annotations

from meshwright.checkpoint.memory_copy import Keepers, MemoryCopies
from meshwright.engine.hooks import Hook
from meshwright.engine.step import StepResult, Trainer
from meshwright.errors import notice


class MemorySaving(Hook):
    """`checkpoint.memory_every`. Where the launcher has started no keepers, which it says once, there are no copies."""

    def __init__(self, trainer: Trainer) -> None:
        self.every = trainer.ctx.config.checkpoint.memory_every
        keepers = Keepers.known() if self.every else None
        self.copies = MemoryCopies(trainer, keepers) if keepers else None
        if self.every and keepers is None and trainer.writes:
            notice("meshwright: this launcher has no keepers: checkpoint.memory_every makes no copies")

    def pauses(self, step: int) -> bool:
        return self.copies is not None and step % self.every == 0

    def after(self, result: StepResult, last: bool) -> None:
        if self.copies and self.pauses(result.step) and not last:
            self.copies.save()
