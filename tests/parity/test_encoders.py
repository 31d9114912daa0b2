"""An encoder (model.kind=bert) gives the same results on every layout as one process.

Its two loss terms have separate counts, and its heads work on a few rows of each sample. The classic bugs are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import meshwright.nn.rows as rows
from meshwright.config.rules import check
from meshwright.engine.output import Term
from meshwright.engine.step import Trainer
from tests.parity.cases import Case, case_of_kind
from tests.parity.launches import Launches, quick_or_wide
from tests.parity.planted import Bug, altered, assert_found, mean_of_means
from tests.support.oracle import complaints, made_for, make_trainer, small_config, validation_loss

LLAMA = {
    "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.position": "rope", "model.kv_heads": 2, "model.ffn": 48,
    "model.bias": False,
}  # fmt: skip
PAIRS = {"train.micro_batch": 2, "train.global_batch": 8}


def encoder(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, **more: Any) -> Case:
    given = {"model.kind": "bert", "model.predictions": 5, **more}
    return case_of_kind(f"bert-{label}", dp, tp, pp, data, given)


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
# A case with dp runs too, without its bugs, in the test that plants them.
QUICK = {"bert-tp-sp"}


@pytest.mark.parametrize("case", quick_or_wide(CASES, QUICK))
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


@contextmanager
def _rows_not_summed(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: a rank has only those of the chosen rows that it holds."""
    with mock.patch.object(rows, "reduce_from", lambda x, group: x):
        yield


def _order_by_tokens(term: Term, counts: dict[str, Any]) -> Term:
    return replace(term, sum=term.sum / counts["loss"]) if term.name == "order" else term


_BY_LABEL = {case.label: case for case in CASES}
BUGS = {
    "mean-of-means-over-masked-tokens": Bug(encoder("dp-whole", 2, 1, 1), mean_of_means(3.0)),
    "order-divided-by-tokens": Bug(encoder("dp-whole", 2, 1, 1), altered(_order_by_tokens)),
    "chosen-rows-not-summed": Bug(_BY_LABEL["bert-tp-sp"], _rows_not_summed),
}


@pytest.mark.parametrize("name", list(BUGS))
def test_the_check_finds(name: str) -> None:
    assert_found(__name__, name)


def test_one_process_counts_samples_and_tokens_apart() -> None:
    """The same samples in micro-batches of any size give the same gradients."""
    found = []
    for size in (1, 4):
        config = small_config(model={"kind": "bert", "layers": 1}, train={"global_batch": 4, "micro_batch": size})
        trainer = make_trainer(config)
        step = trainer.step()
        counts = [sum(float(trainer.train_batches.loss_counts(trainer.train_batches.dataset.sample(n))[name])
                      for n in range(4)) for name in ("loss", "order")]  # fmt: skip
        assert step.counted == counts[0] == 6.0 and counts[1] == 4.0
        found.append(torch.tensor([step.loss, step.grad_norm, *step.losses.values()], dtype=torch.float64))
    assert torch.allclose(*found, rtol=1e-12, atol=0.0)


def test_padding_is_unseen_with_dropout_too() -> None:
    """Kernels with dropout take a mask, and kernels without take lengths. They agree in validation, where nothing is
    dropped. The contents of the padding change nothing, but a model without segments sees them.
    """
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
