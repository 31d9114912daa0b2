"""The search tries every kind of schedule, including registered ones from outside, and times each by its formula or its
table.
"""

from __future__ import annotations

from unittest import mock

import pytest

from meshwright.plan import cost
from meshwright.plan.cluster import load_cluster
from meshwright.plan.job import Job, job_of, senders_across
from meshwright.plan.search import SearchSpace, search, shapes
from meshwright.spec.schedule.kinds import KINDS, Kind
from tests.engine.test_placement import V
from tests.support.oracle import small_config

A100 = load_cluster("a100-80g-dgx")


def job(schedule: str = "1f1b", chunks: int = 1, pp: int = 4) -> Job:
    config = small_config(
        model={"layers": 16, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 2048},
        layout={"pp": pp, "chunks": chunks}, pipeline={"schedule": schedule},
        train={"precision": "bf16", "global_batch": 16, "micro_batch": 1},
    )  # fmt: skip
    return job_of(config, pp, host=False)


def test_every_kind_that_may_be_best_is_tried() -> None:
    """gpipe takes as long as 1f1b and holds more activations. zb-h1 is faster and holds more."""
    space = SearchSpace(pp=(4,), tp=(1,), chunks=(1, 2), micro_batch=(1,))
    assert {shape.config.pipeline.schedule for shape in shapes(job(), space)} == {"1f1b", "zb-h1", "interleaved"}
    with mock.patch.dict(KINDS, V):
        found = {shape.config.pipeline.schedule for shape in shapes(job(), space)}
    assert found == {"1f1b", "zb-h1", "interleaved", *V}
    best = search(job(), A100, space=SearchSpace(pp=(4,), tp=(1,), chunks=(1,), micro_batch=(1,))).candidates[0]
    assert best.job.config.pipeline.schedule == "zb-h1" and best.cost.simulated


def test_a_kind_without_a_formula_is_timed_by_its_table() -> None:
    """A table that is too large is timed by fewer micro-batches and the steady state."""
    bare = {"bare": Kind(KINDS["1f1b"].order, chunks=(1,)), "split": Kind(KINDS["zb-h1"].order, chunks=(1,))}
    with mock.patch.dict(KINDS, bare):
        for name, known in (("bare", "1f1b"), ("split", "zb-h1")):
            exact = cost.predict_cost(job(known), A100).step_s
            assert cost.predict_cost(job(name), A100).step_s == pytest.approx(exact)
            assert cost.predict_cost(job(name), A100, exact=False).step_s == pytest.approx(exact, rel=0.01)


def test_only_a_placement_that_goes_round_sends_from_the_last_rank_to_the_first() -> None:
    asked: list[bool] = []

    def senders(layout: object, around: bool) -> int:
        asked.append(around)
        return senders_across(layout, around)  # type: ignore[arg-type]

    with mock.patch.dict(KINDS, V), mock.patch.object(cost, "senders_across", senders):
        for made in (job(), job("interleaved", 2), job("v", 2)):
            cost.predict_cost(made, A100)
    assert asked == [False, True, False]
