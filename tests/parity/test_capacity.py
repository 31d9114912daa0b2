"""Experts with a capacity: on every layout, the sequence alone decides which of its tokens are dropped."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.cli.dryrun import compare
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.plan.communication import by_line, stage_calls
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from tests.engine.sums import lines_of
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

Sections = dict[str, Any]
MODEL = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 53, "seq": 16, "position": "rope",
         "experts": {"count": 4, "top_k": 2, "ffn": 8, "capacity": 0.7, "aux_loss": 0.01}}  # fmt: skip
TRAIN = {"precision": "fp64", "global_batch": 4, "micro_batch": 2, "compile": False}
STEPS = 3


def sections(layout: Sections, **more: Sections) -> Sections:
    return {"model": MODEL, "train": TRAIN | more.pop("train", {}), "layout": layout} | more


QUICK: list[tuple[int, Sections]] = [
    (2, sections({"cp": 2})),
    (2, sections({"tp": 2, "etp": 1}, train={"micro_batch": 1})),
]
WIDE: list[tuple[int, Sections]] = [
    *((4, sections({"cp": 4}, context={"kind": "gather", "order": order}))
      for order in ("zigzag", "striped", "contiguous", "documents")),
    (2, sections({}, train={"micro_batch": 1})), (2, sections({"ep": 2})),
    (2, sections({"tp": 2})), (2, sections({"tp": 2}, train={"micro_batch": 1})),
    (2, sections({"tp": 2, "etp": 1, "ep": 2})),
    (2, sections({"tp": 2, "etp": 1, "ep": 2, "sequence_parallel": True}, train={"micro_batch": 4})),
    (4, sections({"tp": 4, "etp": 2, "ep": 2}, train={"micro_batch": 1})),
    (4, sections({"tp": 2, "cp": 2, "etp": 1, "ep": 4}, recompute={"mode": "full"})),
    (4, sections({"tp": 2, "cp": 2, "ep": 2, "sequence_parallel": True})),
    (4, sections({"pp": 2, "cp": 2}, recompute={"mode": "selective"})),
    (8, sections({"tp": 2, "cp": 2, "pp": 2, "etp": 1, "order": "cp-tp-ep-dp-pp"}, zero={"stage": 0})),
]  # fmt: skip


def trained(rank: int, world: int, given: Sections) -> tuple[list[float], list[float], bool]:
    """Return the losses, the norms, and whether the calls of the last step match the plan."""
    config = small_config(**given)
    trainer = make_trainer(config, rank, world)
    losses, norms = [], []
    for _ in range(STEPS):
        trainer.ctx.ledger.entries.clear()
        result = trainer.step()
        losses.append(result.loss)
        norms.append(result.grad_norm)
    job = checked_job(config, world)
    planned, found = by_line(stage_calls(job, trainer.ctx.pp_rank)), lines_of(trainer)
    counted = {line: each for line, each in found.items() if line.axis in ("tp", "cp", "ep", "etp")}
    agrees = all(planned.get(line) == each for line, each in counted.items())
    return losses, norms, agrees


def check_layouts(cases: list[tuple[int, Sections]]) -> None:
    alone = run_ranks(1, trained, sections({}))[0]
    free = run_ranks(1, trained, sections({}) | {"model": MODEL | {"experts": {**MODEL["experts"], "capacity": None}}})
    assert alone[0][0] != pytest.approx(free[0][0][0], rel=1e-6), "nothing was dropped"
    for world, given in cases:
        for losses, norms, agrees in run_ranks(world, trained, given):
            assert losses == pytest.approx(alone[0], rel=1e-11), given
            assert norms == pytest.approx(alone[1], rel=1e-9), given
            assert agrees, given


def test_tokens_are_dropped_alike() -> None:
    check_layouts(QUICK)


@pytest.mark.wide
@pytest.mark.parametrize("number", range(len(WIDE)))
def test_tokens_are_dropped_alike_everywhere(number: int) -> None:
    check_layouts([WIDE[number]])


@pytest.mark.parametrize("number", range(len(QUICK) + len(WIDE)))
def test_a_dry_run_does_what_is_planned(number: int) -> None:
    world, given = [*QUICK, *WIDE][number]
    config = small_config(**given)
    job = checked_job(config, world)
    for rank in {0, world - 1}:
        found = compare(rank, run_rank(config, world, rank, Device("meta")), planned_rank(job, rank))
        assert found["equal"], (given, rank, [call for call in found["calls"] if not call["equal"]])
