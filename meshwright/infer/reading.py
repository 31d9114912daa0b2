"""What commands that only read a model have in common: where it is, and the plain layout that it runs with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config.load import set_key
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.spec.schedule.kinds import default_kind

# What a model that is only read is run with: one process, or all ranks data-parallel.
PLAIN: dict[str, dict[str, Any]] = {
    "layout": {
        "tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 0, "chunks": 1, "sequence_parallel": False, "replicas": 1,
        "tp_grid": [], "tp_kind": "", "tp_keep_gathered": False,
    },
    "context": {"kind": "auto", "inner": 0},
    "pipeline": {"schedule": default_kind(1), "split": [], "encoder_stages": 0},
    "train": {"micro_batch": 1, "ramp": [], "compile": "false"},
    "run": {"eval_samples": 0, "device": "auto"},
    "comm": {"backend": "auto"},
}  # fmt: skip


def resolve(source: str) -> str:
    """Returns the folder to read: a checkpoint, or a Hugging Face folder unchanged."""
    return source if (Path(source) / "config.json").is_file() else str(find_checkpoint(source))


def sections_of(words: Sequence[str], nproc: int, prefixes: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Returns the given keys on top of the plain ones."""
    raw: dict[str, Any] = {}
    for word in words:
        set_key(raw, word)
    raw |= {name: keys | raw.get(name, {}) for name, keys in PLAIN.items()}
    sizes = [raw["train"]["micro_batch"], *(raw["layout"].get(axis, 1) for axis in ("tp", "pp", "cp"))]
    if all(isinstance(size, int) and size > 0 for size in sizes):  # otherwise building the config reports the mistake
        micro_batch, tp, pp, cp = sizes
        raw["train"]["global_batch"] = max(1, nproc // (tp * pp * cp)) * micro_batch  # unused, but checked
    if prefixes:
        raw["data"] = raw.get("data", {}) | {"prefixes": list(prefixes), "weights": [], "split": [1.0, 0.0, 0.0]}
    return raw
