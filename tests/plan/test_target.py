"""Planning commands heed every word or refuse it with a sentence, and their answer can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.config.presets import APPROXIMATE_PRESETS, PRESETS
from meshwright.config.recipes import recipe_names
from meshwright.plan.cluster import load_cluster
from meshwright.plan.target import target_of, with_supported_precision

H100 = ["--cluster", "h100-80g-dgx", "--devices", "64", "train.global_batch=64"]
A100 = ["--cluster", "a100-80g-dgx", "--devices", "96", "--global-batch", "96"]


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Return the single sentence of a refusal."""
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
    "experts": (["llama3-8b", *H100, "layout.ep=4"], "leave layout.ep=4 out"),
    "a ring that cuts no sequence": (["llama3-8b", *H100, "layout.cp=4", "model.seq=1004"], "try model.seq=1008"),
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
    assert target_of("bloom-176b", ["model.layers=72"]).config.pipeline.split == ()
    for words in ([], ["layout.pp=12"], ["model.layers=70"]):
        assert target_of("bloom-176b", words).config.pipeline.split == (5, *[6] * 10, 5)


@pytest.mark.parametrize("command", ["cost", "simulate", "memory"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_answered(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [] if name in recipe_names() else ["--world", "8"]
    if command != "memory" and name not in recipe_names():
        words = H100
    assert answer(capsys, [command, name, *words])


@pytest.mark.parametrize("command", ["cost", "memory"])
def test_a_preset_that_only_approximates_its_model_says_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(APPROXIMATE_PRESETS) == {"codegeex-13b"} < set(PRESETS)
    for name in ("codegeex-13b", "bloom-176b"):
        assert main([command, name, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)
        said = "is planned by an approximation: CodeGeeX has 39 blocks" in captured.err
        assert said == (name in APPROXIMATE_PRESETS)


def test_the_planner_knows_context_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values of a rank's tokens travel round the ring in forward and backward, and in backward their gradients
    do too. With 4 ranks these are 3 messages, and then 4, of which the two in the middle carry both and are twice as
    large.
    """
    found = answer(capsys, ["cost", "llama3-8b", *H100, "layout.cp=4", "context.kind=ring"])
    hops, layers, micro_batches, tokens, keys_and_values = 3, 32, 64 // 16, 8192 // 4, 2 * 8 * 128 * 2
    calls = (hops + 4) * layers * micro_batches
    wire = 3 * hops * layers * micro_batches * tokens * keys_and_values
    mine = found["comm"]["cp"]
    assert (mine["calls"], mine["payload_bytes"], mine["wire_bytes"]) == (calls, wire, wire) and mine["seconds"] > 0
    assert found["ledger"]["cp"]["wire_bytes"] == 64 * wire


CP8 = ["--devices", "8", "layout.cp=8", "train.global_batch=8", "model.seq=4096"]


@pytest.mark.parametrize(
    ("words", "most", "balance"),
    [
        (["context.kind=ring"], 4096 * 4097 // 16, 1.0),
        (["context.order=striped"], None, 4104 / 4097),
        (["context.kind=hybrid", "context.inner=2", "context.order=contiguous"], None, (1.875 * 4096 + 1) / 4097),
    ],
)
def test_the_balance_of_shared_sequences_is_said(
    words: list[str], most: int | None, balance: float, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["llama3-8b", "--cluster", "h100-80g-dgx", *CP8, *words]
    found = answer(capsys, ["cost", *base])["context"]
    assert found["balance"] == pytest.approx(balance) and found["pairs"] == (most or found["pairs"])
    assert main(["cost", *base]) == 0
    words = f"{found['pairs']:,} causal pairs of a sequence, {balance:.3f} times the mean"
    assert words in capsys.readouterr().out
    assert "context" not in answer(capsys, ["cost", "llama3-8b", *H100])


def test_a_plan_says_the_balance(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [word for word in CP8 if not word.startswith("train")]
    fixed = ["layout.tp=1", "layout.pp=1", "zero.stage=3", "recompute.mode=full", "train.micro_batch=1"]
    base = ["plan", "llama3-8b", "--cluster", "h100-80g-dgx", "--global-batch", "8", *words, *fixed]
    assert main([*base, "--out", str(tmp_path / "plan.yaml")]) == 0
    text = capsys.readouterr().out
    assert "cp=8 shares sequences by" in text and "1.000 times the mean" in text
    assert "cp: 8" in (tmp_path / "plan.yaml").read_text()


def test_fewer_devices_than_a_node_are_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--cluster", "h100-80g-dgx", "--devices", "4", "zero.stage=1", "train.global_batch=8"]
    same = [answer(capsys, ["cost", "llama2-7b", *few, f"zero.shard_group={group}"]) for group in ("dp", "node")]
    assert same[0] == same[1]


@pytest.mark.wide
def test_a_search_keeps_the_schedule_that_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt3-175b", *A100, "--top", "96"]
    assert answer(capsys, words)["best"]["layout"]["chunks"] > 1, "so that 1f1b is another answer"
    for schedule in ("1f1b", "gpipe"):
        found = answer(capsys, [*words, f"pipeline.schedule={schedule}"])["candidates"]
        assert {(one["layout"]["schedule"], one["layout"]["chunks"]) for one in found} == {(schedule, 1)}


PLAN = ["plan", "llama3-8b", "--cluster", "h100-80g-dgx", "--devices", "64", "--global-batch", "64"]
UNPLANNED = {
    "a split": ([*PLAN, "pipeline.split=[16,16]"], "pipeline.split=[16,16] would have no effect"),
    "experts": ([*PLAN, "layout.ep=2"], "leave layout.ep=2 out"),
    "context": ([*PLAN, "layout.cp=2", "model.attention_dropout=0.1"], "layout.cp=1"),
    "no devices": (["plan", "bloom-176b", "--devices", "0"], "give --devices"),
    "no memory": ([*PLAN, "--fit", "0"], "--fit must be"),
    "parts of heads": ([*PLAN, "layout.tp=3"], "no layout with layout.tp=3 divides 64 devices"),
    "too many stages": ([*PLAN, "zero.stage=1", "layout.pp=100"], "leave zero.stage and layout.pp open"),
    "chunks of 1f1b": ([*PLAN, "layout.chunks=2", "pipeline.schedule=1f1b"], "leave layout.chunks and"),
    "too little divided": ([*PLAN, "layout.pp=1", "layout.tp=1", "zero.stage=0"], "with layout.pp=1, layout.tp=1"),
    "samples": ([*PLAN, "layout.tp=8", "layout.pp=1", "layout.cp=1", "run.eval_samples=3"], "3 is not a multiple"),
    "a ramp": ([*PLAN, "layout.tp=8", "layout.pp=1", "layout.cp=1", "train.ramp=[1,1,64]"], "passes through 1 samples"),
    "a warm-up": ([*PLAN, "lr.warmup=1000"], "longer than train.steps=100"),
    "scaling on nodes": (["scaling", *PLAN[1:4], "zero.shard_group=node"], "would have no effect"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPLANNED)
def test_a_search_refuses_what_it_would_not_heed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = UNPLANNED[name]
    assert sentence in said(capsys, words)


def test_more_devices_are_offered_within_what_is_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    """States that are whole on one device do not shrink, however many devices there are."""
    assert "of these devices with" not in said(capsys, [*PLAN, "layout.pp=1", "layout.tp=1", "zero.stage=0"])


@pytest.mark.parametrize(
    "words",
    [
        ["llama2-7b", "--devices", "32", "zero.shard_group=node", "layout.tp=8", "zero.stage=1"],
        ["llama2-7b", "--devices", "4", "zero.shard_group=node"],
        ["llama2-7b", "--devices", "32", "zero.shard_group=node", "layout.node_size=4", "zero.stage=3"],
        *(
            pytest.param(["llama2-7b", "--devices", "32", *more], marks=pytest.mark.wide)
            for more in (["run.eval_samples=6"], ["train.ramp=[4,4,64]"], ["pipeline.schedule=gpipe", "layout.pp=2"])
        ),
    ],
)  # fmt: skip
def test_what_plan_writes_passes(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, where = str(tmp_path / "best.yaml"), ["--cluster", "h100-80g-dgx"]
    best = answer(capsys, ["plan", *words, *where, "--global-batch", "96", "--out", out])["best"]
    assert answer(capsys, ["config", "check", out, "--world", words[2]])["ok"]
    assert answer(capsys, ["cost", out, *where, "--devices", words[2]])["step_time_s"] == best["step_time_s"]


def test_it_says_what_the_rules_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "run.eval_samples=3", "--out", str(tmp_path / "best.yaml")]) == 0
    assert "more break a rule, the most promising of them this one: run.eval_samples=3" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "word", "precision"), [
    ("llama2-7b", [], "fp16"), ("bloom-176b", [], "fp16"), ("llama2-7b", ["train.precision=fp32"], "fp32"),
    ("llama2-7b", ["train.precision=bf16"], "bf16"),
])  # fmt: skip
def test_a_presets_precision_is_one_that_the_devices_have(name: str, word: list[str], precision: str) -> None:
    target = target_of(name, word, as_run=False)
    for lacking in ("v100-32g", "ascend-910-32g"):
        assert with_supported_precision(target, load_cluster(lacking)).config.train.precision == precision
    for other in ("a100-80g-dgx", "laptop"):
        assert with_supported_precision(target, load_cluster(other)) == target


def test_plan_takes_that_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "best.yaml"
    answer(capsys, ["plan", "llama2-7b", "--cluster", "v100-32g", *PLAN[4:], "--out", str(out)])
    assert load_config(out).train.precision == "fp16"


@pytest.mark.wide
def test_scaling_searches_what_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "h100-80g-dgx", "--global-batch", "16", "--devices", "8"]
    points = answer(capsys, ["scaling", "llama3-8b", *words, "--mode", "strong"])["strong"]
    (hybrid,) = (point for point in points if point["way"] == "hybrid")
    assert hybrid["layout"]["zero"] == 2, "a choice that a shorter search would leave out"
    best = answer(capsys, ["plan", "llama3-8b", *words])["best"]
    assert (hybrid["layout"], hybrid["step_time_s"]) == (best["layout"], best["step_time_s"])


PLANS = {
    "one copy, weights elsewhere": (["gpt2-124m", "--devices", "1", "zero.stage=3", "zero.offload.params=cpu"], 0),
    "an odd sequence": (["gpt2-1.5b", "--devices", "8", "--seq", "1023"], 0),
    "bf16 where there is none": (["gpt2-124m", "--devices", "8", "--cluster", "v100-32g", "train.precision=bf16"], 2),
}


@pytest.mark.parametrize("name", list(PLANS))
def test_what_trains_is_planned_and_nothing_else(name: str, tmp_path: Path) -> None:
    words, code = PLANS[name]
    cluster = [] if "--cluster" in words else ["--cluster", "h100-80g-dgx"]
    assert main(["plan", *words, *cluster, "--global-batch", "16", "--out", str(tmp_path / "plan.yaml")]) == code


def test_a_missing_node_leaves_groups_that_divide() -> None:
    words = ["layout.pp=2", "zero.stage=3", "zero.shard_group=node", "train.global_batch=96"]
    step = ["simulate", "llama3-8b", "--cluster", "h100-80g-dgx", "--devices", "32", *words]
    assert main([*step, "--what-if", "fewer-nodes=1"]) == 2
    assert main([*step, "--what-if", "fewer-nodes=2"]) == 0
