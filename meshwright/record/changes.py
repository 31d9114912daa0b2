"""What changed where a run went on: its layout, as its events say (figures of a step mean something only among steps of
one layout), and its learning rate. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.config.load import flat, to_mapping
from meshwright.config.sections import Config
from meshwright.config.step_schedules import learning_rate
from meshwright.config.yaml_text import parse_yaml
from meshwright.errors import UserError

# What decides how a step is divided, and so what ranks send and how fast they are.
SECTIONS = ("layout", "zero", "pipeline", "context", "comm", "recompute")
KEYS = ("train.global_batch", "train.micro_batch", "train.precision", "train.grad_dtype", "train.compile")

JUMP = 0.05  # the share by which a learning rate must change for a word about it


def changed_keys(file: Path, config: Config) -> list[str]:
    """Returns the keys that a run's config file, as it was left, has otherwise; none where it can't be read."""
    try:
        before = parse_yaml(file.read_text(encoding="utf-8", errors="replace"), str(file))
    except (OSError, UserError):
        return []
    theirs, ours = flat(before) if isinstance(before, Mapping) else {}, flat(to_mapping(config))
    return sorted(key for key in ours if key in theirs and theirs[key] != ours[key])


def learning_rate_words(config: Config, step: int, before: float, changed: Iterable[str]) -> str:
    """Says where the learning rate jumps after `step`, where it was `before`, as keys were changed; else nothing."""
    keys = [key for key in changed if key in ("train.steps", "optimizer.lr") or key.startswith("lr.")]
    now = learning_rate(config, step + 1)
    if not keys or math.isclose(now, before, rel_tol=JUMP):
        return ""
    why = f"the schedule now ends at step {config.train.steps}" if "train.steps" in keys else f"{keys[0]} was changed"
    return f"the learning rate goes on at {now:.1e} (it was {before:.1e}): {why}"


def layout_since(events: Iterable[Mapping[str, Any]]) -> int:
    """Returns the step after which all steps were trained with the newest layout; 0 where it never changed."""
    since, world = 0, None
    for event in events:
        if event.get("kind") not in ("start", "resume"):
            continue
        step, ranks = event.get("step") or 0, event.get("world", world)
        other = any(key in KEYS or key.split(".")[0] in SECTIONS for key in event.get("changed", ()))
        since = step if other or world not in (None, ranks) else min(since, step)  # it may go back beyond the change
        world = ranks
    return since
