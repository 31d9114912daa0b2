"""Recipes: the configs of known training runs, by name, with what was published of them. Files in `meshwright/recipes`.

A recipe is a config file with one more section, `recipe`, which says where it is from and what was measured. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.config.yaml_text import read_yaml

FOLDER = Path(__file__).parent.parent / "recipes"
SECTION = "recipe"  # of a config file; a config has no such section, so that a recipe's file is one too


@dataclass(frozen=True)
class Recipe:
    """A known run. `sections` are those of its config; the rest is about it."""

    name: str
    sections: Mapping[str, Any]
    title: str
    source: str
    hardware: str  # that it ran on, in words
    cluster: str  # a cluster file's name: what the run is predicted on
    devices: int
    published: Mapping[str, float | str] = field(default_factory=dict)  # measured figures, see `plan/recipes.py`
    layout: str = "published"  # by whom the layout is; `ours` where the source names none
    stack: str = ""  # the software that the published figures are of; empty: Meshwright's own
    network_gb_s: float = 0.0  # of a node, where it is not the cluster file's
    values: Mapping[str, str] = field(default_factory=dict)  # sections of the config -> where their values are from
    unpublished: tuple[str, ...] = ()  # sentences: what the sources don't say
    differs: tuple[str, ...] = ()  # sentences: what is not as in the original run

    @property
    def run(self) -> dict[str, Any]:
        """What the planner needs beside the config: where the run is predicted."""
        found: dict[str, Any] = {"cluster": self.cluster, "devices": self.devices}
        found |= {"stack": self.stack} if self.stack else {}
        found |= {"network_gb_s": self.network_gb_s} if self.network_gb_s else {}
        return {**self.sections, **found}


@lru_cache(maxsize=1)
def recipe_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@lru_cache(maxsize=64)
def read_recipe(name: str) -> Recipe:
    """Reads one of `recipe_names()`."""
    read = read_yaml(FOLDER / f"{name}.yaml")
    about = dict(read.pop(SECTION))
    sentences = {key: tuple(about.get(key, ())) for key in ("differs", "unpublished")}
    return Recipe(name=name, sections=read, **about | sentences)
