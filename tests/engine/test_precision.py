"""bf16 and fp16 train with masters, gradients summed in float32 and, for fp16, a moving loss scale."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.oracle import Made, make_trainer, small_config
from tests.support.ranks import run_ranks

STEPS = 25


class Few(Made):
    """Four samples that repeat, so that a model of any size learns them."""

    def sample(self, n: int) -> dict[str, Any]:
        return super().sample(n % 4)


def losses(rank: int, world: int, precisions: list[str], layout: dict[str, Any]) -> list[list[float]]:
    found = []
    for precision in precisions:
        config = small_config(
            model={"layers": 1, "hidden": 16, "heads": 4, "vocab": 13, "seq": 8}, layout=layout,
            train={"precision": precision, "global_batch": 4, "steps": STEPS}, optimizer={"lr": 2e-2},
        )  # fmt: skip
        trainer = make_trainer(config, rank, world, Few(13, 8))
        found.append([trainer.step().loss for _ in range(STEPS)])
    return found


PRECISIONS = ["fp32", "bf16", "fp16"]


@cache
def four_ranks() -> dict[str, list[float]]:
    """Return the losses by precision on dp 2 x tp 2 with sequence parallelism."""
    ranks = run_ranks(4, losses, PRECISIONS, {"tp": 2, "sequence_parallel": True})
    assert all(rank == ranks[0] for rank in ranks)
    return dict(zip(PRECISIONS, ranks[0], strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_falls(precision: str) -> None:
    found = four_ranks()[precision]
    assert found[-1] < 0.6 * found[0]


@pytest.mark.parametrize(("precision", "close"), [("bf16", 0.08), ("fp16", 0.01)])
def test_low_precision_stays_near_fp32(precision: str, close: float) -> None:
    exact, found = four_ranks()["fp32"], four_ranks()[precision]
    assert found == pytest.approx(exact, rel=close)


@pytest.mark.parametrize(("precision", "close"), [("bf16", 0.08), ("fp16", 0.01)])
def test_layouts_agree_as_far_as_the_precision_goes(precision: str, close: float) -> None:
    (alone,) = losses(0, 1, [precision], {})
    assert four_ranks()[precision] == pytest.approx(alone, rel=close)
