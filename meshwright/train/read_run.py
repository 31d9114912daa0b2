"""A run's folder, read: its config, its layout and one record per step and validation. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.load import config_from, parse_yaml
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.models.description import layout_of

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class RunRecord:
    """A run's folder as it was read. `layout` is None where nothing tells how many ranks there were."""

    path: Path
    config: Config
    steps: Lines
    validations: Lines
    layout: Layout | None

    @property
    def world(self) -> int | None:
        return self.layout.world if self.layout else None


def read_run(run_dir: str | Path, world: int | None = None) -> RunRecord:
    """Reads a run's folder. `world` is needed only for a folder without a run.json."""
    path = Path(run_dir)
    file = path / "config.yaml"
    if not file.is_file():
        raise UserError(f"{path} holds no run: name the folder that run.dir named")
    raw = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(raw, Mapping):
        raise UserError(f"{file} holds no config: name the folder of a run")
    known = {f.name for f in dataclasses.fields(Config)} - {"extra"}
    config = config_from({name: section for name, section in raw.items() if name in known})
    steps = _json_lines(path / "metrics.jsonl")
    world = world or _world_noted(path / "run.json") or _least_world(config, steps)
    layout = layout_of(config, world) if world else None
    return RunRecord(path, config, steps, _json_lines(path / "validation.jsonl"), layout)


def _world_noted(path: Path) -> int | None:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["world"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _json_lines(path: Path) -> Lines:
    """The records by step. Of a step that was written twice (the run was resumed) the later one counts, and a line that
    was cut off by a kill does not."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "step" in value and "loss" in value:
            value["loss"] = math.nan if value["loss"] is None else value["loss"]  # null: not finite
            found[value["step"]] = value
    return [found[step] for step in sorted(found)]


def _least_world(config: Config, steps: Lines) -> int | None:
    """The world of a run in which no gradient was reduced: then there was one replica."""
    c = config.layout
    data = any("dp" in axis.split("-") for line in steps for axis in line.get("comm", {}))
    return c.tp * c.cp * c.pp if steps and not data else None


def traffic_per_step(steps: Lines) -> dict[str, dict[str, float]]:
    """By axis, the calls and bytes of a mean step, summed over all ranks."""
    axes: dict[str, dict[str, float]] = {}
    for line in steps:
        for axis, counts in line.get("comm", {}).items():
            into = axes.setdefault(axis, {"calls": 0.0, "payload_bytes": 0.0, "wire_bytes": 0.0})
            for key in into:
                into[key] += counts.get(key, 0)
    return {axis: {key: count / len(steps) for key, count in sums.items()} for axis, sums in axes.items()}
