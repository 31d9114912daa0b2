"""How long it took from a loss to the next step, told by the rank that writes the run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TypedDict

from meshwright.engine.hooks import Hook
from meshwright.engine.step import StepResult
from meshwright.errors import notice
from meshwright.launch.processes import LOST
from meshwright.outside import of_kind, parse_json
from meshwright.record.run_notes import write_event


class Loss(TypedDict):
    """When the last step before a loss was written, and when the launcher saw that ranks were gone."""

    last: float
    seen: float


class Recovering(Hook):
    """Writes one event with the first step after a loss: the seconds until the loss was seen (since the last finished
    step), until the ranks were there again, until they had loaded their state, and of the step itself."""

    def __init__(self, folder: str, ready: float, loaded: float, source: str, env: Mapping[str, str] = os.environ):
        """`ready`: when this rank was about to load, `loaded`: when it had; `source`: from where."""
        self.folder, self.ready, self.loaded, self.source = folder, ready, loaded, source
        self.loss = _loss(env)

    def after(self, result: StepResult, last: bool) -> None:
        if self.loss is None:
            return
        now = time.time()
        spans = {
            "detection_s": self.loss["seen"] - self.loss["last"], "restart_s": self.ready - self.loss["seen"],
            "load_s": self.loaded - self.ready, "step_s": now - self.loaded,
        }  # fmt: skip
        spans = {name: round(max(0.0, seconds), 3) for name, seconds in spans.items()}
        words = (
            f"back {now - self.loss['last']:.1f} s after the last step: the loss was seen after "
            f"{spans['detection_s']:.1f} s, the ranks started in {spans['restart_s']:.1f} s, loaded step "
            f"{result.step - 1} from {self.source} in {spans['load_s']:.1f} s and trained in {spans['step_s']:.1f} s"
        )
        notice(words)
        write_event(self.folder, "recovered", words, result.step, source=self.source, **spans)
        self.loss = None


def _loss(env: Mapping[str, str]) -> Loss | None:
    try:
        loss: Loss = of_kind(parse_json(env[LOST]), Loss, LOST)
    except (KeyError, ValueError):
        return None
    return loss
