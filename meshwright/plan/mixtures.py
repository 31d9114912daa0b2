"""The shapes of published mixtures of experts, by the names in tables of runs.

These tables have no columns for experts. The module does not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.config.load import config_from
from meshwright.config.sections import ModelConfig

# Keys of `model` for the first pattern that matches the beginning of a model's name.
MIXTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"Mixtral-8x7B", {"preset": "mixtral-8x7b"}),
    (r"Mixtral-8x22B", {
        "preset": "mixtral-8x7b", "layers": 56, "hidden": 6144, "heads": 48, "ffn": 16384, "vocab": 32768,
        "experts": {"count": 8, "top_k": 2, "ffn": 16384},
    }),
    (r"Qwen3-(MoE-)?30B-A3B", {"preset": "qwen3-30b-a3b"}),
    (r"Qwen3-235B-A22B", {
        "preset": "qwen3-30b-a3b", "layers": 94, "hidden": 4096, "heads": 64, "ffn": 12288,
        "experts": {"count": 128, "top_k": 8, "ffn": 1536},
    }),
    (r"DeepSeek-V3", {"preset": "deepseek-v3"}),
    (r"Grok-1", {
        "preset": "mixtral-8x7b", "layers": 64, "hidden": 6144, "heads": 48, "ffn": 32768, "vocab": 131072,
        "experts": {"count": 8, "top_k": 2, "ffn": 32768},
    }),
)  # fmt: skip


def is_mixture(row: Mapping[str, str]) -> bool:
    """Return whether a line says in any way that its model has experts."""
    named = re.search(r"\bMoE\b", row.get("note", "")) or row.get("active_params_b")
    return bool(named) or row.get("ep", "") not in ("", "1")


def mixture_of(row: Mapping[str, str]) -> ModelConfig | None:
    """Return the mixture that a line names, with the line's number of layers and length of sequences.

    The result is None if the shape of that mixture is not known here.
    """
    keys = next((keys for pattern, keys in MIXTURES if re.match(pattern, row.get("model", ""))), None)
    if keys is None:
        return None
    sizes = {"layers": int(float(row["layers"])), "seq": int(float(row["seq_len"]))}
    return config_from({"model": keys | sizes, "data": {"prefixes": ["tokens"]}}).model
