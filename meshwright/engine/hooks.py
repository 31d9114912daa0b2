"""Hooks and watchers: the callbacks that run around training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from meshwright.engine.context import Context
from meshwright.engine.step import StepResult


class Hook:
    """A callback that runs around each training step.

    Every rank calls the same hooks in the same order, so a hook may communicate.
    """

    def pauses(self, step: int) -> bool:
        """Return True if the hook needs the trainer in its state after this step. The next step then waits."""
        return False

    def before(self, step: int) -> None:
        """Run before a step begins or, if the loop runs ahead, before the loop waits for the step's result."""

    def wants_save(self) -> bool:
        """Return True to save after the next step. Only the answer of the rank that writes the run counts."""
        return False

    def after(self, result: StepResult, last: bool) -> None:
        """Handle the result of a step. `last`: no further step will follow."""


class Watcher(Protocol):
    """An observer of a run on the rank that writes it: a progress display, a test."""

    def started(self, ctx: Context) -> None: ...
    def stepped(self, result: StepResult) -> None: ...
    def validated(self, line: Mapping[str, Any]) -> None: ...
    def finished(self) -> None: ...


class RolledBack(Exception):  # noqa: N818 (not an error: the run continues from there)
    """Raised when the trainer has been rolled back to an earlier step."""
