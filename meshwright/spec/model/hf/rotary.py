"""Numbers and rotary positions in a config.json, as transformers 4 and 5 write them. No torch.

Users edit these files, so every value is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from meshwright.config.blocks import ROPE_KEYS, RopeScalingConfig
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError

# The names in config.json of our keys of rotary scaling, where they differ, and the keys that config.json must have.
ORIGINAL = "original_max_position_embeddings"
HF_KEYS = {"low": "low_freq_factor", "high": "high_freq_factor", "original": ORIGINAL}
REQUIRED = ("factor", "low", "high", "original")
LONGEST = "max_position_embeddings"
UNSCALED = RopeScalingConfig()
PART = "partial_rotary_factor"  # the fraction of each head that is rotated


def read_number(fields: Mapping[str, Any], key: str) -> float | None:
    """Return the number under `key`; None if it is missing or null."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise UserError(f"{key}={value!r} in config.json must be a finite number: correct it, or get the file again")
    return float(value)


def read_length(fields: Mapping[str, Any], key: str) -> int | None:
    """Return the number of tokens under `key`; None if it is missing or null."""
    value = read_number(fields, key)
    if value is not None and (value < 1 or value != int(value)):
        raise UserError(
            f"{key}={fields[key]!r} in config.json must be a whole number above zero, or null for none: correct it, or "
            "get the file again"
        )
    return None if value is None else int(value)


def read_rotary(config: Mapping[str, Any], theta: str, fraction: str | None) -> dict[str, Any]:
    """Return the rotary keys of our model section.

    `theta` and `fraction` are the keys of the base and of the rotated fraction of each head outside of the rotary
    settings of config.json. If `fraction` is None, this family rotates whole heads.
    """
    given = _settings(config)
    base = read_number(given, "rope_theta")
    part = read_number(given, PART)
    base = read_number(config, theta) if base is None else base
    part = read_number(config, fraction or PART) if part is None else part
    if fraction is None and part not in (None, 1.0):
        raise UserError(
            f"{PART}={part} in config.json can't be imported: only in a gpt_neox may a part of each head turn"
        )
    fraction_keys = {} if fraction is None else {"rotary_fraction": part}
    scaling = {f"rope_scaling.{key}": value for key, value in _read_scaling(config, given).items()}
    return {"rope_theta": base, **scaling, **fraction_keys}


def _read_scaling(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our section of rotary scaling from the rotary settings of config.json.

    The original training length is in these settings, except that a dynamic scaling uses max_position_embeddings.
    """
    kind = given.get("rope_type") or given.get("type") or "default"
    ours = "none" if kind == "default" else kind
    if not isinstance(ours, str) or ours not in ROPE_KEYS:
        known = ", ".join(key for key in ROPE_KEYS if key != "none")
        raise UserError(
            f"rotary scaling of rope_type '{kind}' in config.json can't be imported: use a model with one of {known}, "
            "or with none"
        )
    values: dict[str, Any] = {}
    for key in ROPE_KEYS[ours]:
        name = HF_KEYS.get(key, key)
        if key == "original":
            values[key] = read_length(*((config, LONGEST) if ours == "dynamic" else (given, name)))
        elif key == "truncate":
            values[key] = given.get(name)
            if not isinstance(values[key], bool | None):
                raise UserError(f"{name}={values[key]!r} in config.json must be true or false: correct it")
        else:
            values[key] = read_number(given, name)
        if values[key] is None and key in REQUIRED:
            raise UserError(f"rotary scaling of rope_type '{kind}' in config.json lacks {name}: add it to the file")
    return {"kind": ours} | {key: value for key, value in values.items() if value is not None}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings. If both keys are given, the older one takes precedence, as in transformers."""
    settings: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise UserError(
                f"{key}={value!r} in config.json must hold keys and values: correct it, or get the file again"
            )
        settings = value or settings
    return settings


def write_rotary(model: ModelConfig) -> dict[str, Any]:
    """Return the rotary settings under the keys of transformers 4, which transformers 5 reads too.

    For a dynamic scaling, transformers computes the base for each length from the original training length, which it
    takes from max_position_embeddings.
    """
    ours = model.rope_scaling
    if not ROPE_KEYS[ours.kind]:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    changed = {key: getattr(ours, key) for key in ROPE_KEYS[ours.kind]}
    changed = {key: value for key, value in changed.items() if key in REQUIRED or value != getattr(UNSCALED, key)}
    longest = {LONGEST: changed.pop("original")} if ours.raises_theta else {}
    scaling = {"rope_type": ours.kind, **{HF_KEYS.get(key, key): value for key, value in changed.items()}}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, **longest}
