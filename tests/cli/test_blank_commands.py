"""Tests of the commands with models that fill in blanks and with encoders: train, evaluate, fill in blanks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a GLM on one text and return the run's folder."""
    folder = tmp_path_factory.mktemp("glm")
    (folder / "a.txt").write_text(TEXT)
    assert main(["data", "prepare", str(folder / "a.txt"), "--out", str(folder / "a"), "--workers", "1"]) == 0
    return trained(folder, "glm")


def trained(folder: Path, kind: str) -> str:
    """Train a model of a kind for two steps and return the run's folder."""
    config = folder / f"{kind}.yaml"
    config.write_text(
        f"model: {{kind: {kind}, layers: 2, hidden: 16, heads: 2, vocab: 270, seq: 64}}\n"
        f"data: {{prefixes: ['{folder / 'a'}'], split: [1, 0, 0]}}\ncheckpoint: {{async: false}}\n"
        f"train: {{steps: 2, global_batch: 2}}\n"
        f"run: {{dir: '{folder / kind}', tensorboard: false, device: cpu}}\n"
    )
    assert main(["train", str(config)]) == 0
    return str(folder / kind)


def test_blanks_are_filled_in(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "The [MASK] fox [MASK].", "--max-tokens", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["tokens"]) == 2 and all(len(span) <= 5 for span in result["tokens"])
    assert result["text"].startswith("The ") and " fox " in result["text"] and "MASK" not in result["text"]
    assert result["prompt_tokens"].count(257) == 2
    assert main(["generate", run, "--prompt", "The quick", "--max-tokens", "4"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("The quick") and "tokens)" in out.err


MISTAKES = [
    (["--prompt", "a [MASK] b [gMASK]"], "one kind: use one of them"),
    (["--prompt", "a [gMASK] b"], "[gMASK] stands for the end of a text: put it last"),
    (["--prompt", "x" * 64], "leave no room in the model's 64: give a shorter prompt"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes(run: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["generate", run, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.wide
def test_every_kind_is_evaluated(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(run).parent
    for kind in ("glm", "bert", "t5"):
        source = run if kind == "glm" else trained(folder, kind)
        capsys.readouterr()
        assert main(["eval", source, "--split", "train", "--samples", "3", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["samples"] == 3 and 4 < result["loss"] < 7 and result["tokens"] > 3
        assert main(["eval", source, "--data", str(folder / "a"), "--samples", "3", "--nproc", "2", "layout.tp=2"]) == 0
