"""The model section that a Hugging Face folder asks for: that of a family that is described here, else of kind `hf`,
which transformers builds itself. No torch, unless transformers is asked."""

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
    """Returns the keys of the model section that a folder's config.json says. `given` may name the length of samples,
    and `kind: hf` asks for transformers' own module whatever the family."""
    config, seq = read_folder(folder), given.get("seq", 0)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and given.get("kind", "gpt") != "hf":
        return asdict(family.model_of(config, seq if isinstance(seq, int) else 0))
    return planned_section(folder)


def read_folder(folder: str) -> dict[str, Any]:
    path = Path(folder) / "config.json"
    try:
        return dict(of_kind(read_json(path), dict[str, Any], "it"))
    except FileNotFoundError:
        hint = hub_hint(folder)
        raise UserError(f"model.hf={folder} has no config.json{hint}: name a folder that transformers wrote") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): get it again") from None


def is_described(folder: str) -> bool:
    """Whether a folder's model is of a family that our own parts compute. Where the folder does not say, or says what
    transformers does not know either, it is taken for one, and what is wrong with it will be told."""
    kind = read_folder(folder).get("model_type")
    if not isinstance(kind, str) or kind in FAMILIES:
        return True
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return True
    return kind not in CONFIG_MAPPING


def planned_section(folder: str) -> dict[str, Any]:
    """The sizes of a model that transformers builds. Where blocks differ in their heads, the numbers are the largest
    that divide those of all."""
    from meshwright.models.wrapped.blueprint import blueprint, of_blocks, read_config

    text = read_config(folder).get_text_config()
    model = blueprint(folder).model
    sizes = {"hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
    found: dict[str, Any] = {ours: _common(of_blocks(text, theirs)) for ours, theirs in sizes.items()}
    lacking = [sizes[key] for key, value in found.items() if not isinstance(value, int) or value < 1]
    if lacking:
        raise UserError(f"{folder}/config.json lacks {lacking[0]}, without which it can't be trained here: add it")
    kv = _common(of_blocks(text, "num_key_value_heads"))
    found["kv_heads"] = kv if isinstance(kv, int) and kv > 0 and found["heads"] % kv == 0 else found["heads"]
    width = max(each or 0 for each in of_blocks(text, "head_dim")) or found["hidden"] // found["heads"]
    # What positions are is the module's own matter: here it only matters that a batch may say them.
    found |= {"kind": "hf", "layers": len(model.blocks), "tied_embeddings": model.tied}
    found |= {"position": "rope", "head_dim": max(2, width // 2 * 2)}
    longest = getattr(text, "max_position_embeddings", None)
    return found | ({"seq": longest} if isinstance(longest, int) and longest > 0 else {})


def _common(values: list[Any]) -> Any:
    """Returns the one value of all blocks or, of several numbers, the largest that divides them all."""
    numbers = [value for value in values if isinstance(value, int)]
    return math.gcd(*numbers) if len(numbers) == len(values) > 1 else values[0]
