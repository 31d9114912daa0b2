"""Adapters to and from Hugging Face: the families, and which of them can express a model. No torch."""

from __future__ import annotations

from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError, nearest
from meshwright.models.hf.bloom import BLOOM
from meshwright.models.hf.family import Family
from meshwright.models.hf.gpt2 import GPT2
from meshwright.models.hf.gpt_neox import GPT_NEOX
from meshwright.models.hf.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from meshwright.models.hf.opt import OPT

# Where several families can express a model, the first one is used.
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (GPT2, LLAMA, QWEN2, QWEN3, GPT_NEOX, OPT, BLOOM, MISTRAL)
}


def family_named(name: Any) -> Family:
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"'{name}' is not a family that is known here{nearest(str(name), FAMILIES)}: use {known}")
    return FAMILIES[name]


def family_for(model: ModelConfig, preferred: str = "") -> Family:
    """Returns the family to write a model as: the preferred one (which must fit), or the first that fits."""
    if preferred:
        family = family_named(preferred)
        misfits = family.misfits(model)
        if misfits:
            raise UserError(f"a {preferred} can't have {_words(misfits)}: choose another family, or none")
        return family
    misfits_of = {name: family.misfits(model) for name, family in FAMILIES.items()}
    for name, misfits in misfits_of.items():
        if not misfits:
            return FAMILIES[name]
    near = min(misfits_of, key=lambda name: len(misfits_of[name]))
    raise UserError(
        f"no Hugging Face family can express this model: the nearest, {near}, has no {_words(misfits_of[near])}"
    )


def _words(misfits: list[str]) -> str:
    return " or ".join(f"model.{each}" for each in misfits)
