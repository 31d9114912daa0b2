"""The files in the folder of a Hugging Face model. No torch."""

from __future__ import annotations

from pathlib import Path

SINGLE_FILE = "model.safetensors"
SHARDED_INDEX = "model.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds weights, and not only a config.json."""
    return any((folder / name).is_file() for name in (SINGLE_FILE, SHARDED_INDEX)) or any(folder.glob("*.bin"))
