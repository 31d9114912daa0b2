"""Every Hugging Face family that 1D trains has the gradients of one process on a grid too, or is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.rules import first_broken_rule
from meshwright.spec.model.hf import FAMILIES, family_of_name
from meshwright.spec.model.hf.family import model_section
from tests.models.test_hf_families import SECTIONS
from tests.parity.cases import Case
from tests.parity.launches import Launches, quick_or_wide
from tests.parity.test_grids import grid_case
from tests.support.oracle import complaints, small_config

REFUSED = {
    "bert": "model.kind=bert", "t5": "model.kind=t5", "mixtral": "model.experts.count=",
    "qwen3_moe": "model.experts.count=", "olmoe": "model.experts.count=", "deepseek_v3": "model.latent.kv_rank=",
}  # fmt: skip
WINDOWS = {"qwen2-window": {"window": 7, "window_pattern": [0, 1]}, "mistral-window": {"window": 11}}


def family_case(name: str) -> Case:
    """Return a case of a family's model on 2 x 2 ranks, with short sequences."""
    shape = SECTIONS[name.removesuffix("-window")] | WINDOWS.get(name, {}) | {"seq": 16}
    return grid_case("2d", (2, 2), name, **{f"model__{key}": value for key, value in shape.items()})


CASES = [family_case(name) for name in [*(name for name in FAMILIES if name not in REFUSED), *WINDOWS]]


@pytest.mark.parametrize("case", quick_or_wide(CASES, set()))
def test_a_family_agrees_with_one_process(case: Case, launches: Launches) -> None:
    assert complaints(launches.outcomes(case)) == []


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_the_cases_are_models_of_their_families(name: str) -> None:
    model = replace(small_config(**family_case(name).sections("fp64")).model, seq=SECTIONS[name]["seq"])
    family = family_of_name(name)
    assert family.config_of(model) == family.config_of(model_section(SECTIONS[name]))


@pytest.mark.parametrize("name", list(REFUSED))
def test_other_families_are_refused_by_name(name: str) -> None:
    layout = {"tp": 4, "tp_grid": [2, 2]}
    config = small_config(model=SECTIONS[name], layout=layout, train={"micro_batch": 2, "precision": "fp32"})
    rule = first_broken_rule(config, 4)
    assert rule is not None and rule.startswith(f"layout.tp_grid=[2, 2] can't be combined with {REFUSED[name]}"), rule
    assert "layout.tp_grid=[]" in rule


def test_a_module_of_transformers_is_refused_by_name() -> None:
    """The refusal comes before anything is read from its folder."""
    config = small_config(layout={"tp": 4, "tp_grid": [2, 2]}, train={"micro_batch": 2, "precision": "fp32"})
    config = replace(config, model=replace(config.model, kind="hf", hf="a-folder"))
    rule = first_broken_rule(config, 4)
    assert rule is not None and "layout.tp_grid" in rule and "model.kind=hf" in rule and "set layout.tp_grid=[]" in rule
