"""What a planning command is asked about: a config file or a preset's name, with `a.b=c` words on top. No torch.

Keys that this version can plan but not yet train (its config has no such section) are kept beside the config.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.config.load import config_from, parse_yaml, set_key
from meshwright.config.presets import PRESETS, RUNS
from meshwright.config.sections import Config
from meshwright.errors import UserError, nearest
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.communication import Traffic, predict_step
from meshwright.plan.stack import OWN, STACKS, Stack
from meshwright.plan.workload import Workload, workload_of

# Keys of the planner that a config may not have yet, with the values that are allowed (None: any).
PLANNED: dict[str, tuple[str, ...] | None] = {
    "zero.stage": ("0", "1", "2", "3"),
    "zero.shard_group": ("dp", "node"),
    "zero.offload.optimizer": ("none", "cpu", "disk"),
    "zero.offload.params": ("none", "cpu", "disk"),
    "recompute.mode": None,
    "train.grad_dtype": ("fp32", "bf16", "fp16", "fp64"),
    "optimizer.master_dtype": ("fp32", "bf16", "fp16", "fp64"),
    "optimizer.state_dtype": ("fp32", "bf16", "fp16", "fp64"),
}

# The short words of --layout, and the keys they stand for.
SHORT = {
    "tp": "layout.tp", "pp": "layout.pp", "cp": "layout.cp", "chunks": "layout.chunks", "order": "layout.order",
    "sp": "layout.sequence_parallel", "sequence_parallel": "layout.sequence_parallel",
    "micro_batch": "train.micro_batch", "mb": "train.micro_batch", "schedule": "pipeline.schedule",
    "zero": "zero.stage", "recompute": "recompute.mode",
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A config, the planner's own keys beside it, and the published run behind a preset, if it has one."""

    name: str
    config: Config
    extras: Mapping[str, str] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)

    def workload(self, world: int, node_size: int) -> Workload:
        return workload_of(self.config, world, node_size, self.extras)


def planned(target: str, words: Sequence[str] = (), layout: str = "", as_run: bool = True) -> Planned:
    """The job that `target` names; `as_run`: with the layout of the published run of that name."""
    raw, run, name = _raw(target, as_run)
    for word in [*_layout_words(layout), *words]:
        set_key(raw, word)
    if raw.get("layout", {}).get("chunks", 1) not in (1, "1") and "schedule" not in (raw.get("pipeline") or {}):
        raw.setdefault("pipeline", {})["schedule"] = "interleaved"
    extras = _take_planned(raw)
    return Planned(name, config_from(raw), extras, run)


def _raw(target: str, as_run: bool) -> tuple[dict[str, Any], Mapping[str, Any], str]:
    path = Path(target)
    if target in PRESETS:
        run = RUNS.get(target, {})
        raw: dict[str, Any] = {"model": {"preset": target}, "data": {"prefixes": ["tokens"]}}
        raw["train"] = {"precision": "bf16"}
        for section in ("layout", "pipeline", "train", "zero", "recompute") if as_run else ("train",):
            raw[section] = {**raw.get(section, {}), **run.get(section, {})}
        return {key: value for key, value in raw.items() if value}, run, target
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise UserError(f"there is no config file '{target}': give the path of a YAML file")
        read = parse_yaml(path.read_text(encoding="utf-8"), target)
        if not isinstance(read, dict):
            raise UserError(f"{target} must hold sections such as 'model:' and 'train:', not a {type(read).__name__}")
        read.setdefault("data", {"prefixes": ["tokens"]})
        return read, {}, path.stem
    raise UserError(
        f"there is no config file and no preset '{target}'{nearest(target, PRESETS)}: "
        f"the presets are {', '.join(sorted(PRESETS))}"
    )


def _layout_words(text: str) -> list[str]:
    """`tp=8,pp=16` as config words."""
    words = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = part.partition("=")
        if key == "dp":
            raise UserError("--layout names dp, which follows from the number of devices: leave it out")
        if not equals or key not in SHORT:
            raise UserError(
                f"--layout has '{part}'{nearest(key, SHORT)}: write e.g. tp=8,pp=16,chunks=2,micro_batch=1,"
                "zero=1,recompute=full,sp=true"
            )
        words.append(f"{SHORT[key]}={value}")
    return words


def _take_planned(raw: dict[str, Any]) -> dict[str, str]:
    """Takes those of the planner's keys out of `raw` that the config's sections don't have, checked."""
    hints = typing.get_type_hints(Config)
    taken: dict[str, str] = {}
    for key, allowed in PLANNED.items():
        *path, last = key.split(".")
        cls = hints.get(path[0])
        known = cls is not None and {f.name for f in dataclasses.fields(cls)}
        if known and (path[1:] or [last])[0] in known:
            continue
        section: Any = raw
        for name in path:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or last not in section:
            continue
        value = str(section.pop(last)).lower()
        if allowed and value not in allowed:
            raise UserError(f"{key}={value} is not one of {', '.join(allowed)}{nearest(value, allowed)}")
        if key == "recompute.mode":
            check_recompute(value)
        taken[key] = value
    for name in ("zero", "recompute"):
        if name not in hints and not any(_leaves(raw.get(name, {}))):
            raw.pop(name, None)
    return taken


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [] if value is None else [value]


def check_recompute(value: str) -> None:
    kind, _, number = value.partition(":")
    if value not in ("none", "selective", "full") and not (kind == "every" and number.isdigit() and int(number) > 0):
        raise UserError(f"recompute.mode={value} is not one of none, selective, full, every:N (N a number from 1)")


def ledger_of(job: Planned, world: int) -> dict[str, Traffic] | None:
    """What the ledgers of all ranks will count in one step, exactly, by axis; None if this version can't train it."""
    if job.extras:
        return None
    try:
        return predict_step(job.config, world)
    except UserError:
        return None


def cluster_for(job: Planned, name: str | None) -> Cluster:
    """The named cluster, or that of the preset's run."""
    found = name or job.run.get("cluster", "")
    if not found:
        raise UserError("give --cluster with the name of a cluster or the path of its file")
    cluster = load_cluster(found)
    rate = job.run.get("network_gb_s")
    if rate and not name:
        cluster = replace(cluster, network=replace(cluster.network, node_gb_s=float(rate)))
    return cluster


def devices_for(job: Planned, given: int | None) -> int:
    count = given or int(job.run.get("devices", 0))
    if count < 1:
        raise UserError("give --devices with the number of devices, at least 1")
    return count


def stack_named(name: str | None) -> Stack:
    if not name:
        return STACKS[OWN]
    if name not in STACKS:
        raise UserError(f"there is no stack '{name}'{nearest(name, STACKS)}: the stacks are {', '.join(STACKS)}")
    return STACKS[name]
