"""ZeRO under fp8 products, whose weight gradients take a separate path to the buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

STEPS = 4


def losses(rank: int, world: int, stage: int, scale: str, micro_batches: int) -> list[list[float]]:
    """Return the losses with the given ZeRO stage and without ZeRO."""
    config = small_config(
        model={"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False}
        | {"ffn": 96, "vocab": 64},
        train={"precision": "fp8", "fp8_scale": scale, "global_batch": 2 * micro_batches},
        optimizer={"lr": 1e-2}, zero={"stage": stage}, run={"device": "cpu"},
    )  # fmt: skip
    trainers = [make_trainer(c, rank, world) for c in (config, replace(config, zero=replace(config.zero, stage=0)))]
    return [[trainer.step().loss for _ in range(STEPS)] for trainer in trainers]


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_losses_are_those_without_zero(stage: int, scale: str) -> None:
    """The sums are equal bit for bit with one micro-batch. With several they differ only in the order of their
    terms.
    """
    for micro_batches in (1, 3):
        divided, plain = run_ranks(2, losses, stage, scale, micro_batches)[0]
        assert len(set(plain)) == STEPS
        assert divided == (plain if micro_batches == 1 else pytest.approx(plain, rel=1e-3))
