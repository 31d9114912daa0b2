"""Model shapes by name, as presets.yaml has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
PRESETS: dict[str, dict[str, Any]] = _TABLES["presets"]
KIND_DEFAULTS: dict[str, dict[str, Any]] = _TABLES["kind_defaults"]  # by `model.kind`
APPROXIMATE_PRESETS: dict[str, str] = _TABLES["approximate"]  # what differs from the model of that name
