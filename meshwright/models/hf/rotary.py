"""Rotary positions in config.json, as transformers 4 writes them and as transformers 5 does. No torch."""

from __future__ import annotations

from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.models.hf.fields import read_mapping, read_number

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_KINDS = {"default": (), "linear": LLAMA3[:1], "llama3": LLAMA3}


def read_whole_rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Returns model.rope_theta and model.rope_scaling of a family that rotates whole heads."""
    part = read_rotary_number(config, "partial_rotary_factor")
    if part not in (None, 1.0):
        raise UserError(
            f"partial_rotary_factor={part} in config.json can't be imported: only in a gpt_neox may a part of "
            "each head turn"
        )
    return read_rotary(config)


def read_rotary_number(config: dict[str, Any], key: str, outside: str = "") -> float | None:
    """Returns a number from the rotary settings, or from config.json itself under `outside` (by default the same
    key)."""
    found = read_number(_parameters(config), key)
    return read_number(config, outside or key) if found is None else found


def read_rotary(config: dict[str, Any], theta: str = "rope_theta") -> dict[str, Any]:
    """Returns model.rope_theta, which config.json may have under `theta`, and model.rope_scaling."""
    given = _parameters(config)
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
    base = read_rotary_number(config, "rope_theta", theta)
    return {"rope_theta": 10000.0 if base is None else base, "rope_scaling": list(scaling.values())}


def _parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings. Where both keys are given the older one counts, as in transformers."""
    older, newer = (read_mapping(config, key) for key in ("rope_scaling", "rope_parameters"))
    return older or newer


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
