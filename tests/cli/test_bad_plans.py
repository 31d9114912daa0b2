"""Tests of mistakes in planning commands: each gives one sentence that names the fix, exit code 2 and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.plan.cluster import FOLDER
from meshwright.plan.target import target_of
from tests.cli.test_bad_input import sentence

MODEL = "model: {layers: 4, hidden: 32, heads: 4, vocab: 300, seq: 16}\n"
CLUSTER = ["--cluster", "laptop", "--devices", "2"]
COMMANDS = {
    "cost": CLUSTER, "plan": CLUSTER, "memory": ["--world", "2"], "simulate": CLUSTER, "scaling": CLUSTER,
    "dryrun": ["--world", "2", "--ranks", "0"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_section_is_an_absent_one(command: str, here: Path) -> None:
    (here / "job.yaml").write_text(MODEL + "layout:\npipeline:\ndata:\ntrain: {global_batch: 8}\n")
    assert main([command, "job.yaml", *COMMANDS[command]]) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ("layout: 5\n", "section 'layout' must hold keys and values, not '5'"),
        ("layout: {chunks: 2}\npipeline: 3\n", "section 'pipeline' must hold keys and values, not '3'"),
        ("pipeline: 0\nlayout: {chunks: 2}\n", "section 'pipeline' must hold keys and values, not '0'"),
    ],
)
def test_a_section_that_is_a_number(
    command: str, sections: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "job.yaml").write_text(MODEL + sections)
    assert expected in sentence(capsys, [command, "job.yaml", *COMMANDS[command]])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_in_another_encoding(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.yaml").write_bytes("# Größe\n".encode("latin-1") + MODEL.encode())
    assert "job.yaml can't be read as UTF-8 text" in sentence(capsys, [command, "job.yaml", *COMMANDS[command]])


def test_a_share_in_percent(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = yaml.safe_load((FOLDER / "h100-80g-dgx.yaml").read_text())
    shares["efficiency"]["product"] *= 100
    (here / "mine.yaml").write_text(yaml.safe_dump(shares))
    words = ["cost", "llama3-8b", "--cluster", "mine.yaml", "--devices", "8"]
    message = sentence(capsys, words)
    assert "efficiency.product=" in message and "must be a share of the peak" in message


def test_a_plan_writes_nothing_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2-124m", "--cluster", "h100-80g-dgx", "--devices", "2", "--global-batch", "8"]
    assert main(words) == 0
    assert list(here.iterdir()) == [] and "next: --out FILE" in capsys.readouterr().err
    assert main([*words, "--out", "plan.yaml"]) == 0
    assert load_config(here / "plan.yaml").train.global_batch == 8


def test_chunks_are_interleaved_beside_other_keys_of_the_pipeline(here: Path) -> None:
    (here / "job.yaml").write_text(MODEL + "layout: {pp: 2, chunks: 2}\npipeline: {split: [1, 1, 1, 1]}\n")
    config = target_of("job.yaml").config
    assert config.pipeline.schedule == "interleaved" and config.pipeline.split == (1, 1, 1, 1)


def test_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    for count in ("inf", "nan", "-inf"):
        message = sentence(capsys, ["simulate", "bloom-176b", "--what-if", f"fewer-nodes={count}"])
        assert "give a whole number of nodes, at least 1" in message
    assert "--ranks ² must be numbers" in sentence(capsys, ["dryrun", "gpt2-1.5b", "--world", "2", "--ranks", "²"])
    for size in ("nan", "inf"):
        message = sentence(capsys, ["plan", "gpt2-1.5b", *CLUSTER, "--global-batch", "8", "--fit", size])
        assert "--fit must be a number of GiB above zero" in message


@pytest.mark.parametrize("command", ["memory", "dryrun"])
def test_nodes_of_a_size_that_nobody_tells(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["zero.stage=3", "zero.shard_group=node", "train.global_batch=8"]
    assert "give layout.node_size" in sentence(capsys, [command, "gpt2-124m", *words, "--world", "8"])
