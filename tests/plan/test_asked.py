"""What planning commands are asked: every word is honoured or refused with a sentence, and what is answered can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config.presets import PRESETS, RUNS
from meshwright.plan.job import planned

H100 = ["--cluster", "h100-80g-dgx", "--devices", "64", "train.global_batch=64"]
A100 = ["--cluster", "a100-80g-dgx", "--devices", "96", "--global-batch", "96"]


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one sentence of a refusal."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    return captured.err


def answer(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


REFUSED = {
    "heads": (["llama3-8b", *H100, "--layout", "tp=64"], "tp=64 does not divide heads=32"),
    "layers": (["llama3-8b", *H100, "--layout", "pp=64"], "pp x chunks = 64 stages need at least as many layers"),
    "tokens": (["llama3-8b", *H100, "--layout", "tp=8,sp=true", "model.seq=1001"], "cuts the 1001 tokens"),
    "experts": (["llama3-8b", *H100, "layout.ep=4"], "set layout.ep=1"),
    "a ring that cuts no sequence": (["llama3-8b", *H100, "layout.cp=4", "model.seq=1004"], "try 1008"),
    "a split of one's own": (["bloom-176b", "--layout", "pp=6", "pipeline.split=[35,35]"], "pipeline.split=[35, 35]"),
    "a schedule without chunks": (["bloom-176b", "--layout", "chunks=2,schedule=1f1b"], "schedule=interleaved"),
    "states on a node": (
        ["llama3-8b", *H100, "--layout", "tp=8,zero=1", "zero.shard_group=node"], "holds 1 of the 8 data-parallel"
    ),
    "no devices": (["bloom-176b", "--devices", "0"], "give --devices"),
}  # fmt: skip


@pytest.mark.parametrize("command", ["cost", "simulate"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_breaks_a_rule_is_refused(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = REFUSED[name]
    assert sentence in said(capsys, [command, *words])


def test_a_published_split_is_of_its_own_stages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, ["cost", "bloom-176b", "--layout", "pp=6"])["ledger"]
    assert answer(capsys, ["simulate", "glm-130b", "--layout", "pp=16"])["steps"]
    assert answer(capsys, ["memory", "bloom-176b", "layout.chunks=2"])["peak"]
    assert planned("bloom-176b", ["model.layers=72"]).config.pipeline.split == ()
    for words in ([], ["layout.pp=12"], ["model.layers=70"]):
        assert planned("bloom-176b", words).config.pipeline.split == tuple(RUNS["bloom-176b"]["pipeline"]["split"])


@pytest.mark.parametrize("command", ["cost", "simulate", "memory"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_answered(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [] if name in RUNS else H100 if command != "memory" else ["--world", "8"]
    assert answer(capsys, [command, name, *words])


def test_the_planner_knows_context_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, ["cost", "llama3-8b", *H100, "layout.cp=4"])
    assert found["comm"]["cp"] and found["ledger"] is None, "which can't be trained, so no ledger will count it"


def test_fewer_devices_than_a_node_are_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--cluster", "h100-80g-dgx", "--devices", "4", "zero.stage=1"]
    same = [answer(capsys, ["cost", "llama2-7b", *few, f"zero.shard_group={group}"]) for group in ("dp", "node")]
    assert same[0] == same[1]
