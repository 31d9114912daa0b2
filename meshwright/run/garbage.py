"""Python's garbage collector, held to moments that all ranks share."""

from __future__ import annotations

import gc

from meshwright.engine.hooks import Hook
from meshwright.engine.step import StepResult


class GarbageCollection(Hook):
    """Collects after every `every`-th step on all ranks, and at no other time while it is entered. 0: Python decides.

    Python collects when enough objects were made, which is at another moment on each rank, and every rank waits for the
    one that does. What was built before training lives as long as the run, so it is frozen: no collection looks through
    it again."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._was_enabled = self._was_frozen = False

    def __enter__(self) -> GarbageCollection:
        if self.every:
            self._was_enabled, self._was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the collector as it was found: `pretrain` may be called by a program that goes on."""
        if not self.every:
            return
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after(self, result: StepResult, last: bool) -> None:
        if self.every and result.step % self.every == 0:
            gc.collect()
