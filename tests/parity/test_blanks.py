"""A model that fills in blanks (model.kind=glm) gives the same results on every layout as one process. The classic bugs
are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.models.views as views
from meshwright.config.rules import check
from meshwright.engine.step import Trainer
from meshwright.nn.attention.documents import Documents
from tests.parity.cases import Case, case_of_kind
from tests.parity.launches import Launches, quick_or_wide
from tests.parity.planted import Bug, assert_found, mean_of_means
from tests.support.oracle import complaints, small_config

PAIRS = {"train.micro_batch": 2, "train.global_batch": 8}


def blanks(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, **more: Any) -> Case:
    given = {"model.kind": "glm", "model.embedding_grad": 0.3, **more}
    return case_of_kind(f"glm-{label}", dp, tp, pp, data, given)


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


@pytest.mark.parametrize("case", quick_or_wide(CASES, QUICK))
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


@contextmanager
def _plainly_causal(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the source is seen causally instead of as a whole."""
    real = Documents.of

    def fake(segments: Any, device: torch.device, causal: bool = True, prefix: bool = False) -> Documents:
        return real(segments.clip(1) if prefix else segments, device, causal, False)

    with mock.patch.object(views.Documents, "of", staticmethod(fake)):
        yield


CASE = blanks("dp-whole", 2, 1, 1)
BUGS = {
    "mean-of-means-over-blanks": Bug(CASE, mean_of_means(3.0)),
    "the-source-is-causal": Bug(CASE, _plainly_causal),
}


@pytest.mark.parametrize("name", list(BUGS))
def test_the_check_finds(name: str) -> None:
    assert_found(__name__, name)
