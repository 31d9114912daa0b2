"""ZeRO under compiled blocks: weights are gathered and freed beneath one compiled graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.engine.compiling import compile_blocks
from tests.support.oracle import EXACT, gather_global, make_trainer, small_config, true_gradients, worst
from tests.support.ranks import run_ranks


def worst_gradient(rank: int, world: int, stage: int, mode: str) -> tuple[float, str]:
    """Return the largest gradient error of a compiled model after a step, against one process that compiles nothing."""
    config = small_config(
        model={"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "layers": 2},
        zero={"stage": stage}, recompute={"mode": mode}, run={"device": "cpu"},
    )  # fmt: skip
    alone = make_trainer(replace(config, zero=replace(config.zero, stage=0)))
    trainer = make_trainer(config, rank, world)
    for module in trainer.modules:
        compile_blocks(module)
    for each in (alone, trainer):
        each.step()
    return worst(true_gradients(trainer), gather_global(true_gradients(alone)))


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "mode"), [(2, "none"), (3, "none"), (3, "full")])
def test_gradients_are_those_of_one_eager_process(stage: int, mode: str) -> None:
    for error, name in run_ranks(2, worst_gradient, stage, mode, deadline=400.0):
        assert error <= EXACT, name
