"""In bf16 a grid is as close to float64 as one axis of tensor parallelism and one process: only rounding differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.config.sections import Config
from tests.support.oracle import Pairs, WholeTensors, gather_global, make_trainer, small_config, true_gradients
from tests.support.ranks import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"mlp": "gelu"},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "kv_heads": 2, "bias": False, "ffn": 96},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1D": {"tp": 4, "sequence_parallel": True},
    "2D": {"tp": 4, "tp_grid": [2, 2]},
    "3D": {"tp": 4, "tp_grid": [2, 2, 1], "tp_kind": "3d"},
}


def config_of(model: str, precision: str, layout: dict[str, Any]) -> Config:
    shape = {"layers": 2, "hidden": 64, "heads": 4, "seq": 32} | MODELS[model]
    return small_config(model=shape, layout=layout, train={"precision": precision, "micro_batch": 4, "global_batch": 8})


def measure(rank: int, world: int, model: str) -> list[tuple[Pairs, float]]:
    """Return the gradients of the first batch and its loss, by layout. This is the body of a rank."""
    found = []
    for layout in LAYOUTS.values():
        trainer = make_trainer(config_of(model, "bf16", layout), rank, world)
        found.append((true_gradients(trainer), trainer.step().loss))
    return found


def difference(ranks: list[Pairs], whole: WholeTensors) -> float:
    """Return the norm of the differences of all ranks' gradients, relative to the norm of the true gradients."""
    wrong = right = 0.0
    for pairs in ranks:
        for record, local in pairs:
            for box in record.boxes:
                here, there = (
                    tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))
                    for start in (box.local_start, box.start)
                )
                wrong += float(np.square(local[here].numpy() - whole[record.name][there]).sum())
                right += float(np.square(whole[record.name][there]).sum())
    return (wrong / right) ** 0.5


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.wide)])
def test_a_grid_rounds_no_worse_than_one_axis(model: str) -> None:
    exact = make_trainer(config_of(model, "fp64", {}))
    whole, loss = gather_global(true_gradients(exact)), exact.step().loss
    alone = make_trainer(config_of(model, "bf16", {}))
    own = difference([true_gradients(alone)], whole)
    by_rank = run_ranks(4, measure, model)
    errors, losses = {}, {}
    for number, name in enumerate(LAYOUTS):
        errors[name] = difference([rank[number][0] for rank in by_rank], whole)
        losses[name] = max(abs(rank[number][1] / loss - 1.0) for rank in by_rank)
    assert 1e-3 < own < 2e-2, "bf16 has eight bits"
    for name in ("2D", "3D"):
        assert errors[name] < 1.07 * max(own, errors["1D"]), errors
        assert losses[name] < 1e-3, losses
