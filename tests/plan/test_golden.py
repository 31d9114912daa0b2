"""The formulas give the right results for shapes whose traffic can be worked out by hand."""

from __future__ import annotations

import pytest

from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.plan.communication import stage_calls, unit_collectives
from meshwright.plan.job import job_of
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.traffic.ledger import wire_bytes

GIB = 2**30


def config(tp: int = 1, pp: int = 1, micro_batch: int = 32) -> Config:
    """Return a config with 24 layers, hidden 8192, sequence 2048, batch 32 and fp32."""
    return config_from(
        {
            "model": {"layers": 24, "hidden": 8192, "heads": 64, "vocab": 8192, "seq": 2048},
            "data": {"prefixes": ["tokens"]},
            "layout": {"tp": tp, "pp": pp},
            "train": {"global_batch": 32, "micro_batch": micro_batch, "precision": "fp32"},
        }
    )


def test_ten_gib_of_gradients_over_256_replicas() -> None:
    assert wire_bytes("all_reduce", 10 * GIB, 256) / GIB == pytest.approx(2 * 255 / 256 * 10)
    assert round(wire_bytes("all_reduce", 10 * GIB, 256) / GIB, 2) == 19.92


@pytest.mark.parametrize(("tp", "gib"), [(1, 0), (2, 192), (4, 288), (8, 336)])
def test_tensor_parallel_blocks(tp: int, gib: int) -> None:
    """Each of the 24 blocks has four all-reduces of 2 GiB, two in forward and two in backward. The embedding and the
    output layer add one each, and the loss adds three numbers for each of its 65536 tokens.
    """
    job = job_of(config(tp=tp), world=tp)
    blocks = sum(
        call.times * wire_bytes(call.op, call.payload, tp)
        for block in job.model.blocks
        for call in unit_collectives(block, job.at, job.batch)
    )
    assert blocks == gib * GIB
    ends = wire_bytes("all_reduce", 2 * 2 * GIB + 3 * 32 * 2048 * 4, tp)
    units = [call for call in stage_calls(job, 0) if call.source == "units"]
    assert sum(call.traffic.wire_bytes for call in units) == gib * GIB + ends


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_a_link_of_the_pipeline_carries_the_same_at_any_depth(pp: int) -> None:
    job = job_of(config(pp=pp, micro_batch=4), world=pp)
    sent = [
        {call.phase: call.traffic.wire_bytes for call in stage_calls(job, rank) if call.source == "pipeline"}
        for rank in range(pp)
    ]
    # Forward crosses the link from its left end, backward from its right end.
    for rank in range(pp - 1):
        assert sent[rank]["forward"] + sent[rank + 1]["backward"] == 4 * GIB


@pytest.mark.parametrize(("pp", "percent"), [(2, 11.1), (4, 27.3), (8, 46.7)])
def test_its_bubble(pp: int, percent: float) -> None:
    for kind in ("1f1b", "gpipe"):
        assert round(100 * simulate(build(kind, pp, 8)).bubble, 1) == percent
