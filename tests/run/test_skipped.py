"""The end of a run most of whose updates were skipped, and the learning rate of the last update."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.config.load import to_yaml
from meshwright.config.step_schedules import learning_rate
from meshwright.record.run_folder import complete_step
from meshwright.record.run_notes import read_events
from tests.checkpoint.runs import tiny
from tests.support.oracle import small_config
from tests.support.token_files import write_documents


def test_a_run_of_skipped_updates_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_documents(tmp_path / "tokens", list(np.random.default_rng(0).integers(0, 31, (50, 100))))
    data = {"prefixes": [str(tmp_path / "tokens")], "split": [0.8, 0.2, 0]}
    sections = tiny(tmp_path / "run", data=data, train={"steps": 5}, optimizer={"lr": 1e18})
    config = small_config(**sections)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = ["train", str(tmp_path / "config.yaml"), "--nproc", "1"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "of 5 updates were skipped, so" in said and "lower optimizer.lr" in said
    assert complete_step(config) is None
    events = [event for event in read_events(config.run.dir) if event["kind"] in ("end", "failure")]
    assert [event["kind"] for event in events] == ["failure"]
    assert main(["status", config.run.dir, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"]["kind"] == "failed" and not found["complete"]
    assert main(command) == 2 and "updates were skipped" in capsys.readouterr().err, "nor when it is started again"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_update_of_a_default_run_learns(schedule: str) -> None:
    config = small_config(train={"steps": 20}, optimizer={"lr": 1.0}, lr={"schedule": schedule})
    assert 0 < learning_rate(config, 20) < learning_rate(config, 19)
    assert learning_rate(config, 21) == 0
