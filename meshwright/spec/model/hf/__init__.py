"""Conversion to and from Hugging Face: the families of models, and the choice of one that can express a model. No
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.config.yaml_text import read_yaml
from meshwright.errors import UserError, nearest
from meshwright.spec.model.hf.family import Family, family_from

_TABLES = read_yaml(Path(__file__).with_name("families.yaml"))
FAMILIES = {model_type: family_from(model_type, entry) for model_type, entry in _TABLES["families"].items()}

MIXTURES = {name for name, family in FAMILIES.items() if "experts.count" in family.needs}


def family_of_name(name: Any) -> Family:
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(
            f"'{name}' is not a family that is described here{nearest(str(name), FAMILIES)}: train the folder as "
            f"transformers builds it, with model.hf=FOLDER in a config, or use {known}"
        )
    return FAMILIES[name]


def family_for(model: ModelConfig, preferred: str = "") -> Family:
    """Return the family for exporting a model: the preferred one, which must fit, or the first one that fits."""
    if preferred:
        family = family_of_name(preferred)
        misfits = family.misfits(model)
        if misfits:
            raise UserError(f"a {preferred} can't have {_words(misfits)}: choose another family, or none")
        return family
    misfits_of = {name: family.misfits(model) for name, family in FAMILIES.items()}
    for name, misfits in misfits_of.items():
        if not misfits:
            return FAMILIES[name]
    mixed = model.experts.count > 0
    near = min(misfits_of, key=lambda name: ((name in MIXTURES) != mixed, len(misfits_of[name])))
    raise UserError(
        f"no Hugging Face family can express this model: the nearest, {near}, has no {_words(misfits_of[near])}"
    )


def _words(misfits: list[str]) -> str:
    return " or ".join(f"model.{each}" for each in misfits)
