"""Replicas that take steps of their own: synchronising after every plain step is data parallelism, and the streaming
form without fragments and delay is DiLoCo. Every byte is planned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.optim.replica_runs import EVERY_STEP, Found, Sections, alone, furthest, replicas, trained
from tests.support.ranks import run_ranks

EXACT = 1e-12
STEPS = 3
# Each replica is a layout of its own.
FOUR = [
    replicas(2, layout={"tp": 2}), replicas(2, zero={"stage": 3}), replicas(2, EVERY_STEP | {"shares": [3, 1]}),
]  # fmt: skip
UNTIED = {"model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16, "tied_embeddings": False}}
EIGHT: list[Sections] = [
    *(replicas(2, layout={"tp": 2, "pp": 2}, zero={"stage": stage}) for stage in (0, 1)),
    *(replicas(2, layout={"tp": 2}, zero={"stage": stage}) for stage in range(4)),
    replicas(2, layout={"pp": 2, "chunks": 2}, zero={"stage": 3}, pipeline={"schedule": "interleaved"}),
    replicas(4, EVERY_STEP | {"shares": [1, 2, 4, 1]}, {"pp": 2}),
    replicas(4, layout={"pp": 2}, **UNTIED),
    replicas(2, layout={"cp": 2, "tp": 2, "sequence_parallel": True}, zero={"stage": 1}),
    replicas(2, layout={"tp": 4}, zero={"stage": 2}, model=UNTIED["model"] | {"kv_heads": 2}),
]  # fmt: skip


def check_equals_data_parallelism(world: int, cases: list[Sections], steps: int = STEPS) -> None:
    references = trained(0, 1, [alone(case) for case in cases], steps)
    for rank, found in enumerate(run_ranks(world, trained, cases, steps)):
        for case, one, reference in zip(cases, found, references, strict=True):
            assert one.losses == pytest.approx(reference.losses, rel=EXACT), (rank, case)
            assert furthest(one.parameters, reference.parameters) < EXACT, (rank, case)
            assert one.calls == one.planned, (rank, case)


def test_synchronising_after_every_plain_step_is_data_parallelism() -> None:
    check_equals_data_parallelism(4, FOUR)


@pytest.mark.wide
def test_so_it_is_in_every_layout() -> None:
    check_equals_data_parallelism(8, EIGHT)
