"""Weights that are gathered in fewer bits are equal on all ranks, within the bound of their codes, and sent as planned.
Updated and saved weights stay exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwright.plan.communication import Line, Traffic, predict_rank
from tests.support.oracle import make_trainer, parameters, small_config
from tests.support.ranks import run_ranks

# Relative to the largest weight of a block, or to the weight itself.
BOUNDS = {"bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 1 / 254}
SECTIONS: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16}, "zero": {"stage": 3},
    "train": {"precision": "fp64", "global_batch": 4, "micro_batch": 1},
}  # fmt: skip


def gathered(rank: int, world: int, kinds: list[str]) -> list[dict[str, Any]]:
    found = []
    for kind in kinds:
        trainer = make_trainer(small_config(**SECTIONS, comm={"gather": {"kind": kind}}), rank, world)
        wholes, owned = [], []
        weights = trainer.data_parallel.weights
        for unit in weights.units:
            weights.open(unit)
            wholes += [bucket.params.tensor.clone() for bucket in unit.buckets]
            owned += [(bucket.own_params.clone(), bucket.share[0] - bucket.start) for bucket in unit.buckets]
            weights.close(unit)
        saved = {record.name: values.numpy().copy() for record, values in parameters(trainer)}
        losses = [trainer.step().loss for _ in range(2)]
        calls: dict[Line, Traffic] = {}
        for entry, tally in trainer.ctx.ledger.entries.items():
            line = Line(entry.phase, entry.axis, entry.op)
            calls[line] = calls.get(line, Traffic()).plus(Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes))
        off = max(
            float((whole[at : at + own.numel()] - own).abs().max() / own.abs().max())
            for whole, (own, at) in zip(wholes, owned, strict=True)
        )
        whole = [each.numpy() for each in wholes]
        found.append({"wholes": whole, "off": off, "calls": calls, "losses": losses, "saved": saved})
    return found


@pytest.mark.parametrize("kinds", [["int8"], pytest.param(["bf16", "fp8"], marks=pytest.mark.wide)])
def test_gathered_codes(kinds: list[str]) -> None:
    kinds = ["plain", *kinds]
    ranks = run_ranks(2, gathered, kinds)
    for number, kind in enumerate(kinds):
        first, second = (rank[number] for rank in ranks)
        assert all(np.array_equal(a, b) for a, b in zip(first["wholes"], second["wholes"], strict=True)), kind
        off, plain = first["off"], ranks[0][0]
        assert (off == 0.0) == (kind == "plain") and off <= BOUNDS.get(kind, 0.0), (kind, off)
        assert first["losses"] == pytest.approx(plain["losses"], rel=0.02)
        for name, values in plain["saved"].items():
            assert np.array_equal(first["saved"][name], values), (kind, name)
        config = small_config(**SECTIONS, comm={"gather": {"kind": kind}})
        for place, rank in enumerate(ranks):
            assert rank[number]["calls"] == predict_rank(config, 2, place), kind
    assert torch.finfo(torch.float8_e4m3fn).eps / 2 == BOUNDS["fp8"]
