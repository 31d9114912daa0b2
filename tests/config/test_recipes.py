"""Tests of recipes, the complete configs of published runs: their predictions and their small twins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.config.presets import APPROXIMATE_PRESETS, PRESETS
from meshwright.config.recipes import FOLDER, read_recipe, recipe_names
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.config.step_schedules import consumed_after
from meshwright.config.twin import tiny_config, twin
from meshwright.plan.memory import largest
from meshwright.plan.recipes import markdown, predict_recipe
from meshwright.spec.model.description import describe, layout_of
from meshwright.spec.model.graph import parameter_count

DOCS = Path(__file__).parents[2] / "docs"
NAMES = recipe_names()
NEEDED = {"model", "train", "optimizer", "lr", "data", "run", "recipe"}
# The sizes of a model, which differ in its twin. All other keys of the model section stay the same.
SIZES = {
    "preset", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq", "ffn", "predictions", "experts",
    "latent", "rope_scaling", "t5",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete_and_can_be_trained(name: str) -> None:
    config, recipe = load_config(name), read_recipe(name)
    check(config, recipe.devices, TRAINING_RULES)
    preset = recipe.sections["model"].get("preset", name)
    assert preset in PRESETS and {*recipe.sections, "recipe"} >= NEEDED
    sourced = {section for sections in recipe.values for section in sections.split(", ")}
    # A recipe must say that the values of sections without a source are ours.
    unsourced = {"train", "optimizer", "lr", "data"} - sourced
    assert "model" in sourced and sourced <= recipe.sections.keys() and (not unsourced or recipe.unpublished)
    assert recipe.source and recipe.hardware and recipe.title and recipe.layout in ("published", "ours")
    assert name not in APPROXIMATE_PRESETS or any("here" in sentence for sentence in recipe.differs)
    assert config.run.dir == f"runs/{name}" and "whole_run" not in recipe.published
    shape = load_config(None, [f"model.preset={preset}", "data.prefixes=x"]).model
    mine, its = (parameter_count(describe(model)) for model in (config.model, shape))
    assert mine == pytest.approx(its, rel=0.02), "the recipe trains its preset"


@pytest.mark.parametrize("name", NAMES)
def test_its_steps_see_the_published_tokens(name: str) -> None:
    """The steps consume the published number of tokens, also with a growing batch, and the plan fits the device."""
    config, published = load_config(name), read_recipe(name).published
    if "tokens" in published:
        seen = consumed_after(config, config.train.steps) * config.model.seq
        assert seen == pytest.approx(float(published["tokens"]), rel=0.01)
    comparison = predict_recipe(name)
    assert comparison.memory_gib <= comparison.cost.cluster.device.memory_gib


@pytest.mark.parametrize("name", [name for name in NAMES if read_recipe(name).published.get("tflops")])
def test_published_speeds_are_close(name: str) -> None:
    comparison = predict_recipe(name)
    if comparison.recipe.published["counts"] == "whole run":
        assert comparison.error is None, "hours of a whole run are no speed of a step"
        assert comparison.published_hours and comparison.predicted_hours
    else:
        assert abs(comparison.error) < 0.25


@pytest.mark.parametrize("name", NAMES)
def test_predictions_that_are_far_off_have_a_reason(name: str) -> None:
    comparison = predict_recipe(name)
    longer = (comparison.predicted_hours or 0.0) > 1.2 * (comparison.published_hours or float("inf"))
    assert (abs(comparison.error or 0.0) > 0.2 or longer) == bool(comparison.recipe.why)


def axes_of(config: Config, world: int) -> set[str]:
    """Return the axes with more than one rank, and "chunks" if the pipeline has several chunks."""
    layout = layout_of(config, world)
    sizes = {axis: layout.size(axis) for axis in ("tp", "cp", "pp", "dp", "ep")} | {"chunks": config.layout.chunks}
    return {axis for axis, size in sizes.items() if size > 1}


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_keeps_the_axes_and_the_parts(name: str) -> None:
    config, devices = load_config(name), read_recipe(name).devices
    small, ranks = tiny_config(name)
    check(small, ranks, TRAINING_RULES)
    assert ranks == min(8, devices) and axes_of(small, ranks) == axes_of(config, devices)
    assert (small.zero.stage, small.recompute.mode, small.pipeline.schedule, small.layout.order) == (
        config.zero.stage, config.recompute.mode, config.pipeline.schedule, config.layout.order
    )  # fmt: skip
    kept = set(vars(config.model)) - SIZES
    assert {key: getattr(small.model, key) for key in kept} == {key: getattr(config.model, key) for key in kept}
    assert bool(small.model.experts.count) == bool(config.model.experts.count)
    assert bool(small.model.latent.kv_rank) == bool(config.model.latent.kv_rank)
    assert (small.model.kv_heads < small.model.heads) == (config.model.kv_heads < config.model.heads)
    assert parameter_count(describe(small.model)) < 1e6


def test_the_page_is_current() -> None:
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert page == markdown(), "write it again: meshwright recipes --markdown > docs/recipes.md"


def test_layouts_are_those_of_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--layouts"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["recipe", *NAMES]
    rows = {line[0]: line[1:7] for line in lines}
    assert rows["mt-nlg-530b"] == ["3360", "12", "8", "35", "0", "bf16"]
    assert rows["codegeex-13b"][:5] == ["1536", "192", "8", "1", "2"]


def test_the_table_has_published_beside_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[: len(NAMES) + 1]
    assert [line.split()[0] for line in rows] == ["recipe", *NAMES] and max(map(len, rows)) <= 80
    # The hours of a whole run have no error beside them.
    (deepseek,) = [line for line in rows if "deepseek-v3" in line]
    assert "%" not in deepseek and "2.66M" in deepseek
    assert main(["recipes", "bloom-176b", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["published"]["tflops"] == 150 and result["error"] == predict_recipe("bloom-176b").error
    assert main(["recipes", "blom-176b"]) == 2
    assert "did you mean 'bloom-176b'" in capsys.readouterr().err


def test_commands_take_a_recipe_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", "check", "llama3-405b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "world": 16384, "dp": 128, "tp": 8, "pp": 16}
    assert main(["config", "show", "bloom-176b", "train.steps=1000", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["train"]["steps"], shown["layout"]["pp"], shown["train"]["ramp"][0]) == (1000, 12, 192)
    # Without a cluster on the command line, the recipe's cluster is used.
    assert main(["cost", "gpt2-124m", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["cluster"], cost["devices"], cost["global_batch"]) == ("a100-80g-dgx", 1, 512)
    copy = tmp_path / "mine.yaml"
    copy.write_text((FOLDER / "bloom-176b.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    assert load_config(copy) == load_config("bloom-176b"), "a recipe's file is a config file"
    assert main(["config", "show", "bloom-17b"]) == 2
    assert "did you mean 'bloom-176b'" in capsys.readouterr().err


def test_a_preset_of_a_layout_that_nobody_published_is_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """`gpt3-175b` names only a model, while `bloom-176b` brings the published layout to any cluster."""
    where = ["--cluster", "h100-80g-dgx", "--devices", "96", "--json"]
    assert main(["cost", "gpt3-175b", "train.global_batch=96", *where]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["tp"] == 1
    assert main(["cost", "bloom-176b", *where]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["tp"] == 4


def start_twin(name: str, steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Train a recipe's twin and return its losses."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", name, "--tiny", f"train.steps={steps}", "run.tensorboard=false", "--json"]) == 0
    lines = (tmp_path / "runs" / f"{name}-tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_twin_needs_nothing_and_learns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = start_twin("gpt2-124m", 12, monkeypatch, tmp_path)
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.3


def test_tiny_is_of_recipes_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo.yaml", "--tiny"]) == 2
    assert "--tiny needs a recipe's name, and 'demo.yaml' is none" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2-124m"])
def test_every_twin_trains(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loss of every twin falls. It falls less with adapters, whose output layer is frozen and random."""
    losses = start_twin(name, 30, monkeypatch, tmp_path)
    least = 0.2 if tiny_config(name)[0].tune.adapts else 0.3
    assert len(losses) == 30 and sum(losses[-3:]) / 3 < losses[0] - least


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_the_first_and_the_last_rank_run_dry(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = read_recipe(name)
    # A few micro-batches are enough. A whole step has many more, which are all alike.
    few = str(2 * load_config(name).layout.pp)
    assert main(["dryrun", name, "--ranks", f"0,{recipe.devices - 1}", "--micro-batches", few, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]


def test_a_twin_of_replicas_has_two_and_a_batch_for_both() -> None:
    config = load_config("gpt2-124m")
    small, ranks = twin(replace(config, layout=replace(config.layout, replicas=4)), 32, "gpt2-124m")
    assert (small.layout.replicas, ranks) == (2, 8)
    check(small, ranks)


def test_what_is_frozen_is_neither_summed_nor_updated() -> None:
    """Eight GPUs train adapters eight times as fast as one, and 4-bit weights take 17/32 byte instead of 2."""
    one, eight = (predict_recipe(f"llama3-8b-lora{devices}").cost for devices in (1, 8))
    assert eight.step_s == pytest.approx(one.step_s / 8, rel=0.01)
    parameters = [largest(predict_recipe(f"llama3-8b-{kind}").cost.job).parameters for kind in ("lora1", "nf4")]
    linear = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    assert parameters[0] - parameters[1] == pytest.approx(linear * (2 - 17 / 32))
