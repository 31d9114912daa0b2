"""The loop runs one step ahead: step N + 1 is launched before the host waits for step N's numbers."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.train.step import Launched, StepResult, Trainer


class Ahead:
    """Launches steps up to one ahead of the result that is read. `pauses(step)` says after which steps somebody needs
    the trainer as that step left it (to validate, to save): there nothing runs ahead."""

    def __init__(self, trainer: Trainer, pauses: Callable[[int], bool]) -> None:
        self.trainer, self.pauses = trainer, pauses
        self._waiting: Launched | None = None
        self._stop = False

    def next(self, stop_requested: bool) -> StepResult:
        """The next step's result. A request to stop that is seen in a result whose successor already runs is passed on
        to that one, so that the trainer stands where the last result says."""
        current = self._waiting or self.trainer.launch(stop_requested)
        self._waiting = None
        if self.trainer.runs_ahead and not self._stop and not self.pauses(current.result.step):
            self._waiting = self.trainer.launch(stop_requested)
        result = self.trainer.read(current)
        self._stop |= result.stop
        result.stop = self._stop and self._waiting is None
        return result
