"""Tests of `meshwright check` on configs without a bug, and of its messages for wrong input."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

import meshwright.cli.check as command
from meshwright.cli.check import as_json, page
from meshwright.cli.main import main
from meshwright.config.exact_twin import ExactTwin, exact_twin, fitting_layout
from meshwright.config.load import load_config
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import LayoutConfig
from meshwright.errors import UserError
from meshwright.plan.agreement import Verdict, difference
from meshwright.plan.communication import predict_step
from meshwright.watch.planned import planned_bytes
from tests.check.test_planted import CONFIG, MIXTURE
from tests.models.planned_families import write_tiny

LLAMA = ("model.norm=rmsnorm", "model.mlp=swiglu", "model.bias=false", "model.kv_heads=2")
CASES: dict[str, tuple[str, ...]] = {
    "tp-pp": ("layout.tp=2", "layout.pp=2", "layout.sequence_parallel=true", *LLAMA),
    "zero-3": ("zero.stage=3", "recompute.mode=full", *LLAMA),
    "documents-over-cp": ("layout.cp=2", "data.reset_attention=true", "data.reset_positions=true", "data.eod=0"),
    "experts": ("layout.ep=2", "layout.tp=2", "layout.etp=1", *MIXTURE, "model.experts.aux_loss=0.01"),
    "windows": ("layout.cp=2", "model.window=64", "model.window_pattern=[1,0]"),
    "uneven-vocabulary": ("layout.tp=4", "model.vocab=1001"),
    "lossy": ("comm.reduce.kind=int8", "model.dropout=0.1", "train.precision=fp8", "model.vocab=1024"),
    "replicas": ("layout.replicas=2", "train.local.steps=10"),
    "interleaved": ("layout.pp=2", "layout.chunks=2", "pipeline.schedule=interleaved", "model.layers=8"),
    "capacity": ("layout.ep=2", *MIXTURE, "model.experts.capacity=1.0"),
    "preferences": ("data.objective=preference", "tune.kind=lora", "tune.loss=dpo", "tune.base=x", "layout.tp=2"),
}
QUICK = ("tp-pp", "lossy")


@pytest.fixture()
def config(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.wide]) for n in CASES])
def test_a_right_layout_agrees(name: str, config: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main(["check", config, *CASES[name], "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert result["agree"] and result["complaints"] == [] and result["first"] is None
    assert max(result["gradients"].values()) <= 1e-10 and len(result["gradients"]) > 10
    assert result["memory"]["planned"] == pytest.approx(result["memory"]["measured"], rel=0.35)


@pytest.mark.wide
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Check the same twin on every machine.
    monkeypatch.setattr(command, "ranks_here", lambda: 8)
    assert main(["check", name]) == 0


def test_lossy_features_are_replaced_and_named(config: str) -> None:
    exact = exact_twin(load_config(config, CASES["lossy"]), 2, 8, given=False)
    assert [sentence.split(":")[0] for sentence in exact.changes[:3]] == [
        "train.precision", "dropout", "comm.reduce.kind=int8",
    ]  # fmt: skip
    assert exact.config.comm.reduce.kind == "plain" and not exact.config.drops
    replicas = exact_twin(load_config(config, CASES["replicas"]), 4, 8, given=False)
    assert any(sentence.startswith("layout.replicas: 2 ->") for sentence in replicas.changes)
    assert replicas.world == 4 and replicas.config.layout.replicas == 1


@pytest.mark.parametrize("name", recipe_names())
def test_every_axis_of_a_recipe_stays(name: str) -> None:
    recipe, config = read_recipe(name), load_config(name)
    exact = exact_twin(config, recipe.devices, 8, given=False)
    check(exact.config, exact.world, TRAINING_RULES)
    for axis in ("tp", "pp", "cp", "ep"):
        was, now = getattr(config.layout, axis), getattr(exact.config.layout, axis)
        assert (was > 1) == (now > 1) and now <= was


def test_dp_shrinks_first_and_nothing_below_two() -> None:
    its = LayoutConfig(tp=4, pp=2)
    assert fitting_layout(its, 64, 16, given=False)[:2] == (its, 16)
    smaller, world, why = fitting_layout(its, 64, 8, given=False)
    assert (smaller.tp, smaller.pp, world) == (2, 2, 8) and why == "this machine runs 8 ranks at once"
    least, world, _ = fitting_layout(LayoutConfig(tp=8, pp=8, cp=2), 128 * 16, 4, given=False)
    assert (least.tp, least.pp, least.cp, world) == (2, 2, 2, 16)
    for grid in ((4, 2), (2, 4), (2, 2)):  # a grid of 2 x 2 stays, and pp shrinks beside it
        least, world, _ = fitting_layout(LayoutConfig(tp=math.prod(grid), pp=4, tp_grid=grid), 64, 8, given=False)
        assert (least.tp_grid, least.pp, world) == ((2, 2), 2, 16)
    with pytest.raises(UserError, match="--nproc 6 is not a multiple of the 4 ranks of tp=2 x pp=2"):
        fitting_layout(LayoutConfig(tp=2, pp=2), 8, 6, given=True)


@pytest.mark.parametrize("tp, pp, ranks, dp", [(4, 2, 8, 1), (2, 3, 6, 1), (2, 2, 8, 2), (4, 1, 8, 2)])
def test_a_layout_that_fits_nproc_is_kept(tp: int, pp: int, ranks: int, dp: int) -> None:
    its = LayoutConfig(tp=tp, pp=pp)
    assert fitting_layout(its, 2 * its.least_world, ranks, given=True)[:2] == (its, dp * its.least_world)


def checked(*words: str) -> ExactTwin:
    """Return the config and the number of ranks that the command would run."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words)
    args.scratch = Path("nowhere")
    return command.checked_from(args)


def test_the_rules_are_asked_about_the_ranks_that_are_started(config: str) -> None:
    """A batch of one sample is accepted on 4 ranks, which are one replica, and refused on 8 ranks, which are two."""
    small = ("layout.tp=4", "train.global_batch=1", "train.micro_batch=1")
    assert checked(config, *small, "--nproc", "4").world == 4
    assert checked(config, *small).world == 4
    with pytest.raises(UserError, match="train.global_batch=1 "):
        checked(config, *small, "--nproc", "8")
    assert checked(config, "layout.tp=4", "layout.pp=2", "--nproc", "4").config.layout.tp == 2, "tp shrinks to fit"


def test_a_folder_s_model_takes_the_place_of_the_config_s(config: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    folder, its = str(tmp_path / "folder"), {"model_type": "llama", "hidden_size": 96, "intermediate_size": 128}
    its |= {"num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 77, "rms_norm_eps": 1e-6}
    its |= {"max_position_embeddings": 64, "num_key_value_heads": 6, "hidden_act": "silu"}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(its), encoding="utf-8")
    args = argparse.Namespace(config=config, overrides=["model.seq=32"], model=folder)
    model = command.config_of(args).model
    assert (model.layers, model.hidden, model.vocab, model.norm, model.seq) == (3, 96, 77, "rmsnorm", 32)
    args.overrides = ["model.layers=2"]
    with pytest.raises(UserError, match="model.layers=2 and --model .* both describe the model"):
        command.config_of(args)
    verdict = Verdict(1e-10, ((1.0, 1.0),), ((1.0, 1.0),), {"a": 0.0}, {"a": 0.0}, None, {}, {})
    result = as_json(config, folder, exact_twin(load_config(config), 2, 8, given=False), verdict)
    assert f"with the model of {folder} on 2 ranks" in page(result | {"seconds": 1.0})


@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_tp_divides_the_targets_of_a_t5(ranks: int) -> None:
    exact = exact_twin(load_config("t5-11b"), read_recipe("t5-11b").devices, ranks, given=False)
    check(exact.config, exact.world, TRAINING_RULES)


def test_a_large_machine_checks_the_same_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.device.host_memory_bytes", lambda: 2.0**44)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert command.ranks_here() == 8


def test_only_changed_sizes_are_named(config: str) -> None:
    exact = exact_twin(load_config(config, ["model.layers=2"]), 2, 8, given=False)
    (sizes,) = [sentence for sentence in exact.changes if sentence.startswith("model:")]
    assert all(was != now for was, now in re.findall(r"(\d+) -> (\d+)", sizes)), sizes


@pytest.mark.parametrize("source", ["def (", "import no_such_module_anywhere", "undefined_name"])
def test_a_file_that_cannot_be_imported_is_wrong_input(
    source: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "start", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr(command, "warm_up", lambda: None)
    (tmp_path / "own.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(command, "check", lambda *_: None)
    assert main(["check", config, "--model", str(tmp_path / "own.py"), "--nproc", "2"]) == 2
    assert "own.py can't be imported (" in capsys.readouterr().err


def _raise(*_: object) -> int:
    raise ValueError("a bug")


@pytest.mark.parametrize("start, code", [(_raise, 70), (lambda *_: 1, 70), (lambda *_: 75, 75), (lambda *_: 2, 2)])
def test_a_crash_is_no_difference(start: Any, code: int, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "start", start)
    monkeypatch.setattr(command, "warm_up", lambda: None)
    assert main(["check", config, "--nproc", "2"]) == code


def test_real_sizes_that_do_not_fit_are_refused(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "start", lambda *_: pytest.fail("a process was started"))
    monkeypatch.setattr("meshwright.device.host_memory_bytes", lambda: 2.0**20)
    assert main(["check", config, "--full", "--nproc", "2", "run.device=cpu"]) == 2
    assert re.search(r"which takes [\d.]+ MiB, and this machine has free 1.00 MiB", capsys.readouterr().err)


@pytest.mark.parametrize("one, other", [(math.nan, math.nan), (1.0, math.nan), (math.inf, math.inf), (math.inf, 1.0)])
def test_numbers_that_are_not_finite_never_agree(one: float, other: float) -> None:
    assert difference(one, other) == math.inf
    losses = Verdict(1e-10, ((one, other),), (), {}, {}, None, {}, {})
    assert losses.complaints


@pytest.mark.parametrize(
    "words, message",
    [
        (["--nproc", "0"], "--nproc 0 must be at least 1"),
        (["--tolerance", "2"], "--tolerance 2 must be at least 0"),
        (["--model", "nowhere"], "--model nowhere is neither a folder nor a Python file"),
        (["layout.tp=3"], "tp=3 does not divide heads=8"),
    ],
)
def test_wrong_input_is_told(words: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", config, *words]) == 2
    assert message in capsys.readouterr().err


OWN = """
import numpy as np
import torch
from torch import nn


class Stage(nn.Module):
    def __init__(self, ctx, stage):
        super().__init__()
        torch.manual_seed(1)
        model = ctx.config.model
        self.embed, self.head = nn.Embedding(model.vocab, 16), nn.Linear(16, model.vocab)
        self.receives = {}
        self.double()


class Data:
    def sample(self, n):
        ids = np.random.default_rng(n).integers(0, 1000, 33)
        return {"tokens": ids[:-1], "labels": ids[1:]}


def model_provider(ctx, stage):
    return Stage(ctx, stage)


def datasets_provider(ctx, samples):
    return Data(), None, None


def forward_step(ctx, module, batch, received):
    out, labels = module.head(module.embed(batch["tokens"])), batch["labels"]
    loss = nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, labels.numel(), {}
"""


@pytest.mark.wide
def test_a_module_of_ones_own(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    words = ["check", config, "--model", str(tmp_path / "own.py"), "--nproc", "2"]
    assert main([*words, "zero.stage=1"]) == 0
    assert "all 3 gradients of 3 steps are within 1e-10" in capsys.readouterr().out


@pytest.mark.wide
def test_a_module_of_transformers_with_packed_documents(tmp_path: Path) -> None:
    folder, path, out = write_tiny("granite", tmp_path), tmp_path / "hf.yaml", tmp_path / "found.json"
    path.write_text(
        "model: {seq: 16}\ntrain: {global_batch: 8, micro_batch: 2}\nlayout: {tp: 2}\n"
        "data: {prefixes: [made], reset_attention: true, reset_positions: true, eod: 0}\n", encoding="utf-8",
    )  # fmt: skip
    assert main(["check", str(path), "--model", folder, "--nproc", "2", "--json", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["documents"] <= 1e-10 and result["memory"]["measured"] is None


@pytest.mark.wide
def test_the_real_sizes_in_the_run_s_precision(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["model.layers=2", "model.hidden=64", "model.seq=32", "train.precision=fp32", "run.device=cpu"]
    assert main(["check", config, *sizes, "layout.tp=2", "--full", "--nproc", "2"]) == 0
    stdout = capsys.readouterr().out
    assert "in fp32" in stdout and "within 0.0001 of one process's" in stdout


def test_monitored_values_of_the_objective_are_planned_once(config: str) -> None:
    pairs = load_config(config, CASES["preferences"])
    assert len(pairs.monitored_names) == 1
    plan = predict_step(pairs, 4, samples=16)
    planned = planned_bytes(pairs, 4, 16, monitored=1)
    assert planned == {axis: dict(traffic._asdict()) for axis, traffic in plan.items()}
