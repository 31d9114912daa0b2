"""Tests of the memory check before ranks start: a run that can't fit is refused, with settings that would fit."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.launch.this_machine import ways_to_fit
from meshwright.plan.job import checked_job
from meshwright.plan.memory import largest
from tests.support.token_files import write_documents

CONFIG = """
model: {layers: 2, hidden: 64, heads: 4, vocab: 64, seq: 64}
data: {prefixes: [tokens], split: [0.8, 0.2, 0]}
train: {steps: 2, global_batch: 16, micro_batch: 4}
run: {dir: run, device: cpu, tensorboard: false}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "tokens", list(np.random.default_rng(0).integers(0, 64, (50, 100))))
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_what_can_not_fit_is_refused_and_what_may_not_is_told(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = largest(checked_job(load_config("config.yaml"), 1))
    assert need.states < 0.9 * need.peak, "this test needs a model with large activations"
    room = need.states - 1
    monkeypatch.setattr("meshwright.device.host_memory_bytes", lambda *place: room)
    assert main(["train", "config.yaml"]) == 2
    stderr = capsys.readouterr().err
    assert "weights, gradients and optimizer states take" in stderr and "and it has" in stderr
    assert not (here / "run").exists()
    room = 0.9 * need.peak
    assert main(["train", "config.yaml"]) == 0
    stderr = capsys.readouterr().err
    (warning,) = [line for line in stderr.splitlines() if "warning" in line]
    assert "a rank needs about" in warning and "train.micro_batch=1" in warning, warning
    room = 2 * need.peak
    assert main(["train", "config.yaml", "run.dir=other"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_what_is_named_fits(here: Path) -> None:
    """Each suggested change of the config needs no more memory than there is, by the planner's own figures."""
    config = load_config("config.yaml")
    peak = largest(checked_job(config, 4)).peak
    for share in (0.8, 0.5, 0.3):
        message = ways_to_fit(config, 4, share * peak)
        ways = re.findall(r"((?:[\w.]+=\w+ ?)+)\(", message)
        assert 1 <= len(ways) <= 3, message
        for words in ways:
            changed = load_config("config.yaml", words.split())
            assert largest(checked_job(changed, 4)).peak <= share * peak, words
    assert "no other zero.stage" in ways_to_fit(config, 4, 1000.0)


def test_running_out_of_memory_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("meshwright.engine.providers.forward_step", full)
    assert main(["train", "config.yaml"]) == 2
    stderr = capsys.readouterr().err.splitlines()[-1]
    assert stderr.startswith("meshwright: rank 0 ran out of memory (planned were ") and ": try " in stderr
