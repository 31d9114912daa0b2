"""`run.trace`: a measured step has the spans of the simulated one, in an order that can occur."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.engine.providers import forward_step, model_provider
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.schedule.trace import REDUCED, UPDATED, spans_of, trace_json
from tests.support.oracle import Made, small_config
from tests.support.ranks import run_ranks

Event = dict[str, Any]
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"layout": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "interleaved": {"layout": {"pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}},
    "stage 3": {"layout": {"pp": 2}, "pipeline": {"schedule": "gpipe"}, "zero": {"stage": 3}},
    "tp": {"layout": {"tp": 2, "pp": 1}, "pipeline": {"schedule": "1f1b"}, "train": {"global_batch": 8}},
}
WORLD, MICRO_BATCHES = 4, 4


def body(rank: int, world: int, folder: str, case: dict[str, Any]) -> None:
    sections = {**case, "train": {"steps": 4, **case.get("train", {})}}
    config = small_config(**sections, run={"dir": folder, "trace": True, "device": "cpu", "tensorboard": False})
    data = Made(config.model.vocab, config.model.seq)
    meshwright.pretrain(config, model_provider, lambda ctx, samples: (data, data, None), forward_step)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.wide] if name in ("1f1b", "tp") else []) for name in CASES]
)
def test_a_measured_step_has_the_spans_of_the_simulated_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run_ranks(WORLD, body, str(tmp_path), case)
    measured = json.loads((tmp_path / "trace.json").read_text())
    assert measured["otherData"]["name"].endswith("step 3") and measured["otherData"]["step"] == 3
    layout = case["layout"]
    table = build(case["pipeline"]["schedule"], layout["pp"], MICRO_BATCHES, layout.get("chunks", 1))
    simulated = json.loads(trace_json(spans_of(simulate(table, 1.0, 2.0, 0.1))))
    for category in ("compute", "send") if layout["pp"] > 1 else ("compute",):
        for rank in range(layout["pp"]):
            found, wanted = (_spans(document, rank, category) for document in (measured, simulated))
            assert found and [_what(e) for e in found] == [_what(e) for e in wanted]
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(found)), "one after the other"
    for rank in range(layout["pp"]):
        assert {REDUCED, UPDATED} <= {e["name"] for e in _spans(measured, rank, "step")}
    _check_order(measured, layout["pp"], layout.get("chunks", 1))


def test_a_trace_that_cannot_be_written_stops_no_run(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.warns(UserWarning, match="trace can't be written to .*trace.json: Is a directory"):
        body(0, 1, str(tmp_path), {"train": {"steps": 2}})  # with fewer than three steps, the last one is traced
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def _check_order(measured: dict[str, Any], pp: int, chunks: int) -> None:
    """Check by the ranks' shared clock that no stage computes before the stage that it depends on is done."""
    at = {}
    for rank in range(pp):
        for e in _spans(measured, rank, "compute"):
            stage = pp * e["args"]["chunk"] + rank
            at[e["name"], stage] = e
    for (name, stage), event in at.items():
        before = at.get((name, stage + (1 if name[0] == "B" else -1)))
        if before is not None:
            # A tolerance of 1 ms, since clocks are read separately.
            assert before["ts"] + before["dur"] <= event["ts"] + 1e3, (name, stage)
    assert len(at) == pp * chunks * 2 * MICRO_BATCHES


def _spans(document: dict[str, Any], rank: int, category: str) -> list[Event]:
    chosen = [e for e in document["traceEvents"] if e["ph"] == "X" and (e["pid"], e["cat"]) == (rank, category)]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in chosen)
    return sorted(chosen, key=lambda e: (e["ts"], e["ts"] + e["dur"]))


def _what(event: Event) -> tuple[str, dict[str, Any]]:
    return event["name"], event["args"]
