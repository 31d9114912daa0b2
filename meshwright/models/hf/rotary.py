"""Numbers in a config.json, which anybody may have edited, and rotary positions, as transformers 4 and 5 write them. No
torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_KINDS = {"default": (), "linear": LLAMA3[:1], "llama3": LLAMA3}
PART = "partial_rotary_factor"  # of each head, which turns


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


def read_rotary(config: Mapping[str, Any], theta: str, fraction: str | None) -> dict[str, Any]:
    """Returns the rotary keys of our model section. Outside of the rotary settings, config.json has the base under
    `theta` and the part of each head that turns under `fraction`; None: whole heads turn in this family."""
    given = _settings(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise UserError(
            f"rotary scaling of rope_type '{kind}' in config.json can't be imported: use a model with linear or llama3 "
            "scaling, or with none"
        )
    scaling = {key: read_number(given, key) for key in ROPE_KINDS[kind]}
    missing = [key for key, value in scaling.items() if value is None]
    if missing:
        raise UserError(f"rotary scaling of rope_type '{kind}' in config.json lacks {missing[0]}: add it to the file")
    base, part = read_number(given, "rope_theta"), read_number(given, PART)
    base = read_number(config, theta) if base is None else base
    part = read_number(config, fraction or PART) if part is None else part
    if fraction is None and part not in (None, 1.0):
        raise UserError(
            f"{PART}={part} in config.json can't be imported: only in a gpt_neox may a part of each head turn"
        )
    turned = {} if fraction is None else {"rotary_fraction": part}
    return {"rope_theta": base, "rope_scaling": list(scaling.values()), **turned}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings. Where both keys are given the older one counts, as in transformers."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise UserError(
                f"{key}={value!r} in config.json must hold keys and values: correct it, or get the file again"
            )
        found = value or found
    return found


def write_rotary(model: ModelConfig) -> dict[str, Any]:
    """Returns the rotary settings under the keys of transformers 4, which transformers 5 reads too."""
    scaling: dict[str, Any] | None = None
    if model.rope_scaling:
        names = LLAMA3[: len(model.rope_scaling)]
        scaling = {"rope_type": "linear" if len(names) == 1 else "llama3"}
        scaling |= dict(zip(names, model.rope_scaling, strict=True))
        if len(names) == 4:
            scaling[LLAMA3[3]] = int(scaling[LLAMA3[3]])
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}
