"""The defaults that planning commands assume for missing settings, and how they report them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.errors import nearest

MODEL = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 5000, "seq": 512}
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 5000,
    "intermediate_size": 1024, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
WHERE = ["--cluster", "h100-80g-dgx", "--devices", "8"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(json.dumps({"model": MODEL}))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def best(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    assert main(["plan", *words, *WHERE, "--global-batch", "64", "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out)["best"], said.err


def test_a_config_that_names_no_precision_is_planned_in_the_usual_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = best(capsys, "own.yaml")
    assert found["precision"] == "bf16" and "planned in bf16, which h100-80g-dgx is used with" in said
    found, said = best(capsys, "own.yaml", "train.precision=fp32")
    assert found["precision"] == "fp32" and said == ""


@pytest.mark.parametrize("name", ["hf", "hf/config.json"])
def test_a_config_json_is_a_model(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = best(capsys, name)
    assert found["parameters"] == 2 * 5000 * 512 + 4 * (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512) + 512
    (here / "other.json").write_text('{"a": 1}')
    assert main(["plan", "other.json", *WHERE]) == 2
    assert "other.json names no model_type" in capsys.readouterr().err


def test_some_memory_stays_free(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 % of the 79.1 GiB stays free by default."""
    words = ["llama3-8b", *WHERE, "--global-batch", "64", "layout.pp=1", "--json"]
    most = []
    for margin in ([], ["--margin", "0"], ["--margin", "30"]):
        assert main(["plan", *words, *margin, "--top", "1000"]) == 0
        most.append(max(each["memory_gib"] for each in json.loads(capsys.readouterr().out)["candidates"]))
    assert 70.0 < most[0] <= 0.94 * 79.1 < most[1] <= 79.1 and most[2] <= 0.7 * 79.1
    assert main(["plan", *words, "--margin", "100"]) == 2


@pytest.mark.wide
def test_rows_that_look_the_same_are_shown_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", *WHERE, "--global-batch", "64", "--top", "10", "--out", "plan.yaml"]) == 0
    rows = [line.split("  ")[-5:] for line in capsys.readouterr().out.splitlines() if line.startswith("  tp ")][:10]
    assert len(rows) > 5 and len({tuple(row) for row in rows}) == len(rows)


def test_cost_asks_for_a_batch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "llama3-70b", "--cluster", "h100-80g-dgx", "--devices", "256", "--layout", "tp=8,pp=4"]) == 2
    assert "add --global-batch N" in capsys.readouterr().err
    assert main(["cost", "own.yaml", *WHERE, "train.global_batch=64"]) == 0


def test_hints_go_by_meaning() -> None:
    clusters = ["v100-32g", "a100-80g-dgx", "h100-80g-dgx"]
    assert nearest("h100", clusters) == " (did you mean 'h100-80g-dgx'?)"
    assert nearest("v100-32", clusters) == " (did you mean 'v100-32g'?)"
    assert nearest("batch", ["global_batch", "bench"]) == " (did you mean 'global_batch'?)"


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    for word, expected in (("help", "usage: meshwright COMMAND"), ("version", "0.")):
        assert main([word]) == 0
        assert capsys.readouterr().out.startswith(expected)
