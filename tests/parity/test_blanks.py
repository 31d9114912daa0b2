"""A model that fills in blanks (model.kind=glm) gives on every layout what one process gives. The classic bugs are
found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.models.gpt as gpt
from meshwright.config.rules import check
from meshwright.nn.documents import Documents
from meshwright.pipeline.output import as_output
from meshwright.train.step import Trainer
from tests.parity.cases import Case
from tests.parity.launches import Launches, data_of, reference_of
from tests.support.oracle import Outcome, Reference, compare_steps, complaints, make_trainer, small_config
from tests.support.ranks import RankFailed, run_ranks

PAIRS = {"train.micro_batch": 2, "train.global_batch": 8}


def blanks(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, **more: Any) -> Case:
    """Keys of a config are those with a dot."""
    keys = {key: value for key, value in more.items() if "." in key}
    own = {key: value for key, value in more.items() if "." not in key}
    extra = {"model.kind": "glm", "model.embedding_grad": 0.3, **keys}
    return Case(dp, tp, pp, label=f"glm-{label}", extra=tuple(extra.items()), data=tuple((data or {}).items()), **own)


CASES = [
    blanks("tp-sp", 1, 2, 1, sp=True),
    blanks("dp", 2, 1, 1, {"blind": True}),
    blanks("tp", 1, 2, 1, tied=False, **PAIRS),
    blanks("pp", 1, 1, 2, **PAIRS),
    blanks("all", 2, 2, 2, sp=True, **{"zero.stage": 1}),
    blanks("tp4", 1, 4, 1, sp=True, **{"model.kv_heads": 2, "model.norm": "rmsnorm", "model.bias": False}),
    blanks("chunks", 1, 2, 2, sp=True, schedule="interleaved", **{"recompute.mode": "full"}),
    blanks("selective", 1, 1, 2, schedule="gpipe", **{"recompute.mode": "selective"}),
    blanks("zero2", 2, 1, 1, **{"zero.stage": 2, "recompute.mode": "every:2"}),
    blanks("zero3", 2, 2, 1, sp=True, **{"zero.stage": 3}),
    blanks("learned", 1, 2, 2, sp=True, **{"model.position": "learned", "model.norm_place": "pre"}),
    blanks("experts", 2, 1, 1, **{"model.experts.count": 4, "model.experts.aux_loss": 0.1, "layout.ep": 2}),
]
QUICK = {"glm-tp-sp"}


def _params() -> list[object]:
    return [pytest.param(c, id=c.name, marks=[] if c.label in QUICK else [pytest.mark.wide]) for c in CASES]


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


@contextmanager
def _mean_of_means(trainer: Trainer) -> Iterator[None]:
    """Every micro-batch is divided by its own number of tokens to fill in."""
    real = trainer.executor.forward_step

    def fake(module: Any, batch: Any, received: Any) -> Any:
        out = as_output(real(module, batch, received))
        return replace(out, terms=[replace(term, sum=term.sum * 3.0 / term.count) for term in out.terms])

    trainer.executor.forward_step = fake
    yield


@contextmanager
def _plainly_causal(trainer: Trainer) -> Iterator[None]:
    """One rank forgets that the source is seen as a whole."""
    real = Documents.of

    def fake(segments: Any, device: torch.device, causal: bool = True, prefix: bool = False) -> Documents:
        return real(segments.clip(1) if prefix else segments, device, causal, False)

    with mock.patch.object(gpt.Documents, "of", staticmethod(fake)):
        yield


BUGS: dict[str, Callable[[Trainer], Any]] = {
    "mean-of-means-over-blanks": _mean_of_means, "the-source-is-causal": _plainly_causal,
}  # fmt: skip
CASE = blanks("dp-whole", 2, 1, 1)


def measure(rank: int, world: int, reference: Reference) -> list[tuple[Outcome, Outcome]]:
    """On a rank, for each bug: the outcome without it and the one with it."""
    found, config = [], small_config(**CASE.sections("fp64"))
    for plant in BUGS.values():
        clean = compare_steps(make_trainer(config, rank, world, data_of(CASE)), reference)
        trainer = make_trainer(config, rank, world, data_of(CASE))
        with plant(trainer):
            found.append((clean, compare_steps(trainer, reference)))
    return found


@cache
def launched() -> dict[str, list[tuple[Outcome, Outcome]]] | RankFailed:
    try:
        by_rank = run_ranks(2, measure, reference_of(CASE), deadline=120.0)
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
