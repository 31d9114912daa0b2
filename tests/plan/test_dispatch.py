"""The traffic of mixtures of experts over ep.

Given how many rows each rank sent, the formulas equal the ledger to the byte for every rank, block and phase. The
planner assumes balanced experts; these send the average of what random routers send.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from meshwright.config.sections import Config
from meshwright.plan.communication import Line, Traffic, predict_detail, predict_rank
from meshwright.plan.dispatch import dispatch_traffic
from meshwright.plan.job import Job, job_of
from meshwright.spec.model.experts import ExpertsPart
from meshwright.spec.model.part import BlockUnit
from tests.support.oracle import small_config
from tests.support.ranks import run_ranks

LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied_embeddings": False}
SP = {"sequence_parallel": True}
EXPERTS = {"count": 8, "top_k": 3, "ffn": 24}


@dataclass(frozen=True)
class Case:
    """A mixture of experts on a layout: config sections on top of a small model."""

    name: str
    world: int
    layout: dict[str, Any]
    experts: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        model = {**LLAMA, "layers": 2, "seq": 12, "hidden": 24, "heads": 4, "experts": EXPERTS | self.experts}
        train = {"global_batch": 8, "compile": False} | self.train
        return small_config(model=model, layout=self.layout, train=train, **self.sections)


CASES = [
    Case("dp", 2, {"ep": 2}),
    Case("bf16-micro-batch", 2, {"ep": 2}, train={"precision": "bf16", "micro_batch": 2}),
    Case("tp", 2, {"tp": 2, "ep": 2, "etp": 1}, {"every": 2}, {"precision": "fp32"}),
    Case("tp-sp", 2, {"tp": 2, "ep": 2, "etp": 1, **SP}, {"router": "sigmoid", "shared": 1, "aux_loss": 0.1}),
    Case("recomputed", 2, {"ep": 2}, sections={"recompute": {"mode": "full"}}),
    Case("capacity", 2, {"ep": 2}, {"capacity": 1.25}),
    Case("one-choice", 2, {"ep": 2}, {"top_k": 1, "count": 2}, sections={"recompute": {"mode": "every:2"}}),
    Case("ep4", 4, {"ep": 4}),
    Case("by-node", 4, {"ep": 4, "node_size": 2}, sections={"comm": {"algorithm": {"ep": "hierarchical"}}}),
    Case("by-node-again", 4, {"tp": 2, "ep": 4, "etp": 1, **SP, "node_size": 2},
         sections={"comm": {"algorithm": {"ep": "hierarchical"}}, "recompute": {"mode": "full"}}),
    Case("by-node-capacity", 4, {"ep": 4, "node_size": 2}, {"capacity": 1.25},
         sections={"comm": {"algorithm": {"ep": "hierarchical"}}}),
    Case("copies", 4, {"ep": 2}, train={"precision": "bf16"}),
    Case("etp", 4, {"tp": 2, "ep": 2, **SP}),
    Case("across-tp", 4, {"tp": 2, "ep": 4, "etp": 1, **SP}),
    Case("across-tp-plain", 4, {"tp": 2, "ep": 4, "etp": 1}, sections={"recompute": {"mode": "full"}}),
    Case("tp4", 4, {"tp": 4, "ep": 2, "etp": 2}),
    Case("pp", 4, {"pp": 2, "ep": 2}, {"first_dense": 1}),
    Case("zero3", 4, {"ep": 2}, sections={"zero": {"stage": 3}}),
    Case("cp", 2, {"cp": 2, "ep": 2}),
    Case("across-cp", 4, {"tp": 2, "cp": 2, "ep": 4, "etp": 1, **SP}, {"aux_loss": 0.1}),
]  # fmt: skip
QUICK = {case.name for case in CASES if case.world == 2}
COMPILED = [replace(each, name=f"{each.name}-compiled", train=each.train | {"compile": True}) for each in CASES]
ALL = [*CASES, *COMPILED]


@dataclass
class Recorded:
    """A rank's record of a step: by block and micro-batch the rows that it sent to every rank of its ep group, and by
    block its ledger over ep.
    """

    rows: dict[int, list[list[int]]]
    lines: dict[int, dict[Line, Traffic]]


def over_ep(axis: str) -> bool:
    return axis.split(".")[0] == "ep"


def record(rank: int, world: int, cases: list[Case]) -> list[Recorded]:
    from unittest import mock

    import torch

    from meshwright.nn.experts import experts
    from tests.support.oracle import make_trainer

    found = []
    exchange = experts.exchange_counts
    for case in cases:
        seen = Recorded({}, {})

        def noted(order: Any, routing: Any, ep: Any, by_node: Any, seen: Recorded = seen) -> Any:
            rows = order.counts.view(ep.size, -1).sum(1).tolist()
            seen.rows.setdefault(ep.ledger.current_layer, []).append(rows)
            return exchange(order, routing, ep, by_node)

        # Otherwise the sizes of an earlier case would turn those of this case into dynamic shapes.
        torch.compiler.reset()
        with mock.patch.object(experts, "exchange_counts", noted):
            trainer = make_trainer(case.config, rank, world)
            assert trainer.executor.compiled == bool(case.train.get("compile"))
            trainer.step()
        for entry, tally in trainer.ctx.ledger.entries.items():
            if over_ep(entry.axis):
                assert entry.layer is not None
                line, lines = Line(entry.phase, entry.axis, entry.op), seen.lines.setdefault(entry.layer, {})
                traffic = Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes)
                lines[line] = lines.get(line, Traffic()).plus(traffic)
        found.append(seen)
    return found


@cache
def launched(world: int, names: tuple[str, ...]) -> dict[str, list[Recorded]]:
    """Launch the named cases and return the record of every rank, by case."""
    cases = [case for case in ALL if case.name in names]
    ranks = run_ranks(world, record, cases, deadline=600)
    return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


def recorded(case: Case) -> list[Recorded]:
    alike = CASES if case in CASES else COMPILED
    return launched(case.world, tuple(other.name for other in alike if other.world == case.world))[case.name]


def mixture(job: Job, layer: int) -> ExpertsPart:
    block: BlockUnit = job.model.blocks[layer]
    return next(part for _, _, part in block.parts if isinstance(part, ExpertsPart))


def given_the_rows(job: Job, ranks: list[Recorded], rank: int, layer: int) -> dict[Line, Traffic]:
    """Return the traffic that this rank's ledger must contain for a block over all micro-batches, given the rows that
    were sent.
    """
    group = job.layout.group("ep", rank)
    found: dict[Line, Traffic] = {}
    for micro_batch in range(job.micro_batches):
        rows = [ranks[other].rows[layer][micro_batch] for other in group]
        recomputed = job.config.recompute.blocks > 0
        stated = dispatch_traffic(mixture(job, layer), job.at, job.batch, rows, recomputed)
        for line, traffic in stated[group.index(rank)].items():
            found[line] = found.get(line, Traffic()).plus(traffic)
    return found


CHOSEN = [pytest.param(case, marks=[] if case.name in QUICK else [pytest.mark.wide], id=case.name) for case in ALL]


@pytest.mark.parametrize("case", CHOSEN)
def test_given_the_rows_the_bytes_are_exact(case: Case) -> None:
    job, ranks = job_of(case.config, case.world), recorded(case)
    assert any(seen.lines for seen in ranks), "something was sent"
    for rank, seen in enumerate(ranks):
        assert set(seen.rows) == set(seen.lines)
        for layer, lines in seen.lines.items():
            assert lines == given_the_rows(job, ranks, rank, layer), (rank, layer)


@pytest.mark.parametrize("case", CHOSEN)
def test_calls_and_payloads_are_known_before(case: Case) -> None:
    """Ranks return as many results as rows arrived, so only the payloads of all ranks together are known. With a
    capacity the bytes on the wire are known too.
    """
    ranks = recorded(case)
    ran: dict[Line, Traffic] = {}
    for rank, seen in enumerate(ranks):
        planned = predict_rank(case.config, case.world, rank)
        mine: Counter[Line] = Counter()
        for lines in seen.lines.values():
            for line, traffic in lines.items():
                mine[line] += traffic.calls
                ran[line] = ran.get(line, Traffic()).plus(traffic)
        assert mine == {line: traffic.calls for line, traffic in planned.items() if over_ep(line.axis)}
    planned = {line: each for line, each in predict_detail(case.config, case.world).items() if over_ep(line.axis)}
    assert {line: each.payload_bytes for line, each in ran.items()} == {
        line: each.payload_bytes for line, each in planned.items()
    }
    if case.config.model.experts.capacity is not None:
        assert ran == planned


def random_routers(rank: int, world: int, layouts: list[dict[str, Any]], seeds: int) -> list[list[int]]:
    from tests.support.oracle import Made, make_trainer

    def wire(config: Config) -> int:
        data = Made(config.model.vocab, config.model.seq)
        sent: int = make_trainer(config, rank, world, data).step().comm["ep"]["wire_bytes"]
        return sent

    return [[wire(many_tokens(layout, seed)) for seed in range(seeds)] for layout in layouts]


def many_tokens(layout: dict[str, Any], seed: int) -> Config:
    experts = {"count": 8, "top_k": 2, "ffn": 8}
    model = {**LLAMA, "layers": 2, "seq": 256, "hidden": 16, "heads": 2, "vocab": 512, "experts": experts}
    train = {"micro_batch": 4, "global_batch": 64, "precision": "fp32", "seed": seed, "compile": False}
    return small_config(model=model, layout=layout, train=train)


@pytest.mark.wide
@pytest.mark.parametrize("world", [2, 4])
def test_balanced_experts_send_what_random_routers_send(world: int) -> None:
    layouts = [{"ep": world}, {"tp": 2, "ep": world, "etp": 1, **SP}]
    for layout, found in zip(layouts, run_ranks(world, random_routers, layouts, 2)[0], strict=True):
        detail = predict_detail(many_tokens(layout, 0), world)
        planned = sum(traffic.wire_bytes for line, traffic in detail.items() if line.axis == "ep")
        mean = sum(found) / len(found)
        assert planned == pytest.approx(mean, rel=0.01), (layout, [each / planned for each in found])
        assert len({*found, planned}) > 1, "the routers are not balanced exactly"
