"""All tokens go to one expert. The ranks that hold the others get no rows, but take part in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.engine.step import Trainer
from tests.parity.cases import Case
from tests.parity.expert_cases import EXPERTS
from tests.parity.launches import data_of
from tests.support.oracle import EXACT, WholeTensors, gather_global, make_trainer, small_config, true_gradients, worst
from tests.support.ranks import run_ranks

FAVOURED = 5
LAYOUTS = [
    "dp2-tp1-pp1-1f1b-llama-tied-deepseek-ep2",
    "dp1-tp2-pp1-sp-1f1b-llama-tied-deepseek-ep2-etp1",
    "dp2-tp2-pp1-1f1b-llama-tied-deepseek-ep4-etp1-masked-rank",
    "dp2-tp2-pp1-sp-1f1b-llama-tied-deepseek-ep2-etp1-full",
]


def _favouring(trainer: Trainer) -> Trainer:
    """Make every router choose one expert for all tokens."""
    for part in trainer.balance.held.values():
        bias = part.router.bias
        assert bias is not None
        trainer.data_parallel.add_to_frozen(bias, 100.0 * torch.eye(len(bias), dtype=bias.dtype)[FAVOURED])
    return trainer


def _sections(case: Case, alone: bool = False) -> dict[str, Any]:
    sections = case.alone("fp64") if alone else case.sections("fp64")
    sections["model"]["experts"] |= {"top_k": 1, "groups": 1, "groups_used": 1}
    return sections


def measure(rank: int, world: int, case: Case, whole: WholeTensors) -> tuple[tuple[float, str], float, list[int]]:
    trainer = _favouring(make_trainer(small_config(**_sections(case)), rank, world, data_of(case)))
    error = worst(true_gradients(trainer), whole)
    result = trainer.step()
    return error, result.grad_norm, result.experts["rows"][0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    case = next(case for case in EXPERTS if case.name == name)
    alone = _favouring(make_trainer(small_config(**_sections(case, alone=True)), data=data_of(case)))
    whole = gather_global(true_gradients(alone))
    step = alone.step()
    gate_up = whole["layers.1.experts.gate_up.weight"]
    assert [bool(expert.any()) for expert in gate_up] == [n == FAVOURED for n in range(8)]
    for (error, worst_name), norm, rows in run_ranks(case.world, measure, case, whole):
        assert error <= EXACT, worst_name
        assert norm == pytest.approx(step.grad_norm, rel=EXACT)
        assert [n == FAVOURED for n in range(8)] == [count > 0 for count in rows]
        assert rows == step.experts["rows"][0]
