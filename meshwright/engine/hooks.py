"""Hooks and watchers: what a run does around its training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from meshwright.engine.context import Context
from meshwright.engine.step import StepResult


class Hook:
    """A callback that runs around each training step.

    Every rank has the same hooks, called in one order, so a hook may communicate.
    """

    def pauses(self, step: int) -> bool:
        """Return True if the hook needs the trainer as this step leaves it: the next step then waits."""
        return False

    def before(self, step: int) -> None:
        """Called before a step is begun, or, if the loop runs ahead, before its result is waited for."""

    def wants_save(self) -> bool:
        """Return True to save after the next step. Only the answer of the rank that writes the run counts."""
        return False

    def after(self, result: StepResult, last: bool) -> None:
        """Called with each step's result; `last` says that no further step will follow."""


class Watcher(Protocol):
    """An observer of a run on the rank that writes it: a progress display, a test."""

    def started(self, ctx: Context) -> None: ...
    def stepped(self, result: StepResult) -> None: ...
    def validated(self, line: Mapping[str, Any]) -> None: ...
    def finished(self) -> None: ...


class WentBack(Exception):  # noqa: N818 (no error: the run goes on from there)
    """The trainer stands at an earlier step."""
