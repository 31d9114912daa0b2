"""Recipes: the configs of known training runs by name, with their published figures. The files are in
`meshwright/recipes`.

A recipe is a config file with one more section, `recipe`, which names the sources and the measured figures. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.config.yaml_text import read_yaml

FOLDER = Path(__file__).parent.parent / "recipes"
# The additional section of a recipe's file. `read_sections` drops it, so that the file is also an ordinary config file.
SECTION = "recipe"


@dataclass(frozen=True)
class Recipe:
    """A known training run. `sections` are the sections of its config; the other fields describe the run."""

    name: str
    sections: Mapping[str, Any]
    title: str
    source: str
    hardware: str  # the hardware of the run, in words
    cluster: str  # name of the cluster file that the planner predicts the run on
    devices: int
    published: Mapping[str, float | str] = field(default_factory=dict)  # measured figures, see `plan/recipes.py`
    why: str = ""  # the reason of a prediction that is far off
    layout: str = "published"  # origin of the layout; `ours` if the source names none
    stack: str = ""  # the software stack of the published figures; empty: Meshwright's own
    network_gb_s: float = 0.0  # network rate of a node, if it differs from the cluster file's
    values: Mapping[str, str] = field(default_factory=dict)  # sections of the config -> the source of their values
    unpublished: tuple[str, ...] = ()  # sentences about facts that the sources don't give
    differs: tuple[str, ...] = ()  # sentences about differences from the original run

    @property
    def run(self) -> dict[str, Any]:
        """The sections of the config, with the cluster, devices, stack and network that the planner predicts on."""
        place: dict[str, Any] = {"cluster": self.cluster, "devices": self.devices}
        place |= {"stack": self.stack} if self.stack else {}
        place |= {"network_gb_s": self.network_gb_s} if self.network_gb_s else {}
        return {**self.sections, **place}


@lru_cache(maxsize=1)
def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@lru_cache(maxsize=64)
def read_recipe(name: str) -> Recipe:
    """Read the recipe of a name from `recipe_names()`. The result is cached: callers must not change its sections."""
    read = read_yaml(FOLDER / f"{name}.yaml")
    about = dict(read.pop(SECTION))
    sentences = {key: tuple(about.get(key, ())) for key in ("differs", "unpublished")}
    return Recipe(name=name, sections=read, **about | sentences)
