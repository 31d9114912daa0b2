"""Model shapes by name, read from presets.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
PRESETS: dict[str, dict[str, Any]] = _TABLES["presets"]
# Default keys of the model section by `model.kind`.
KIND_DEFAULTS: dict[str, dict[str, Any]] = _TABLES["kind_defaults"]
# Presets that only approximate the model of that name, with the difference in words.
APPROXIMATE_PRESETS: dict[str, str] = _TABLES["approximate"]
