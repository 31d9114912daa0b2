"""The gradient noise scale equals its formula, on every layout that has the same small batches."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.check.oracle import gather_global, true_gradients
from meshwright.config.rules import check
from meshwright.errors import UserError
from tests.support.oracle import MadeTokens, make_trainer, small_config
from tests.support.ranks import run_ranks

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"train": {"micro_batch": 2}}),
    (2, {"train": {"micro_batch": 2}, "zero": {"stage": 2}}),  # two ranks with two micro-batches each
    (4, {"train": {"micro_batch": 2}, "zero": {"stage": 3}, "layout": {"tp": 2}}),
    (4, {"train": {"micro_batch": 4}, "layout": {"pp": 2}}),
    (4, {"train": {"micro_batch": 4}, "layout": {"tp": 2}, "zero": {"stage": 1}}),
]
STEPS = 3
# Every sample counts the same number of tokens, as the formula assumes.
DATA = MadeTokens(53, 16, holes=False)


def noise(rank: int, world: int, layouts: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Return the figures of each step, by layout."""
    found = []
    for sections in layouts:
        config = small_config(model=LLAMA, run={"noise_scale": True}, **sections)
        trainer = make_trainer(config, rank, world, DATA)
        found.append([trainer.step().noise for _ in range(STEPS)])
    return found


def gradients_of(size: int) -> list[float]:
    """Return the squared norms of the gradients of the first samples, in batches of this size, in one process."""
    config = small_config(model=LLAMA, train={"global_batch": size, "micro_batch": size})
    trainer = make_trainer(config, data=DATA)
    squares = []
    for first in range(0, 8, size):
        trainer.consumed = first
        squares.append(sum(float((g**2).sum()) for g in gather_global(true_gradients(trainer)).values()))
    return squares


def test_every_layout_finds_what_the_formula_says() -> None:
    """The first step of each layout is compared with the gradients of its small batches, computed in one process."""
    tokens, (big,) = 8 * 16, gradients_of(8)
    by_size = {size: sum(squares) / len(squares) for size in (2, 4) for squares in [gradients_of(size)]}
    found: dict[int, list[list[dict[str, float]]]] = {}
    for world in (2, 4):
        found[world] = run_ranks(world, noise, [sections for ranks, sections in LAYOUTS if ranks == world])[0]
    for number, (world, sections) in enumerate(LAYOUTS):
        steps = found[world].pop(0)
        n = 4 if number < 3 else 2
        small = by_size[8 // n]
        square, variance = (n * big - small) / (n - 1), tokens * (small - big) / (n - 1)
        assert steps[0]["square"] == pytest.approx(square, rel=1e-9), sections
        assert steps[0]["variance"] == pytest.approx(variance, rel=1e-9), sections
        if square > 0:
            assert steps[0]["scale"] == pytest.approx(variance / square, rel=1e-9)
        assert len({step["variance"] for step in steps}) == STEPS


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({}, 1, "run.noise_scale compares the gradients of data-parallel ranks, and this run has one"),
    ({"layout": {"cp": 2}, "model": LLAMA}, 4, "divides the tokens of one sample"),
]


@pytest.mark.parametrize("sections, world, said", BAD)
def test_mistakes_are_one_sentence(sections: dict[str, Any], world: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(small_config(run={"noise_scale": True}, **sections), world)
