"""Records the ledger of real training steps on Gloo ranks and compares it with the predictions of the closed
formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from meshwright.config.sections import Config
from meshwright.plan import communication, held
from meshwright.plan.communication import Line, Traffic, predict_detail, predict_rank, predict_step
from tests.support.oracle import Made, small_config
from tests.support.ranks import RankFailed, run_ranks

STEPS = 2
SP = {"sequence_parallel": True}
Recorded = list[list[dict[str, Any]]]  # By rank and step.


@dataclass(frozen=True)
class Case:
    """A layout to train: config sections on top of `small_config`, the dtypes of its fields, and the number of
    monitored values.
    """

    name: str
    world: int
    sections: dict[str, dict[str, Any]]
    fields: dict[str, str] | None = None
    monitored: int = 0

    @property
    def config(self) -> Config:
        sections = {"model": {}, "train": {}} | self.sections
        sections["model"] = {"layers": 2, "seq": 12, "hidden": 24, "heads": 4} | sections["model"]
        sections["train"] = {"global_batch": 4} | sections["train"]
        return small_config(**sections)


class Fields(Made):
    """Samples with chosen fields and dtypes."""

    def __init__(self, config: Config, fields: dict[str, str] | None) -> None:
        fields = fields or {}
        super().__init__(config.model.vocab, config.model.seq, segments="segments" in fields)
        self.dtypes = fields

    def sample(self, n: int) -> dict[str, np.ndarray]:
        return {name: x.astype(self.dtypes.get(name, "int64")) for name, x in super().sample(n).items()}


def record(rank: int, world: int, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """Train every case on this rank. Return, by case and step, the number of samples, the step's `comm`, and the ledger
    by (phase, axis, op).
    """
    from meshwright.engine.providers import forward_step
    from tests.support.oracle import make_trainer

    found = []
    for case in cases:
        made = Fields(case.config, case.fields) if case.config.model.kind == "gpt" else None
        trainer = make_trainer(case.config, rank, world, made)
        if case.monitored:
            ctx, values = trainer.ctx, {f"value{i}": float(i) for i in range(case.monitored)}

            def with_values(module: Any, batch: Any, received: Any, ctx: Any = ctx, values: Any = values) -> Any:
                out = forward_step(ctx, module, batch, received)
                return replace(out, monitored=values) if out.terms else out

            trainer.executor.forward_step = with_values
            # The ranks agree on the names of the monitored values in this step. Later steps sum the values.
            trainer.step()
        steps = []
        for _ in range(STEPS):
            result = trainer.step()
            lines: dict[Line, Traffic] = {}
            for entry, tally in trainer.ctx.ledger.entries.items():
                line = Line(entry.phase, entry.axis, entry.op)
                lines[line] = lines.get(line, Traffic()).plus(
                    Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes)
                )
            steps.append({"samples": result.global_batch, "comm": result.comm, "lines": lines})
        found.append(steps)
    return found


class Records:
    """The records of a file's cases. Cases with the same number of ranks share one launch. A failed launch is
    remembered, so that its time is spent only once.
    """

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.done: dict[int, dict[str, Recorded] | RankFailed] = {}

    def of(self, case: Case) -> Recorded:
        if case.world not in self.done:
            self.done[case.world] = self._launch([each for each in self.cases if each.world == case.world])
        found = self.done[case.world]
        if isinstance(found, RankFailed):
            raise found
        return found[case.name]

    def _launch(self, cases: list[Case]) -> dict[str, Recorded] | RankFailed:
        try:
            ranks = run_ranks(cases[0].world, record, cases)
        except RankFailed as error:
            return error
        return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


def differences(case: Case, ranks: Recorded) -> Iterator[str]:
    """Yield a message for every difference between the prediction and the record."""
    for step in range(STEPS):
        samples = ranks[0][step]["samples"]
        options = {"samples": samples, "fields": case.fields, "monitored": case.monitored}
        predicted = {axis: t._asdict() for axis, t in predict_step(case.config, case.world, **options).items()}
        together: dict[Line, Traffic] = {}
        for rank, steps in enumerate(ranks):
            if steps[step]["comm"] != predicted:
                yield f"step {step}, comm of rank {rank}: {steps[step]['comm']}, predicted {predicted}"
            lines = predict_rank(case.config, case.world, rank, **options)
            for line, traffic in steps[step]["lines"].items():
                together[line] = together.get(line, Traffic()).plus(traffic)
            for line in sorted({*lines, *steps[step]["lines"]}):
                pair = steps[step]["lines"].get(line), lines.get(line)
                if pair[0] != pair[1]:
                    yield f"step {step}, rank {rank}, {line}: recorded {pair[0]}, predicted {pair[1]}"
        if together != predict_detail(case.config, case.world, **options):
            yield f"step {step}: the sum over all ranks by line"


def assert_found(
    case: Case, ranks: Recorded, owner: Any, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assert that the prediction equals the record, and that it no longer does once this attribute of `owner` is
    replaced.
    """
    # The caches would return results that were computed before the replacement.
    monkeypatch.setattr(communication, "unit_collectives", communication.unit_collectives.__wrapped__)
    monkeypatch.setattr(held, "_packing", held._packing.__wrapped__)
    assert not list(differences(case, ranks))
    monkeypatch.setattr(owner, attribute, wrong)
    assert list(differences(case, ranks))
