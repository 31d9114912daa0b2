"""Norms, SwiGLU and rotary positions that are fused into their products: the gradients are the same in every
tensor-parallel layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.run.pretrain import build_modules
from tests.support.oracle import (
    EXACT,
    Made,
    gather_global,
    make_trainer,
    parameters,
    small_config,
    true_gradients,
    worst,
)
from tests.support.ranks import run_ranks

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "kv_heads": 2, "bias": False, "ffn": 48}
MODELS = {
    "llama": LLAMA,
    "biases, part of a head": LLAMA | {"bias": True, "rotary_fraction": 0.5},
    "parallel, query norms": LLAMA | {"parallel_residual": True, "qk_norm": True},
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}), (2, {"tp": 2}), (2, {"tp": 2, "sequence_parallel": True}), (4, {"tp": 4, "sequence_parallel": True}),
]  # fmt: skip
GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"tp": 4, "tp_grid": [2, 2]},
    "2d, one column": {"tp": 4, "tp_grid": [4, 1]},
    "2d, gathered kept": {"tp": 4, "tp_grid": [2, 2], "tp_keep_gathered": True},
    "2.5d": {"tp": 4, "tp_grid": [1, 2, 2], "tp_kind": "2.5d"},
    "3d": {"tp": 4, "tp_grid": [2, 2, 1], "tp_kind": "3d"},
    "3d, gathered kept": {"tp": 4, "tp_grid": [1, 2, 2], "tp_kind": "3d", "tp_keep_gathered": True},
}


def fused_gradients(rank: int, world: int, model: str, layout: dict[str, Any]) -> Any:
    """Return the gradients of the fused parts, run eagerly, since the compiler only combines the same calls."""
    config = small_config(model=MODELS[model], layout=layout, train={"micro_batch": 4 if "tp_grid" in layout else 1})
    ctx = build_context(config, rank, world, Device("cpu"))
    ctx = replace(ctx, parallel=replace(ctx.parallel, fused=True))
    data = Made(config.model.vocab, config.model.seq)
    return true_gradients(Trainer(ctx, build_modules(ctx, model_provider), forward_step, data))


@cache
def expected(model: str) -> Any:
    return gather_global(true_gradients(make_trainer(small_config(model=MODELS[model]))))


@pytest.mark.parametrize("index", [0, 1, 2, pytest.param(3, marks=pytest.mark.wide)])
@pytest.mark.parametrize("model", list(MODELS))
def test_gradients_are_those_of_the_separate_parts(model: str, index: int) -> None:
    world, layout = LAYOUTS[index]
    ranks = [fused_gradients(0, 1, model, {})] if world == 1 else run_ranks(world, fused_gradients, model, layout)
    for pairs in ranks:
        error, name = worst(pairs, expected(model))
        assert error <= EXACT, name


QUICK = ("biases, part of a head", "2d")


@pytest.mark.parametrize(
    ("model", "grid"),
    [QUICK, *(pytest.param(*each, marks=pytest.mark.wide) for each in product(MODELS, GRIDS) if each != QUICK)],
)
def test_gradients_on_a_grid_are_those_of_the_separate_parts(model: str, grid: str) -> None:
    for pairs in run_ranks(4, fused_gradients, model, GRIDS[grid]):
        error, name = worst(pairs, expected(model))
        assert error <= EXACT, name


TUNED = {
    "lora": {"kind": "lora", "rank": 3, "modules_to_save": ["norm1", "norm2"]},
    "dora": {"kind": "dora", "rank": 3},
    "some": {"kind": "lora", "rank": 3, "targets": ["k", "down"], "dropout": 0.2},
}


def tuned_weights(rank: int, world: int, tune: str, layout: dict[str, Any], fused: bool) -> Any:
    """Return the weights after three steps, after which no half of an adapter is zero."""
    train = {"global_batch": 2}
    config = small_config(model=LLAMA | {"layers": 2}, layout=layout, tune=TUNED[tune], train=train)
    ctx = build_context(config, rank, world, Device("cpu"))
    ctx = replace(ctx, parallel=replace(ctx.parallel, fused=fused))
    trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, Made(config.model.vocab, config.model.seq))
    for _ in range(3):
        trainer.step()
    return parameters(trainer)


@pytest.mark.parametrize(
    ("tune", "index"),
    [("lora", 0),
     pytest.param("some", 0, marks=pytest.mark.wide),  # Ranks would draw other dropout numbers than one process.
     pytest.param("dora", 0, marks=pytest.mark.wide),
     *(pytest.param(tune, n, marks=pytest.mark.wide) for tune in ("lora", "dora") for n in (1, 2, 3))],
)  # fmt: skip
def test_adapters_are_trained_alike(tune: str, index: int) -> None:
    """Products with adapters are fused with the parts before them too, and save only their input."""
    world, layout = LAYOUTS[index]
    ranks = [tuned_weights(0, 1, tune, {}, True)] if world == 1 else run_ranks(world, tuned_weights, tune, layout, True)
    wanted = gather_global(tuned_weights(0, 1, tune, {}, False))
    for pairs in ranks:
        error, name = worst(pairs, wanted)
        assert error <= 1e-11, name
