"""Elastic runs through the real command, whose ranks and nodes are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import lines, steps
from tests.support.commands import ended, folder, ranks, start, until

__all__ = ["folder", "start"]  # fixtures

DROPOUTS = ("model.dropout=0", "model.attention_dropout=0", "model.embedding_dropout=0")  # they depend on the layout
PLAIN = (*DROPOUTS, "train.steps=30", "checkpoint.every=3")


def losses(run: Path) -> list[float]:
    assert steps(run) == list(range(1, 31)), "each step once"
    return [line["loss"] for line in lines(run / "metrics.jsonl")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run / "events.jsonl") if event["kind"] == kind]


@pytest.mark.wide
def test_one_of_eight_is_killed(folder: Path, start: Any) -> None:
    """Its losses are those of an undisturbed run; and when the device has rested, all eight train again."""
    layout = ("layout.tp=2", "layout.pp=2")
    assert ended(start("--nproc", "1", *PLAIN, "run.dir=straight"))[0] == 0
    run = folder / "run"
    process = start("--nproc", "8", *layout, *PLAIN, "faults.elastic=true", "faults.rest=1s")
    until(lambda: len(steps(run)) >= 5, process)
    os.kill(ranks(folder)[3], signal.SIGKILL)
    code, said = ended(process)
    assert code == 0, said
    assert losses(run) == pytest.approx(losses(folder / "straight"), rel=2e-6)
    worlds = [event["world"] for event in lines(run / "events.jsonl") if event["kind"] in ("start", "resume")]
    assert worlds == [8, 4, 8] or worlds == [8, 4], worlds  # it may have ended before the device came back
    (back,) = events(run, "recovered")
    assert back["detection_s"] < 15 and back["restart_s"] > 0 and back["source"] == "disk"
    assert "rank 3 was killed by SIGKILL" in events(run, "restart")[0]["text"]
