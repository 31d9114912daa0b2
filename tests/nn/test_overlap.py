"""Communication that overlaps with computation gives the same gradients, and sends the planned bytes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import meshwright.nn.overlap as overlap
from meshwright.bench.models import bench_config, products_in_pieces
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import Line, Traffic, predict_rank
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import job_of
from meshwright.spec.model.pieces import runs
from tests.parity.cases import Case
from tests.parity.launches import data_of
from tests.support.oracle import (
    Outcome,
    Reference,
    compare_exact,
    complaints,
    gather_global,
    make_trainer,
    small_config,
    true_gradients,
)
from tests.support.ranks import run_ranks

PIECES = (("comm.overlap.tensor", True), ("comm.overlap.piece_gflop", 0.0))
NOTHING = tuple((f"comm.overlap.{key}", False) for key in ("gradients", "weights", "pipeline"))
Found = tuple[Outcome, dict[Line, Traffic], Outcome | None]


def forget_one(begun: overlap.PendingScatter) -> torch.Tensor:
    """Receive the piece of the last rank, but do not add it."""
    for pending in begun.pendings:
        pending.wait()
    return begun.chunks[:-1].sum(0)


def measure(rank: int, world: int, cases: list[Case], references: list[Reference], plants: bool) -> list[Found]:
    """Return for each case its distance from one process, the calls of a step, and its distance with a planted bug."""
    found: list[Found] = []
    for case, reference in zip(cases, references, strict=True):
        config = small_config(**case.sections("fp64"))
        trainer = make_trainer(config, rank, world, data_of(case))
        outcome, calls = compare_exact(trainer, reference), {}
        trainer.ctx.ledger.clear()
        trainer.step()
        for entry, tally in trainer.ctx.ledger.entries.items():
            line = Line(entry.phase, entry.axis, entry.op)
            calls[line] = calls.get(line, Traffic()).plus(Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes))
        planted = None
        if plants and case.sp:
            with mock.patch.object(overlap, "finish_scatter", forget_one):
                planted = compare_exact(make_trainer(config, rank, world, data_of(case)), reference)
        found.append((outcome, calls, planted))
    return found


def reference_of(case: Case) -> Reference:
    """Return the gradients and the norm of one process."""
    trainer = make_trainer(small_config(**case.alone("fp64")), data=data_of(case))
    gradients = gather_global(true_gradients(trainer))
    return Reference(gradients, [trainer.step().grad_norm], [], {}, {}, 0.0, [])


def check(cases: list[Case], plants: bool = False) -> None:
    references = [reference_of(case) for case in cases]
    ranks = run_ranks(cases[0].world, measure, cases, references, plants, deadline=60.0 * len(cases))
    for number, case in enumerate(cases):
        assert complaints([rank[number][0] for rank in ranks]) == [], case.name
        config = small_config(**case.sections("fp64"))
        for place, rank in enumerate(ranks):
            expected = predict_rank(config, case.world, place)
            assert rank[number][1] == expected, (case.name, place)
        planted = [rank[number][2] for rank in ranks if rank[number][2] is not None]
        assert bool(planted) == (plants and case.sp)
        assert not planted or complaints(planted), "the comparison does not see a piece that is missing"


def test_products_in_pieces() -> None:
    """Four tp ranks hold copies of key-value heads. Two others have biases and no sequence parallelism."""
    copies, biased = Case(1, 4, 1, sp=True, family="llama", extra=PIECES), Case(2, 2, 1, extra=PIECES)
    check([copies, replace(biased, extra=(*PIECES, *NOTHING, ("zero.stage", 3)))], plants=True)


@pytest.mark.wide
def test_products_in_pieces_on_many_layouts() -> None:
    many = [
        Case(1, 8, 1, sp=True, extra=PIECES),
        Case(1, 8, 1, sp=True, family="llama", extra=(*PIECES, ("recompute.mode", "full"))),
        Case(2, 2, 2, sp=True, schedule="interleaved", extra=(*PIECES, *NOTHING, ("zero.stage", 2))),
        Case(2, 2, 2, schedule="gpipe", extra=(*PIECES, *NOTHING, ("zero.stage", 1))),
        Case(1, 4, 2, sp=True, family="llama", extra=(*PIECES, ("model.experts.count", 4), ("model.experts.ffn", 16))),
        Case(1, 4, 1, sp=True, family="llama", cp=2, extra=(*PIECES, ("layout.cp", 2))),
    ]
    check(many)


def test_which_products_are_cut() -> None:
    """Each send must have 60 GFLOP to hide behind. So all products of a 3b model are cut over two ranks and none over
    eight. Of an 8b model over eight ranks only the longest product is cut. The planner then states as many sends, and
    hides only the bytes that they carry.
    """

    def cut(model: str, tp: int) -> list[str]:
        layout = {"tp": tp, "sequence_parallel": True}
        config = bench_config(model, layout=layout, comm={"overlap": {"tensor": True}})
        return [name for name, is_cut in products_in_pieces(config).items() if is_cut]

    assert cut("3b", 2) == ["qkv", "out", "up", "down"] and cut("3b", 8) == [] and cut("8b", 8) == ["up"]
    cluster = load_cluster("a100-80g-dgx")
    times = {}
    for least in (0.0, 60.0, 1e6, None):
        overlap = {"tensor": least is not None} | ({} if least is None else {"piece_gflop": least})
        config = bench_config("8b", layout={"tp": 8, "sequence_parallel": True}, comm={"overlap": overlap})
        times[least] = predict_cost(job_of(config, 8), cluster).axes["tp"].exposed_seconds
    assert times[0.0] < times[60.0] < times[1e6] == times[None]
    assert [len(run) for run in runs(8)] == [1, 2, 2, 3] and [len(run) for run in runs(2)] == [1, 1]
