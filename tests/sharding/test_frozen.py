"""Frozen parameters and modules of several precisions: what is not trained is left alone, wide weights stay wide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.config.rules import check
from meshwright.config.sections import OptimizerConfig
from meshwright.device import Device
from meshwright.layout import Layout
from meshwright.optim.adam import FlatOptimizer
from meshwright.sharding.data_parallel import DataParallel
from meshwright.train.context import build_context
from meshwright.train.gpt import forward_step, model_provider
from meshwright.train.pretrain import build_modules
from meshwright.train.step import Trainer
from tests.support.oracle import Made, small_config
from tests.support.ranks import run_ranks

INTERLEAVED = {"layout": {"pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (1, {"recompute": {"mode": "full"}}),
    "recomputed in runs, divided": (2, {"recompute": {"mode": "every:2"}, "zero": {"stage": 3}}),
    "a stage without a weight": (2, {"layout": {"pp": 2}}),
    "a chunk without a weight": (2, INTERLEAVED),
    "a chunk without a weight, divided": (4, INTERLEAVED | {"zero": {"stage": 3}}),
}


def provider(ctx: Any, stage: Any) -> nn.Module:
    """The embedding and the first half of the layers are frozen."""
    module = model_provider(ctx, stage)
    if module.embedding is not None:
        module.embedding.requires_grad_(False)
    for name, block in module.blocks.items():
        block.requires_grad_(int(name) >= 2)
    return module


def steps(rank: int, world: int, sections: dict[str, Any]) -> list[tuple[float, float]]:
    config = small_config(**({"model": {"tied_embeddings": False, "layers": 4}} | sections))
    check(config, world)
    ctx = build_context(config, rank, world, Device("cpu"), trains=True)
    data = Made(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, provider), forward_step, data, data)
    return [(result.loss, result.grad_norm) for result in (trainer.step() for _ in range(3))]


@pytest.mark.parametrize("name", list(CASES))
def test_frozen_layers_train_alike_everywhere(name: str) -> None:
    world, sections = CASES[name]
    plain = steps(0, 1, {})
    for found in [steps(0, 1, sections)] if world == 1 else run_ranks(world, steps, sections):
        assert found == [pytest.approx(pair, rel=1e-9) for pair in plain]


def test_frozen_parameters_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    steps(0, 1, {})
    assert "frozen parameters are not saved in checkpoints" in capfd.readouterr().err


class Mixed(nn.Module):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, dtype=low)
        self.norm = nn.LayerNorm(64)


def filled(module: nn.Module, grad_dtype: torch.dtype, value: float) -> DataParallel:
    parallel = DataParallel([module], Mesh(Layout(1), 0), grad_dtype=grad_dtype)
    fill(parallel, value)
    return parallel


def fill(parallel: DataParallel, value: float) -> None:
    parallel.begin(1)
    for slot in (slot for buffer in parallel.buffers for slot in buffer.slots):
        slot.sink.add(torch.full(slot.record.local_shape, value, dtype=slot.grad.dtype))
    parallel.finish()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_the_norm_of_gradients_of_two_precisions(low: torch.dtype) -> None:
    """Each is summed in float32 at least: 64 x 64 squares of 3000 are beyond fp16."""
    parallel = filled(Mixed(low), low, 3000.0)
    grads = [slot.grad.double() for buffer in parallel.buffers for slot in buffer.slots]
    true = sum(float(grad.square().sum()) for grad in grads)
    assert float(parallel.square_sum()) == pytest.approx(true, rel=1e-5)


def test_wide_weights_keep_their_width_without_masters() -> None:
    """master_dtype=bf16 means no masters, not narrow ones: Adam's steps of 1e-3 are lost beside a bf16 one."""
    module = Mixed(torch.bfloat16)
    parallel = filled(module, torch.float32, 1.0)
    optimizer = FlatOptimizer(parallel.buffers, OptimizerConfig(master_dtype="bf16", lr=1e-3, weight_decay=0.0))
    for _ in range(50):
        fill(parallel, 1.0)
        optimizer.step(1e-3, 1.0)
    assert module.norm.weight.detach() == pytest.approx(0.95, abs=1e-3)
