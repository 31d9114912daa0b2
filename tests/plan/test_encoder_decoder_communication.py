"""Predicted equals recorded for encoder-decoders too: two tensors between stages of the decoder, fields of other
lengths, and embedding tables that several stages share.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec.model.graph import Model
from meshwright.spec.model.t5 import CrossAttentionPart
from tests.plan.recording import SP, Case, Records, assert_found, differences

T5 = {"kind": "t5", "heads": 4, "head_dim": 10, "t5": {"decoder_seq": 8}}
LONG = {**T5, "layers": 6, "t5": {"decoder_seq": 8, "encoder_layers": 2}}
CASES = [
    Case("tp", 2, {"layout": {"tp": 2}, "model": T5, "train": {"micro_batch": 2}}),
    Case("tp-sp", 2, {"layout": {"tp": 2, **SP}, "model": {**T5, "mlp": "tanh_geglu"}, "recompute": {"mode": "full"}}),
    Case("pp", 2, {"layout": {"pp": 2}, "model": LONG, "train": {"precision": "bf16"}}),
    Case("zero3", 2, {"zero": {"stage": 3}, "model": T5}),
    Case("pp4", 4, {"layout": {"pp": 4}, "model": LONG, "pipeline": {"encoder_stages": 1}}),
    Case("pp4-untied", 4, {
        "layout": {"pp": 4}, "model": {**LONG, "tied_embeddings": False}, "pipeline": {"encoder_stages": 2},
        "recompute": {"mode": "every:2"},
    }),
    Case("chunks", 4, {
        "layout": {"tp": 2, "pp": 2, "chunks": 2, **SP}, "model": LONG, "train": {"precision": "fp32"},
        "pipeline": {"schedule": "interleaved", "encoder_stages": 1},
    }),
    Case("zero3-pp", 4, {
        "layout": {"pp": 2}, "model": {**LONG, "layers": 7, "t5": {"decoder_seq": 8, "encoder_layers": 3}},
        "zero": {"stage": 3}, "pipeline": {"split": [5, 2]}, "recompute": {"mode": "every:2"},
    }),
    Case("all", 8, {"layout": {"tp": 2, "pp": 2, **SP}, "model": {**T5, "vocab": 51}, "zero": {"stage": 1}}),
]  # fmt: skip


RECORDS = Records(CASES)


def _params() -> list[object]:
    return [pytest.param(case, id=case.name, marks=[pytest.mark.wide] if case.world > 2 else []) for case in CASES]


@pytest.mark.parametrize("case", _params())
def test_predicted_equals_recorded(case: Case) -> None:
    assert list(differences(case, RECORDS.of(case))) == []


def _only_hidden(self: Model, at: Any, batch: Any, stage: Any) -> dict[str, tuple[int, ...]]:
    """Replace `Model.passes` with a version that sends one tensor between all stages."""
    return {} if stage.first else {"hidden": (batch.rows(at), self.hidden)}


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "replacement"),
    [
        ("tp", CrossAttentionPart, "memory", lambda self, batch: batch),
        ("pp", Model, "passes", _only_hidden),
    ],
    ids=["an output as long as a target", "one tensor between stages"],
)
def test_a_wrong_formula_is_found(
    name: str, owner: Any, attribute: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == name)
    assert_found(case, RECORDS.of(case), owner, attribute, replacement, monkeypatch)
