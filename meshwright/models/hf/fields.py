"""Fields of a config.json that anybody may have edited: read, or refused with a sentence. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from meshwright.errors import UserError


def read_mapping(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the keys and values under `key`; none where it is missing or null."""
    value = fields.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{key}={value!r} in config.json must hold keys and values: correct it, or get the file again")
    return value


def read_number(fields: Mapping[str, Any], key: str) -> float | None:
    """Returns the number under `key`; None where it is missing or null."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise UserError(f"{key}={value!r} in config.json must be a finite number: correct it, or get the file again")
    return float(value)


def read_length(fields: Mapping[str, Any], key: str) -> int | None:
    """Returns the number of tokens under `key`; None where it is missing or null."""
    value = read_number(fields, key)
    if value is not None and (value < 1 or value != int(value)):
        raise UserError(
            f"{key}={fields[key]!r} in config.json must be a whole number above zero, or null for none: correct it, or "
            "get the file again"
        )
    return None if value is None else int(value)
