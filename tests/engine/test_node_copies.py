"""A second copy of the weights inside each node. In float64 gradients and parameters are the same as without it. A step
sends and holds the planned bytes: one gather is over all ranks, and the others are inside the node.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshwright.dryrun.run_rank import state_bytes
from meshwright.errors import UserError
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import predict_rank
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import checked_job, job_of
from meshwright.plan.memory import rank_states
from tests.engine.sums import lines_of, placed
from tests.support.oracle import make_trainer, parameters, small_config
from tests.support.ranks import run_ranks

MODEL = {"layers": 2, "hidden": 24, "heads": 4, "vocab": 53, "seq": 8}
TRAIN = {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "compile": False}
STEPS = 3


def sections(copies: bool, layout: dict[str, Any] | None = None, **gather: Any) -> dict[str, Any]:
    layout = {"node_size": 2} if layout is None else layout
    keys = {"comm": {"gather": {"node_copy": copies} | gather}, "zero": {"stage": 3}, "layout": layout}
    return keys | {"model": MODEL, "train": TRAIN}


def trained(rank: int, world: int, cases: list[dict[str, Any]]) -> list[Any]:
    found = []
    for case in cases:
        trainer = make_trainer(small_config(**case), rank, world)
        losses, calls = [], []
        for _ in range(STEPS):
            losses.append(trainer.step().loss)
            calls.append(lines_of(trainer))
        whole: dict[str, np.ndarray] = {}
        placed(parameters(trainer), whole)
        found.append((losses, calls, whole, state_bytes(trainer)["parameters"]))
    return found


def check(world: int, layout: dict[str, Any], **gather: Any) -> None:
    cases = [sections(copies, layout, **gather) for copies in (True, False)]
    for rank, (copied, usual) in enumerate(run_ranks(world, trained, cases)):
        assert copied[0] == pytest.approx(usual[0], rel=1e-12)
        for name, values in usual[2].items():
            assert np.allclose(copied[2][name], values, rtol=1e-11, atol=1e-13, equal_nan=True), name
        config = small_config(**cases[0])
        planned = predict_rank(config, world, rank)
        assert copied[1] == [planned] * STEPS
        inside = [line for line in planned if line.axis == "dp.shard"]
        assert [line.phase for line in inside] == ["gather"]
        job = job_of(config, world)
        assert copied[3] == rank_states(job, job.layout.coordinate(rank)["pp"])[0] > usual[3]


def test_gathers_after_the_first_stay_in_the_node() -> None:
    check(4, {"node_size": 2})


@pytest.mark.wide
def test_copies_on_other_layouts() -> None:
    check(8, {"node_size": 4, "tp": 2})
    check(8, {"node_size": 2, "pp": 2})
    check(4, {"node_size": 2}, kind="int8")


def test_less_crosses_nodes_and_a_step_is_predicted_to_be_shorter() -> None:
    made = (small_config(**sections(copies, {})) for copies in (True, False))
    job, usual = (job_of(config, 64, cluster_node=8, samples=128) for config in made)
    cluster = load_cluster("a100-80g-dgx")
    assert predict_cost(job, cluster).axes["dp"].seconds < predict_cost(usual, cluster).axes["dp"].seconds


@pytest.mark.parametrize(("change", "text"), [
    ({"zero": {"stage": 2}}, "needs zero.stage=3, not 2"),
    ({"zero": {"stage": 3, "shard_group": "node"}}, "with zero.shard_group=node yet: set zero.shard_group=dp"),
    ({"layout": {"node_size": 3}}, "comm.gather.node_copy=true: a node of layout.node_size=3 holds 3 of the 4"),
])  # fmt: skip
def test_what_it_needs(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        checked_job(small_config(**sections(True) | change), 4)
