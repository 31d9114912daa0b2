"""Helpers of commands that only read a model: find it, and give it a plain layout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config.load import set_key
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.spec.schedule.kinds import default_kind

# The settings for a model that is only read: one process, or all ranks data-parallel.
PLAIN: dict[str, dict[str, Any]] = {
    "layout": {
        "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 0, "chunks": 1, "sequence_parallel": False, "replicas": 1,
        "tp_grid": [], "tp_kind": "", "tp_keep_gathered": False,
    },
    "context": {"kind": "auto", "inner": 0},
    "pipeline": {"schedule": default_kind(1), "split": [], "encoder_stages": 0},
    "train": {"micro_batch": 1, "ramp": [], "compile": "false"},
    "run": {"eval_samples": 0, "device": "auto", "noise_scale": False},
    "comm": {"backend": "auto"},
}  # fmt: skip


def add_ema(parser: argparse.ArgumentParser) -> None:
    """Add the option to read averaged weights."""
    average = "use the moving average of the weights, of a run with optimizer.ema"
    parser.add_argument("--ema", action="store_true", help=average)


def resolve(source: str) -> str:
    """Return the folder to read: `source` itself if it is a Hugging Face folder, else the checkpoint that it names."""
    return source if (Path(source) / "config.json").is_file() else str(find_checkpoint(source))


def sections_of(words: Sequence[str], nproc: int, prefixes: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the config sections of `words` (key=value), with PLAIN as defaults. `prefixes`: the data to read."""
    raw: dict[str, Any] = {}
    for word in words:
        set_key(raw, word)
    raw |= {name: keys | raw.get(name, {}) for name, keys in PLAIN.items()}
    sizes = [raw["train"]["micro_batch"], *(raw["layout"].get(axis, 1) for axis in ("tp", "pp", "cp"))]
    # If a size is wrong, building the config will report it.
    if all(isinstance(size, int) and size > 0 for size in sizes):
        micro_batch, tp, pp, cp = sizes
        # Reading does not use the global batch, but the rules check it.
        raw["train"]["global_batch"] = max(1, nproc // (tp * pp * cp)) * micro_batch
    if prefixes:
        raw["data"] = raw.get("data", {}) | {"prefixes": list(prefixes), "weights": [], "split": [1.0, 0.0, 0.0]}
    return raw
