"""`run.trace`: one step of a run as it was measured, in the same form as `meshwright simulate --trace`.

Of each pipeline rank one rank records, and writes its part beside the run's other files; one puts the parts together.
Times are those of the machines' clocks, which several machines must have set alike.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from meshwright.errors import UserError
from meshwright.pipeline.record import Recorder
from meshwright.pipeline.trace import Span, trace_json
from meshwright.train.step import Trainer

TRACED = 3  # the third step of a process: the first ones make what later ones reuse


class TracedStep:
    """Which step is traced, and its parts. `records` on the ranks that stand for a pipeline rank."""

    def __init__(self, trainer: Trainer) -> None:
        ctx = trainer.ctx
        self.trainer, self.folder = trainer, Path(ctx.config.run.dir)
        on, steps = ctx.config.run.trace, ctx.config.train.steps
        self.number = min(trainer.step_number + TRACED, steps) if on else 0
        self.records = on and ctx.mesh.tp.index <= 0 and ctx.mesh.data.index <= 0

    def begin(self) -> None:
        if self.records:
            self.trainer.executor.recorder = Recorder(self.trainer.ctx.pp_rank, self.trainer.ctx.device)

    def end(self) -> None:
        """Writes this rank's part."""
        recorder, self.trainer.executor.recorder = self.trainer.executor.recorder, None
        if recorder is not None:
            self._write(self._part(recorder.rank), json.dumps([asdict(span) for span in recorder.spans()]))

    def join(self) -> None:
        """Puts all ranks' parts together, the step's first moment as zero."""
        parts = [self._part(rank) for rank in range(self.trainer.ctx.config.layout.pp)]
        spans = [Span(**fields) for part in parts for fields in json.loads(part.read_text(encoding="utf-8"))]
        first = min(span.start for span in spans)
        moved = (replace(span, start=span.start - first, end=span.end - first) for span in spans)
        self._write(self.folder / "trace.json", trace_json(moved, f"{self.folder.name}, step {self.number}"))
        for part in parts:
            part.unlink()

    def _part(self, rank: int) -> Path:
        return self.folder / f"trace.{rank}.json"

    def _write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"the step's trace can't be written to {path}: {error.strerror}") from None
