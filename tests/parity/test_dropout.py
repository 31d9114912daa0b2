"""Dropout: the same layout gives the same bits again, and ranks draw alike exactly where they hold the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from meshwright.engine.step import Trainer
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

STEPS = 3


def _trainer(rank: int, world: int, dropout: float = 0.5, schedule: str = "1f1b", **layout: Any) -> Trainer:
    config = small_config(
        model={"layers": 2, "dropout": dropout}, layout=layout, pipeline={"schedule": schedule},
        train={"precision": "fp32", "global_batch": 4}, optimizer={"lr": 1e-3},
    )  # fmt: skip
    return make_trainer(config, rank, world)


def losses(rank: int, world: int, layouts: list[dict[str, Any]]) -> list[list[float]]:
    found = []
    for layout in layouts:
        trainer = _trainer(rank, world, **layout)
        found.append([trainer.step().loss for _ in range(STEPS)])
    return found


LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]


@cache
def two_runs() -> tuple[list[list[float]], list[list[float]]]:
    """Return the losses of each layout from two separate launches. The second one uses gpipe instead of 1f1b."""
    first = run_ranks(2, losses, LAYOUTS)
    second = run_ranks(2, losses, [{**layout, "schedule": "gpipe"} for layout in LAYOUTS])
    assert all(rank == first[0] for rank in first) and all(rank == second[0] for rank in second)
    return first[0], second[0]


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=["dp", "tp", "tp-sp", "pp"])
def test_same_layout_same_bits_in_any_order_of_execution(index: int) -> None:
    first, second = two_runs()
    assert first[index] == second[index]
    assert len(set(first[index])) == STEPS


@contextmanager
def _watched(trainer: Trainer, seen: dict[str, Any]) -> Iterator[None]:
    """Record the outputs of the embedding and of each block, and attention's seed at each call."""
    real = F.scaled_dot_product_attention

    def attention(*args: Any, dropout_p: float = 0.0, **named: Any) -> Any:
        assert dropout_p == 0.5
        seen.setdefault("attention", []).append(torch.initial_seed())
        return real(*args, dropout_p=dropout_p, **named)

    for module in trainer.modules:
        parts = {"embedding": module.embedding, **{f"block {n}": block for n, block in module.blocks.items()}}
        for name, part in parts.items():
            part.register_forward_hook(
                lambda _, __, out, name=name: seen.setdefault(name, []).append(out.detach().numpy().copy())
            )
    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def watch(rank: int, world: int, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        seen: dict[str, Any] = {}
        trainer = _trainer(rank, world, **layout)
        with _watched(trainer, seen):
            trainer.gradients()
        found.append(seen)
    return found


@cache
def seen_by_layout() -> dict[str, list[dict[str, Any]]]:
    """Return the records of four ranks on dp 2 x tp 2, without sequence parallelism and with it."""
    plain, split = {"tp": 2}, {"tp": 2, "sequence_parallel": True}
    ranks = run_ranks(4, watch, [plain, split])
    return {"plain": [rank[0] for rank in ranks], "split": [rank[1] for rank in ranks]}


def test_tp_ranks_agree_on_what_all_of_them_hold() -> None:
    """Without sequence parallelism the residual stream is the same on every tp rank, bit by bit."""
    ranks = seen_by_layout()["plain"]
    for name in ("embedding", "block 0", "block 1"):
        for a, b in ((0, 1), (2, 3)):
            pairs = zip(ranks[a][name], ranks[b][name], strict=True)
            assert all((x == y).all() for x, y in pairs), (name, a, b)
        assert (ranks[0][name][0] != ranks[2][name][0]).any()


def test_tp_ranks_differ_on_what_each_holds_a_part_of() -> None:
    """Each rank drops elements of the rows that it holds under sequence parallelism, and all patterns differ."""
    ranks = seen_by_layout()["split"]
    patterns = [(x == 0.0).tobytes() for rank in ranks for x in rank["embedding"]]
    assert len(set(patterns)) == len(patterns)
    dropped = [float((x == 0.0).mean()) for rank in ranks for x in rank["embedding"]]
    assert all(0.35 < share < 0.65 for share in dropped)


@pytest.mark.parametrize("kind", ["plain", "split"])
def test_attention_draws_anew_for_every_rank_layer_and_micro_batch(kind: str) -> None:
    """Backward recomputes the scores and drops the same ones."""
    seeds = Counter(seed for rank in seen_by_layout()[kind] for seed in rank["attention"])
    assert len(seeds) == 4 * 2 * 2 and set(seeds.values()) == {2}


def test_a_repeated_step_draws_the_same_and_the_next_step_others() -> None:
    trainer = _trainer(0, 1)
    once = float(trainer.gradients()[0].terms["loss"].sum)
    assert float(trainer.gradients()[0].terms["loss"].sum) == once
    trainer.step_number += 1
    assert float(trainer.gradients()[0].terms["loss"].sum) != once


def test_validation_drops_nothing() -> None:
    with_dropout, without = _trainer(0, 1).validate(), _trainer(0, 1, dropout=0.0).validate()
    assert with_dropout is not None and with_dropout == without
