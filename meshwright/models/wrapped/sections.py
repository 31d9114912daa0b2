"""Derives the model section of a config from a Hugging Face folder.

A family that Meshwright describes gets its own section. Any other model gets one of kind `hf`, which transformers
builds. torch is imported only if transformers is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.disk import hub_hint
from meshwright.errors import UserError
from meshwright.outside import of_kind, read_json
from meshwright.spec.model.hf import FAMILIES


def section_of(folder: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model section that follow from a folder's config.json.

    `given` may contain `seq`, the length of samples, and `kind: hf`, which asks for transformers' own module whatever
    the family.
    """
    config = read_folder(folder)
    seq = given.get("seq", 0)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and given.get("kind", "gpt") != "hf":
        return asdict(family.model_of(config, seq if isinstance(seq, int) else 0))
    return planned_section(folder)


def read_folder(folder: str) -> dict[str, Any]:
    """Return the contents of a folder's config.json."""
    path = Path(folder) / "config.json"
    try:
        return dict(of_kind(read_json(path), dict[str, Any], "it"))
    except FileNotFoundError:
        hint = hub_hint(folder)
        raise UserError(f"model.hf={folder} has no config.json{hint}: name a folder that transformers wrote") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): get it again") from None


def is_described(folder: str) -> bool:
    """Return True if a folder's model is of a family that Meshwright's own parts compute.

    Also return True if the folder names no family, or one that transformers does not know either. The code that then
    reads the folder reports the error.
    """
    kind = read_folder(folder).get("model_type")
    if not isinstance(kind, str) or kind in FAMILIES:
        return True
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return True
    return kind not in CONFIG_MAPPING


def planned_section(folder: str) -> dict[str, Any]:
    """Return the model section of a model that transformers builds.

    If blocks differ in a size, such as their number of heads, the section has the greatest common divisor.
    """
    from meshwright.models.wrapped.blueprint import blueprint, of_blocks, read_config

    text = read_config(folder).get_text_config()
    model = blueprint(folder).model
    sizes = {"hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
    section: dict[str, Any] = {ours: _common(of_blocks(text, theirs)) for ours, theirs in sizes.items()}
    lacking = [sizes[key] for key, value in section.items() if not isinstance(value, int) or value < 1]
    if lacking:
        raise UserError(f"{folder}/config.json lacks {lacking[0]}, without which it can't be trained here: add it")
    kv = _common(of_blocks(text, "num_key_value_heads"))
    section["kv_heads"] = kv if isinstance(kv, int) and kv > 0 and section["heads"] % kv == 0 else section["heads"]
    width = max(size or 0 for size in of_blocks(text, "head_dim")) or section["hidden"] // section["heads"]
    section |= {"kind": "hf", "layers": len(model.blocks), "tied_embeddings": model.tied}
    # The module itself decides how it uses positions. "rope" only says that a batch may contain them, and it needs an
    # even head_dim.
    section |= {"position": "rope", "head_dim": max(2, width // 2 * 2)}
    longest = getattr(text, "max_position_embeddings", None)
    return section | ({"seq": longest} if isinstance(longest, int) and longest > 0 else {})


def _common(values: list[Any]) -> Any:
    """Return the value of all blocks or, if they have different numbers, the greatest common divisor."""
    numbers = [value for value in values if isinstance(value, int)]
    return math.gcd(*numbers) if len(numbers) == len(values) > 1 else values[0]
