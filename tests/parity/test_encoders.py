"""An encoder (model.kind=bert) gives on every layout what one process gives: its two terms of the loss have counts of
their own, and its heads work on a few rows of each sample. The classic bugs are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import meshwright.nn.rows as rows
from meshwright.config.rules import check
from meshwright.pipeline.output import Term, as_output
from meshwright.train.step import Trainer
from tests.parity.cases import Case
from tests.parity.launches import Launches, data_of, reference_of
from tests.support.oracle import (
    Outcome,
    Reference,
    compare_steps,
    complaints,
    made_for,
    make_trainer,
    small_config,
    validation_loss,
)
from tests.support.ranks import RankFailed, run_ranks

LLAMA = {
    "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.position": "rope", "model.kv_heads": 2, "model.ffn": 48,
    "model.bias": False,
}  # fmt: skip
PAIRS = {"train.micro_batch": 2, "train.global_batch": 8}


def encoder(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, **more: Any) -> Case:
    """Keys of a config are those with a dot."""
    keys = {key: value for key, value in more.items() if "." in key}
    own = {key: value for key, value in more.items() if "." not in key}
    extra = {"model.kind": "bert", "model.predictions": 5, **keys}
    made = tuple((data or {}).items())
    return Case(dp, tp, pp, label=f"bert-{label}", extra=tuple(extra.items()), data=made, **own)


CASES = [
    encoder("dp", 2, 1, 1, {"blind": True}),
    encoder("tp-sp", 1, 2, 1, sp=True),
    encoder("pp", 1, 1, 2, **PAIRS),
    encoder("all", 2, 2, 2, sp=True, **{"zero.stage": 1}),
    encoder("tp", 1, 2, 1, tied=False),
    encoder("tp4-sp", 1, 4, 1, sp=True, **PAIRS),
    encoder("vocabulary", 1, 4, 1, **{"model.vocab": 9}),
    encoder("chunks", 1, 1, 2, schedule="interleaved", **{"recompute.mode": "selective"}),
    encoder("chunks-tp-sp", 1, 2, 2, sp=True, schedule="interleaved", **{"recompute.mode": "full"}),
    encoder("gpipe", 2, 1, 2, schedule="gpipe", tied=False),
    encoder("zero2", 2, 1, 1, **{"zero.stage": 2, "recompute.mode": "every:2"}),
    encoder("zero3", 2, 2, 1, sp=True, **{"zero.stage": 3, "recompute.mode": "full"}),
    encoder("zero3-pp", 2, 1, 2, **{"zero.stage": 3, **PAIRS}),
    encoder("no-pooler", 1, 2, 2, sp=True, **{"model.pooler": False, "model.token_types": 0}),
    encoder("pre-norm", 2, 2, 1, sp=True, **{"model.norm_place": "pre"}),
    encoder("llama", 1, 4, 1, sp=True, **LLAMA),
    encoder("ramp", 2, 1, 1, **{"train.ramp": [2, 2, 20], "train.global_batch": 6}),
]
QUICK = {"bert-tp-sp"}  # and dp: the cases of the bugs are also run without them


def _params() -> list[object]:
    return [pytest.param(c, id=c.name, marks=[] if c.label in QUICK else [pytest.mark.wide]) for c in CASES]


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


Change = Callable[[Term, dict[str, Any]], Term]


def _altered(change: Change) -> Callable[[Trainer], Any]:
    """Every term of every micro-batch is changed."""

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        real = trainer.executor.forward_step

        def fake(module: Any, batch: Any, received: Any) -> Any:
            out = as_output(real(module, batch, received))
            counts = {term.name: term.count for term in out.terms}
            return replace(out, terms=[change(term, counts) for term in out.terms])

        trainer.executor.forward_step = fake
        yield

    return plant


@contextmanager
def _rows_not_summed(trainer: Trainer) -> Iterator[None]:
    """A rank has only those of the chosen rows that it holds."""
    with mock.patch.object(rows, "reduce_from", lambda x, group: x):
        yield


def _mean_of_means(term: Term, counts: dict[str, Any]) -> Term:
    return replace(term, sum=term.sum * 3.0 / term.count) if term.name == "loss" else term


def _order_by_tokens(term: Term, counts: dict[str, Any]) -> Term:
    return replace(term, sum=term.sum / counts["loss"]) if term.name == "order" else term


_BY_LABEL = {case.label: case for case in CASES}
BUGS: dict[str, tuple[Case, Callable[[Trainer], Any]]] = {
    "mean-of-means-over-masked-tokens": (encoder("dp-whole", 2, 1, 1), _altered(_mean_of_means)),
    "order-divided-by-tokens": (encoder("dp-whole", 2, 1, 1), _altered(_order_by_tokens)),
    "chosen-rows-not-summed": (_BY_LABEL["bert-tp-sp"], _rows_not_summed),
}


def measure(rank: int, world: int, references: list[Reference]) -> list[tuple[Outcome, Outcome]]:
    """On a rank, for each bug: the outcome without it and the one with it."""
    found = []
    for (case, plant), reference in zip(BUGS.values(), references, strict=True):
        config = small_config(**case.sections("fp64"))
        clean = compare_steps(make_trainer(config, rank, world, data_of(case)), reference)
        trainer = make_trainer(config, rank, world, data_of(case))
        with plant(trainer):
            found.append((clean, compare_steps(trainer, reference)))
    return found


@cache
def launched() -> dict[str, list[tuple[Outcome, Outcome]]] | RankFailed:
    try:
        by_rank = run_ranks(2, measure, [reference_of(case) for case, _ in BUGS.values()], deadline=120.0)
    except RankFailed as error:
        return error
    return {name: [rank[i] for rank in by_rank] for i, name in enumerate(BUGS)}


@pytest.mark.parametrize("name", list(BUGS))
def test_the_check_finds(name: str) -> None:
    found = launched()
    if isinstance(found, RankFailed):
        raise found
    assert complaints([clean for clean, _ in found[name]]) == []
    noticed = complaints([planted for _, planted in found[name]])
    assert any(": gradients: " in complaint for complaint in noticed), noticed


def test_one_process_counts_samples_and_tokens_apart() -> None:
    """The same samples in micro-batches of any size give the same gradients."""
    found = []
    for size in (1, 4):
        config = small_config(model={"kind": "bert", "layers": 1}, train={"global_batch": 4, "micro_batch": size})
        trainer = make_trainer(config)
        step = trainer.step()
        counts = [sum(float(trainer.train_batches.loss_counts(trainer.train_batches.dataset.sample(n))[name])
                      for n in range(4)) for name in ("loss", "order")]  # fmt: skip
        assert step.tokens == counts[0] == 6.0 and counts[1] == 4.0
        found.append(torch.tensor([step.loss, step.grad_norm, *step.losses.values()], dtype=torch.float64))
    assert torch.allclose(*found, rtol=1e-12, atol=0.0)


def test_padding_is_unseen_with_dropout_too() -> None:
    """Kernels with dropout take a mask, those without take lengths: without any dropout at work they agree. What stands
    in the padding changes nothing; a model without segments sees it."""
    losses = []
    for share, pad in ((0.0, 0), (0.3, 0), (0.0, 7)):
        config = small_config(model={"kind": "bert", "layers": 2, "attention_dropout": share})
        data = made_for(config)
        real = data.sample

        def padded(n: int, real: Any = real, pad: int = pad) -> dict[str, Any]:
            sample = real(n)
            return sample | {"tokens": np.where(sample["segments"] == 1, pad, sample["tokens"])}

        data.sample = padded
        losses.append(validation_loss(make_trainer(config, data=data)))
        data.sample = lambda n, padded=padded: padded(n) | {"segments": np.zeros(16, np.int64)}
        seen = validation_loss(make_trainer(config, data=data))
        assert abs(seen - losses[0]) > 1e-6
    assert max(losses) - min(losses) < 1e-12
