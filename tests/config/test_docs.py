"""docs/config.md lists every key of a config with its default, and no other key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_type_hints

from meshwright.config.load import key_of
from meshwright.config.sections import Config
from meshwright.config.yaml_text import parse_yaml

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")


def defaults(cls: type, prefix: str) -> dict[str, Any]:
    """Return the default of each key. It is None for an empty word and for a key without a default."""
    by_key: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            by_key |= defaults(hints[field.name], f"{prefix}{field.name}.")
        elif prefix:
            value = None if field.default is dataclasses.MISSING else field.default
            plain = list(value) if isinstance(value, tuple) else value
            by_key[prefix + key_of(field)] = None if plain == "" else plain
    return by_key


def listed() -> dict[str, Any]:
    """Return the keys that the page lists, with their defaults."""
    by_key: dict[str, Any] = {}
    for keys, default in re.findall(r"^\| (`[a-z0-9_.`, ]+`) \| (.*?) ?\|", PAGE, re.MULTILINE):
        for key in re.findall(r"`([a-z0-9_.]+)`", keys):
            assert key not in by_key, f"{key} is listed twice"
            by_key[key] = parse_yaml(default, key)
    return by_key


def test_every_key_is_listed_with_its_default() -> None:
    assert listed() == defaults(Config, "")
