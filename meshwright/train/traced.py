"""`run.trace`: one step of a run as it was measured, in the same form as `meshwright simulate --trace`.

Of each pipeline rank one rank records; the one that writes the run's folder gets all their spans. Times are those of
the machines' clocks, which several machines must have set alike.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from meshwright.pipeline.trace import Recorder, Span, trace_json
from meshwright.train.loop import Hook
from meshwright.train.monitor import gather_bytes
from meshwright.train.step import StepResult, Trainer

TRACED = 3  # the third step of a process: the first ones make what later ones reuse


class TracedStep(Hook):
    """Traces one step, whose number is `number` (0: none). The ranks of one pipeline record their spans."""

    def __init__(self, trainer: Trainer) -> None:
        ctx = trainer.ctx
        self.trainer, self.path = trainer, Path(ctx.config.run.dir) / "trace.json"
        on, steps = ctx.config.run.trace, ctx.config.train.steps
        self.number = min(trainer.step_number + TRACED, steps) if on else 0
        self.records = on and ctx.mesh.is_first("dp", "cp", "tp")

    def pauses(self, step: int) -> bool:
        """Nothing else may run while the step is traced."""
        return self.number in (step, step + 1)

    def before(self, step: int) -> None:
        if step == self.number and self.records:
            self.trainer.executor.recorder = Recorder(self.trainer.ctx.pp_rank, self.trainer.ctx.device)

    def after(self, result: StepResult, last: bool) -> None:
        """Writes the file. One that can't be written is no reason to stop a run."""
        recorder = self.trainer.executor.recorder
        if result.step != self.number or recorder is None:
            return
        self.trainer.executor.recorder = None
        spans = list(self._gather(recorder.spans()))
        if not self.trainer.writes:
            return
        first = min(span.start for span in spans)
        moved = (replace(span, start=span.start - first, end=span.end - first) for span in spans)
        try:
            self.path.write_text(trace_json(moved, f"{self.path.parent.name}, step {self.number}"), encoding="utf-8")
        except OSError as error:
            warnings.warn(f"the step's trace can't be written to {self.path}: {error.strerror}", stacklevel=2)

    def _gather(self, spans: list[Span]) -> Iterator[Span]:
        """Collects all pipeline ranks' spans."""
        ctx, pp = self.trainer.ctx, self.trainer.ctx.mesh.pp
        own = json.dumps([asdict(span) for span in spans]).encode()
        with ctx.ledger.phase("metrics"):
            everyone = gather_bytes(pp, own, ctx)
        for text in everyone:
            yield from (Span(**fields) for fields in json.loads(text))
