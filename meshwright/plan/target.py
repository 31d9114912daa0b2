"""Reads the target of a planning command: a config file or a preset's name, with `a.b=c` words on top. No torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.config.load import GivenConfig, config_from, read_sections, set_key
from meshwright.config.presets import PRESETS
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.config.rules import PLANNING_RULES, check
from meshwright.config.sections import Config
from meshwright.config.yaml_text import read_yaml
from meshwright.disk import hub_hint
from meshwright.errors import UserError, nearest, notice
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.job import Job, job_of
from meshwright.plan.schedules import choose_schedule
from meshwright.plan.search import MAX_DEVICES, usable_gib
from meshwright.plan.stack import STACKS, Stack, own_stack
from meshwright.spec.layout.layout import check_world
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE, default_kind

# The short words of --layout, and the config keys that they stand for.
LAYOUT_WORDS = {
    "tp": "layout.tp", "pp": "layout.pp", "cp": "layout.cp", "ep": "layout.ep", "etp": "layout.etp",
    "chunks": "layout.chunks", "order": "layout.order",
    "sp": "layout.sequence_parallel", "sequence_parallel": "layout.sequence_parallel",
    "micro_batch": "train.micro_batch", "mb": "train.micro_batch", "schedule": "pipeline.schedule",
    "zero": "zero.stage", "recompute": "recompute.mode", "offload": "recompute.offload", "pieces": "recompute.pieces",
}  # fmt: skip

# The sections of a recipe that planning uses in addition to the model, and the keys of its `train` section.
PLANNED_SECTIONS = ("layout", "pipeline", "zero", "recompute", "context", "optimizer", "loss_scale", "comm")
PLANNED_TRAIN_KEYS = ("global_batch", "micro_batch", "precision", "grad_dtype", "fp8_scale", "compile")


@dataclass(frozen=True)
class Target:
    """A config, and the published run behind a preset, if it has one."""

    name: str
    config: Config
    run: Mapping[str, Any] = field(default_factory=dict)
    own_precision: bool = True  # True if the user set the precision. Otherwise it is chosen by the cluster's devices.
    own_batch: bool = True  # True if train.global_batch was given, by the user or by a published run.


def target_of(
    target: GivenConfig, words: Sequence[str] = (), layout: str = "", as_run: bool = True, placed: bool = True
) -> Target:
    """Return the target of that name.

    With `as_run`, it has the layout of the published run of that name. An unpublished layout of a recipe is used only
    if the command sets no layout, cluster or devices (not `placed`).
    """
    raw, run, name = _raw(target, as_run, placed)
    given = [*_layout_words(layout), *words]
    for word in given:
        set_key(raw, word)
    keys = {word.partition("=")[0] for word in given}
    if run and "pipeline.split" not in keys and _moved_stages(raw, run):
        raw.get("pipeline", {}).pop("split", None)
    _interleave(raw)
    train = raw["train"] if isinstance(raw.get("train"), dict) else {}
    # The config of a preset always contains a precision, so there only the given words count.
    named = isinstance(target, str) and target in PRESETS
    own_precision = "train.precision" in keys if named else "precision" in train
    return Target(name, config_from(raw), run, own_precision, "global_batch" in train)


def _moved_stages(raw: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return True if a published run's split of layers no longer applies: the stages or the layers are different."""
    mine = raw.get("layout", {})
    its = run.get("layout", {})
    layers = sum(run.get("pipeline", {}).get("split", ()))
    others = raw["model"].get("layers", layers) != layers
    return others or any(mine.get(key, 1) != its.get(key, 1) for key in ("pp", "chunks"))


def _interleave(raw: dict[str, Any]) -> None:
    """Select the default schedule for several chunks if chunks are given and no schedule is.

    Values that are not sections are left to the config, which reports them.
    """
    layout, pipeline = ({} if raw.get(name) is None else raw[name] for name in ("layout", "pipeline"))
    if not isinstance(layout, dict) or not isinstance(pipeline, dict):
        return
    if layout.get("chunks", 1) not in (1, "1") and "schedule" not in pipeline:
        raw["pipeline"] = {**pipeline, "schedule": default_kind(2)}


def published_run(target: str, placed: bool = True) -> dict[str, Any]:
    """Return the parts of a recipe's run that planning uses, or nothing if there is no such recipe.

    These are its planned sections, the cluster, the number of devices and the software stack.
    """
    if target not in recipe_names() or (placed and read_recipe(target).layout != "published"):
        return {}
    run = copy.deepcopy(read_recipe(target).run)
    run["train"] = {key: value for key, value in run["train"].items() if key in PLANNED_TRAIN_KEYS}
    return {key: value for key, value in run.items() if key not in ("data", "lr", "run", "checkpoint")}


def _raw(target: GivenConfig, as_run: bool, placed: bool) -> tuple[dict[str, Any], Mapping[str, Any], str]:
    """Return (sections of the config, published run, name) of a target."""
    if isinstance(target, (Config, Mapping)):
        return {"data": {"prefixes": ["tokens"]}} | read_sections(target), {}, "config"
    target, path = str(target), Path(target)
    if target in PRESETS:
        run = published_run(target, placed)
        raw: dict[str, Any] = {"model": {"preset": target}, "data": {"prefixes": ["tokens"]}}
        raw["train"] = {"precision": "bf16"}
        for section in ("model", "train", *(PLANNED_SECTIONS if as_run else ())):
            raw[section] = {**raw.get(section, {}), **run.get(section, {})}
        return {key: value for key, value in raw.items() if value}, run, target
    # A recipe whose name is not a preset's.
    if target in recipe_names() and not path.is_file():
        return dict(read_sections(target)), published_run(target, placed=False), target
    if path.suffix == ".json" and path.is_file():
        return _of_hugging_face(path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        read = read_sections(target)
        data = {"prefixes": ["tokens"]} if read.get("data") is None else read["data"]
        return read | {"data": data}, {}, path.stem
    if (path / "config.json").is_file():
        return _of_hugging_face(path / "config.json")
    raise UserError(
        f"there is no config file and no preset '{target}'{nearest(target, PRESETS) or hub_hint(target)}: "
        f"the presets are {', '.join(sorted(PRESETS))}"
    )


def _of_hugging_face(path: Path) -> tuple[dict[str, Any], Mapping[str, Any], str]:
    """Return (sections of the config, published run, name) for a config.json that transformers wrote."""
    # Imported here because it reads the table of families, which other targets don't need.
    from meshwright.spec.model.hf import FAMILIES

    read = read_yaml(path)  # JSON is YAML
    if not isinstance(read, dict) or "model_type" not in read:
        raise UserError(f"{path} names no model_type: give a Hugging Face config.json, or a YAML file of ours")
    family = FAMILIES.get(str(read["model_type"]))
    # Any other family is planned as transformers builds it.
    model = asdict(family.model_of(read, 0)) if family else {"hf": str(path.parent)}
    return {"model": model, "data": {"prefixes": ["tokens"]}}, {}, path.absolute().parent.name


def _layout_words(text: str) -> list[str]:
    """Turn `tp=8,pp=16` into config words."""
    words = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if key == "dp":
            raise UserError("--layout names dp, which follows from the number of devices: leave it out")
        if not equals or key not in LAYOUT_WORDS:
            raise UserError(
                f"--layout has '{part}'{nearest(key, LAYOUT_WORDS)}: write e.g. tp=8,pp=16,chunks=2,micro_batch=1,"
                "zero=1,recompute=full,sp=true"
            )
        words.append(f"{LAYOUT_WORDS[key]}={value}")
    return words


def on_cluster(target: Target, devices: int, cluster: Cluster, stack: Stack | None = None) -> Job:
    """Return the job of a target on that many devices of a cluster. Refuse it if it breaks a rule."""
    host = cluster.device.units == 1
    node = min(cluster.node.devices, devices)
    job = job_of(target.config, devices, stack or own_stack(target.config, host), cluster_node=node, host=host)
    if target.config.pipeline.schedule == AUTO_SCHEDULE:
        choice = choose_schedule(job, cluster, usable_gib(cluster))
        notice(f"pipeline.schedule={AUTO_SCHEDULE}: {choice.why()}")
        job = choice.best.job
    check(job.config, devices, PLANNING_RULES)
    return job


def with_supported_precision(target: Target, cluster: Cluster) -> Target:
    """Return the target in the usual precision of accelerators: bf16, or fp16 if the devices lack bf16.

    A precision that the user gave is kept, and so is that of a published run if the devices have it.
    """
    c, peak = target.config, cluster.device.peak
    if c.train.precision in peak and c.train.precision == target.run.get("train", {}).get("precision"):
        return target
    usual = next((name for name in ("bf16", "fp16") if name in peak), c.train.precision)
    if target.own_precision or cluster.device.units == 1 or usual == c.train.precision:
        return target
    return replace(target, config=replace(c, train=replace(c.train, precision=usual)))


def cluster_for(target: Target, name: str | None) -> Cluster:
    """Return the named cluster, or that of the preset's published run."""
    chosen = name or target.run.get("cluster", "")
    if not chosen:
        raise UserError("give --cluster with the name of a cluster or the path of its file")
    cluster = load_cluster(chosen)
    rate = target.run.get("network_gb_s")
    if rate and not name:
        cluster = replace(cluster, network=replace(cluster.network, node_gb_s=float(rate)))
    return cluster


def devices_for(target: Target, given: int | None) -> int:
    """Return the given number of devices, or that of the preset's published run."""
    count = int(target.run.get("devices", 0)) if given is None else given
    if count < 1:
        raise UserError("give --devices with the number of devices, at least 1")
    check_world(count, "--devices", MAX_DEVICES)
    return count


def stack_for(config: Config, cluster: Cluster, name: str | None) -> Stack:
    """Return the named stack, or our own stack as this config uses it on the cluster."""
    if not name:
        return own_stack(config, cluster.device.units == 1)
    if name not in STACKS:
        raise UserError(f"there is no stack '{name}'{nearest(name, STACKS)}: the stacks are {', '.join(STACKS)}")
    return STACKS[name]
