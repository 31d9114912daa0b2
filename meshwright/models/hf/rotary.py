"""Rotary positions in config.json, as transformers 4 writes them and as transformers 5 does. No torch."""

from __future__ import annotations

from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError

LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rotary_part(config: dict[str, Any], default: float) -> float:
    """The part of each head that turns."""
    given = config.get("rope_parameters") or {}
    for key in ("partial_rotary_factor", "rotary_pct"):
        for where in (given, config):
            if where.get(key) is not None:
                return float(where[key])
    return default


def read_whole_rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Of a family whose heads turn whole."""
    part = rotary_part(config, 1.0)
    if part != 1.0:
        raise UserError(
            f"partial_rotary_factor={part} in config.json can't be imported: only in a gpt_neox may a part of "
            "each head turn"
        )
    return read_rotary(config)


def read_rotary(config: dict[str, Any]) -> dict[str, Any]:
    """model.rope_theta and model.rope_scaling."""
    given = config.get("rope_parameters") or {}
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    wanted = {"default": (), "linear": LLAMA3[:1], "llama3": LLAMA3}.get(kind)
    if wanted is None:
        raise UserError(
            f"rotary scaling of type '{kind}' in config.json can't be imported: use a model with linear or llama3 "
            "scaling, or with none"
        )
    missing = [key for key in wanted if key not in scaling]
    if missing:
        raise UserError(f"rotary scaling of type '{kind}' in config.json lacks {missing[0]}: add it to the file")
    return {"rope_theta": theta, "rope_scaling": [float(scaling[key]) for key in wanted]}


def write_rotary(model: ModelConfig) -> dict[str, Any]:
    """Under the keys of transformers 4, which 5 reads too."""
    scaling: dict[str, Any] | None = None
    if model.rope_scaling:
        names = LLAMA3[: len(model.rope_scaling)]
        scaling = {"rope_type": "linear" if len(names) == 1 else "llama3"}
        scaling |= dict(zip(names, model.rope_scaling, strict=True))
        if len(names) == 4:
            scaling[LLAMA3[3]] = int(scaling[LLAMA3[3]])
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}
