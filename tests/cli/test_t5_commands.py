"""Tests of the commands with an encoder-decoder: show a sample, train, evaluate, generate, export, report mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
MODEL = "model: {kind: t5, layers: 3, hidden: 16, heads: 2, vocab: 270, seq: 64, t5: {encoder_layers: 1}}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    assert main(["data", "prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "a"), "--workers", "1"]) == 0
    file = tmp_path / "t5.yaml"
    file.write_text(
        f"{MODEL}\ndata: {{prefixes: ['{tmp_path / 'a'}'], split: [1, 0, 0]}}\n"
        f"train: {{steps: 2, global_batch: 2}}\nrun: {{dir: '{tmp_path / 'run'}', tensorboard: false, device: cpu}}\n"
    )
    return file


def test_show_prints_a_sample(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The input with the spans of the target filled in is the original text."""
    capsys.readouterr()
    assert main(["data", "show", str(config), "--sample", "3", "--json"]) == 0
    sample = json.loads(capsys.readouterr().out)
    assert main(["data", "show", str(config), "--sample", "3"]) == 0
    heading, shown, target = capsys.readouterr().out.rstrip("\n").split("\n")
    words = re.match(r"sample 3 of train: 64 tokens with (\d+) spans taken out, (\d+) of the target", heading)
    assert words is not None and int(words[2]) == sum(sample["loss_mask"]) == len(sample["labels"])
    parts = re.split(r"<\d+>", target.removeprefix("target: ").removesuffix("[END]"))
    spans = iter(parts[1:])
    assert len(parts) == int(words[1]) + 1 and parts[0] == ""
    whole = re.sub(r"<\d+>", lambda match: next(spans), shown.removesuffix("[END]"))
    assert whole.replace("[END]", "") in TEXT and len(whole) > 64


MISTAKES = [
    (["layout.cp=2"], "layout.cp=2 can't be combined with model.kind=t5 yet: set layout.cp=1"),
    (["data.objective=causal"], "model.kind=t5 learns spans, and data.objective is causal"),
    (["model.position=rope"], "model.position=rope can't be combined with model.kind=t5: set it to relative"),
    (["model.bias=true"], "model.bias=True can't be combined with model.kind=t5"),
    (["model.t5.encoder_layers=3"], "model.t5.encoder_layers=3 leaves one of the two stacks without blocks"),
    (["model.t5.buckets=30"], "model.t5.buckets=30 must be a multiple of 4"),
    (["model.t5.distance=16"], "model.t5.distance=16 must be above buckets / 2 = 16"),
    (["model.t5.decoder_seq=3"], "the targets of data.spans have 14 tokens, and model.t5.decoder_seq=3"),
    (["model.vocab=258"], "model.vocab=258 leaves no room for 3 sentinels above the 257 tokens of the data"),
    (["data.spans.sentinel=300"], "data.spans.sentinel=300 is no token of model.vocab=270"),
    (["data.spans.share=0.8"], "data.spans.share=0.8 must be at most 0.5"),
    (["data.spans.mean=0.5"], "data.spans.mean=0.5 must lie between 1.5 and 100"),
    (["layout.pp=2", "pipeline.encoder_stages=2"], "pipeline.encoder_stages=2 leaves the decoder none of the pp x"),
    (["layout.pp=3", "pipeline.encoder_stages=2"], "pipeline.encoder_stages=2 of 3 stages leaves a stage without"),
    (["layout.pp=2", "pipeline.encoder_stages=1", "pipeline.split=[1,2]"], "pipeline.split already says where"),
    (["recompute.mode=full", "recompute.offload=true"], "recompute.offload=true can't be combined with model.kind=t5"),
    (["tune.kind=lora"], "tune.kind=lora can't be combined with model.kind=t5 yet"),
    (["model.experts.count=4"], "model.experts.count=4 can't be combined with model.kind=t5 yet"),
    (["model.kind=gpt", "pipeline.encoder_stages=1"], "model.t5.encoder_layers needs an encoder-decoder"),
    (["model.seq=4"], "model.seq=4 is too short for model.kind=t5"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes(words: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["data", "show", str(config), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.wide
def test_a_trained_run_is_evaluated_and_answers(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(config.parent / "run")
    assert main(["train", str(config), "checkpoint.async=false"]) == 0
    capsys.readouterr()
    assert main(["eval", run, "--split", "train", "--samples", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["samples"] == 3 and result["tokens"] == 3 * 14 and result["loss"] < 7
    assert main(["generate", run, "--prompt", "The quick", "--max-tokens", "5", "--json"]) == 0
    assert 1 <= len(json.loads(capsys.readouterr().out)["tokens"]) <= 5
    assert main(["export", run, "--to", str(config.parent / "hf")]) == 0
    assert main(["generate", str(config.parent / "hf"), "--prompt-tokens", "5,17", "--max-tokens", "5"]) == 0
