"""What a folder of a model holds. No torch."""

from __future__ import annotations

from pathlib import Path

SINGLE_FILE = "model.safetensors"
SHARDED_INDEX = "model.safetensors.index.json"


def has_weights(folder: Path) -> bool:
    """Whether there are weights beside the config.json."""
    return any((folder / name).is_file() for name in (SINGLE_FILE, SHARDED_INDEX)) or any(folder.glob("*.bin"))
