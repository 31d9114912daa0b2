"""Predicted equals recorded for encoders too.

They have rows of masked tokens, fields of other lengths and two declared loss terms. Models that fill in blanks have
samples with positions and segments.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.plan import communication
from meshwright.spec.model.bert import ChosenRowsPart
from tests.plan.recording import SP, Case, Records, assert_found, differences

BERT = {"kind": "bert", "predictions": 5}
CASES = [
    Case("tp", 2, {"layout": {"tp": 2}, "model": BERT, "train": {"micro_batch": 2}}),
    Case("tp-sp", 2, {"layout": {"tp": 2, **SP}, "model": BERT, "recompute": {"mode": "full"}}),
    Case("zero3", 2, {"zero": {"stage": 3}, "model": {**BERT, "pooler": False}, "train": {"precision": "bf16"}}),
    Case("post-norm", 2, {"layout": {"tp": 2, **SP}, "model": {"norm_place": "post", "mlp": "geglu"}}),
    Case("glm-tp", 2, {"layout": {"tp": 2}, "model": {"kind": "glm", "position": "learned"}}),
    Case("glm-tp-sp", 2, {"layout": {"tp": 2, **SP}, "model": {"kind": "glm"}, "recompute": {"mode": "full"}}),
    Case("glm-zero2", 2, {"zero": {"stage": 2}, "model": {"kind": "glm", "embedding_grad": 0.1}}),
    Case("glm-zero3", 4, {"zero": {"stage": 3}, "layout": {"tp": 2}, "model": {"kind": "glm"}}),
    Case("glm-pp", 4, {"layout": {"pp": 2}, "model": {"kind": "glm"}, "zero": {"stage": 1}}),
    Case("glm-all", 8, {"layout": {"tp": 2, "pp": 2, **SP}, "model": {"kind": "glm", "tied_embeddings": False}}),
    Case("pp", 4, {"layout": {"pp": 2}, "model": BERT, "zero": {"stage": 1}, "train": {"precision": "fp32"}}),
    Case("chunks", 4, {
        "layout": {"tp": 2, "pp": 2, "chunks": 2, **SP}, "model": {**BERT, "layers": 4, "tied_embeddings": False},
        "pipeline": {"schedule": "interleaved"},
    }),
    Case("all", 8, {"layout": {"tp": 2, "pp": 2, **SP}, "model": {**BERT, "norm_place": "pre", "vocab": 51}}),
]  # fmt: skip


RECORDS = Records(CASES)


def _params() -> list[object]:
    wide = {case.name for case in CASES if case.world > 2} | {"glm-zero2"}
    return [pytest.param(case, id=case.name, marks=[pytest.mark.wide] if case.name in wide else []) for case in CASES]


@pytest.mark.parametrize("case", _params())
def test_predicted_equals_recorded(case: Case) -> None:
    assert list(differences(case, RECORDS.of(case))) == []


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "replacement"),
    [
        ("tp-sp", ChosenRowsPart, "collectives", lambda self, at, batch: ()),
        ("tp", communication, "field_elements", lambda name, model, at, batch: batch.tokens(at)),
    ],
    ids=["no rows of masked tokens", "labels of all tokens"],
)
def test_a_wrong_formula_is_found(
    name: str, owner: Any, attribute: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == name)
    assert_found(case, RECORDS.of(case), owner, attribute, replacement, monkeypatch)
