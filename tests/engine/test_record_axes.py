"""The axes of a record decide its sums: dense parameters over dp, experts over edp, at every ZeRO stage.

The model is a linear layer and a few experts that are divided over ep. Each ep group gathers its tokens, so that an
expert sees all tokens routed to it. One process is the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.comm.group import Group
from meshwright.device import Device
from meshwright.engine.context import Context, build_context
from meshwright.engine.step import Trainer
from meshwright.nn.unit import call_unit
from meshwright.plan import communication
from meshwright.plan.communication import Line, Traffic
from meshwright.plan.held import HeldParameter, buffers_of
from meshwright.plan.job import job_of
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Init, ParamRecord, rows_of, whole
from meshwright.spec.traffic.counts import counts_bytes
from meshwright.watch.run_parts import schedule_line
from tests.support.oracle import (
    EXACT,
    gather_global,
    load_into,
    moments,
    parameters,
    relative,
    small_config,
    true_gradients,
    worst,
)  # fmt: skip
from tests.support.ranks import run_ranks

WIDTH, EXPERTS, SEQ = 6, 4, 4
BUCKET_MIB = 1e-4
STEPS = 2


class Vectors:
    """Samples of a few random vectors, each with the expert that it is routed to."""

    def sample(self, n: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([3, n])
        return {"x": random.normal(size=(SEQ, WIDTH)), "expert": random.integers(0, EXPERTS, SEQ)}


def dense_record() -> ParamRecord:
    return whole("dense", (WIDTH, WIDTH), Init("normal", 0.3), copies=("tp",))


def expert_record(ep: int, index: int) -> ParamRecord:
    """Return the record of the experts' matrices, which are stacked by rows. An ep rank holds a contiguous range of
    them.
    """
    rows = EXPERTS * WIDTH // ep
    return rows_of(
        "experts", ((index * rows, rows, 0),), EXPERTS * WIDTH, (WIDTH,), Init("normal", 0.3), data_axes="edp",
    )  # fmt: skip


class Gathered(torch.autograd.Function):
    """An all-gather of the ep ranks' rows. Its backward sums the gradients that all ranks computed for this rank's
    rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
        group.all_gather(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] // ctx.group.size, *grad.shape[1:])
        ctx.group.reduce_scatter(out, grad.contiguous())
        return out, None


class Scattered(torch.autograd.Function):
    """A reduce-scatter: this rank's rows of the sum over all ep ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
        group.reduce_scatter(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] * ctx.group.size, *grad.shape[1:])
        ctx.group.all_gather(out, grad.contiguous())
        return out, None


class Dense(nn.Module):
    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.weight = ctx.parallel.parameter(dense_record())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Experts(nn.Module):
    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.group = ctx.mesh.group("ep")
        self.weight = ctx.parallel.parameter(expert_record(self.group.size, self.group.index))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = Gathered.apply(x, self.group)
        all_chosen = chosen.new_empty(x.shape[0])
        self.group.all_gather(all_chosen, chosen)
        first = self.group.index * (EXPERTS // self.group.size)
        out = torch.zeros_like(x)
        for number, weight in enumerate(self.weight.view(-1, WIDTH, WIDTH)):
            out = out + (x @ weight) * (all_chosen == first + number)[:, None]
        return Scattered.apply(out, self.group)


class Model(nn.Module):
    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.receives: dict[str, Any] = {}
        self.parallel = ctx.parallel
        self.dense, self.experts = Dense(ctx), Experts(ctx)

    def units(self) -> list[nn.Module]:
        return [self.dense, self.experts]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = call_unit(self.dense, batch["x"].flatten(0, 1))
        return (x + call_unit(self.experts, x, batch["expert"].flatten())).pow(3).sum()


def trainer_of(rank: int, world: int, ep: int, stage: int, **more: Any) -> Trainer:
    config = small_config(
        layout={"ep": ep}, zero={"stage": stage}, comm={"bucket_mib": BUCKET_MIB},
        model={"seq": SEQ, "hidden": WIDTH, "heads": 1},
    )  # fmt: skip
    ctx = build_context(config, rank, world, Device("cpu"), trains=True)
    step = lambda ctx, module, batch, received: (module(batch), batch["expert"].numel(), {})  # noqa: E731
    return Trainer(ctx, build_modules(ctx, lambda ctx, stage: Model(ctx)), step, Vectors(), **more)


def lines_of(trainer: Trainer) -> dict[Line, Traffic]:
    """Return the ledger of the last step for gradients, weights, and the vector of metrics."""
    found: dict[Line, Traffic] = {}
    for entry, tally in trainer.ctx.ledger.entries.items():
        if entry.phase in ("reduce", "gather", "metrics"):
            line = Line(entry.phase, entry.axis, entry.op)
            found[line] = found.get(line, Traffic()).plus(Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes))
    return found


def planned(trainer: Trainer) -> dict[Line, Traffic]:
    """Return the planned traffic of the same records."""
    layout, config = trainer.ctx.layout, trainer.ctx.config
    params = [HeldParameter(dense_record(), "fp64", 0), HeldParameter(expert_record(layout.ep, 0), "fp64", 1)]
    buffers = buffers_of(params, layout, BUCKET_MIB, config.zero)
    calls = [
        *communication.expand_calls(
            communication.bucket_calls(params, buffers, layout, config.zero, trainer.micro_batches)
        ),
        communication.RepeatedCall(
            "metrics",
            "metrics",
            "world",
            "all_reduce",
            layout.world,
            counts_bytes(len(layout.step_groups()), layout.world),
        ),
    ]
    return communication.by_line(call for call in calls if call.size > 1)


def copied(pairs: Any) -> Any:
    return [(record, value.clone()) for record, value in pairs]


def train(rank: int, world: int, cases: list[tuple[int, int]], folder: str) -> list[Any]:
    """Train every (ep, stage). Return gradients, norms, parameters, moments, the recorded and the planned traffic, and
    the norms of one more step. The first case is saved, and every case resumes from that checkpoint for this step.
    """
    found = []
    for number, (ep, stage) in enumerate(cases):
        trainer = trainer_of(rank, world, ep, stage)
        gradients = true_gradients(trainer)
        norms = [trainer.step().grad_norm for _ in range(STEPS)]
        lines = lines_of(trainer)
        if number == 0:
            saver = Saver(trainer, Path(folder), asynchronous=False, busy="wait", keep=0)
            saver.save()
            saver.wait_for_commit()
        after, states = copied(parameters(trainer)), copied(moments(trainer))
        loaded = trainer_of(rank, world, ep, stage)
        load_into(loaded, Reader(Path(folder) / f"step-{STEPS:08d}"))
        resumed_norms = [loaded.step().grad_norm, trainer.step().grad_norm]
        found.append((gradients, norms, after, states, lines, planned(trainer), resumed_norms))
    return found


# (ep, stage). With ep=4 edp has a single rank.
CASES = [(2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3), (1, 2)]


@pytest.mark.wide
def test_experts_are_summed_over_their_own_axes(tmp_path: Path) -> None:
    oracle = trainer_of(0, 1, 1, 0)
    gradients = gather_global(true_gradients(oracle))
    norms = [oracle.step().grad_norm for _ in range(STEPS)]
    after, states = gather_global(parameters(oracle)), gather_global(moments(oracle))
    next_norm = oracle.step().grad_norm
    assert len(gradients) == 2 and min(float(np.abs(g).min()) for g in gradients.values()) > 0
    for rank in run_ranks(4, train, CASES, str(tmp_path)):
        for case, (found, own_norms, own, own_states, lines, plan, resumed_norms) in zip(CASES, rank, strict=True):
            assert worst(found, gradients)[0] <= EXACT, case
            assert relative(own_norms, norms) <= EXACT, case
            assert worst(own, after)[0] <= EXACT, case
            assert worst(own_states, states)[0] <= EXACT, case
            assert relative(resumed_norms, [next_norm] * 2) <= EXACT, case
            assert lines == plan, case


def test_ranks_along_cp_read_the_same_samples() -> None:
    """So each rank runs as many micro-batches as dp alone implies."""
    config = small_config(layout={"cp": 2, "tp": 2}, train={"global_batch": 16})
    layout = Layout(8, tp=2, cp=2)
    assert job_of(config, 8).micro_batches == 8
    assert "8 micro-batches" in schedule_line(config, layout)
    assert {"cp", "dp", "cp-dp"} <= set(layout.step_groups())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_groups_of_a_step_are_those_the_planner_counts(stage: int) -> None:
    """This also holds if a group is created later: it is no axis of the metrics."""
    layout = Layout(4, ep=2)
    assert layout.step_groups() == ["dp", "edp", "embedding", "ep", "pp", "tp", "world"]
    assert replace(layout, ep=1).step_groups() == ["dp", "embedding", "pp", "tp", "world"]
    assert [replace(layout, ep=1).without_ones(name) for name in ("edp", "tp-edp")] == ["dp", "dp"]
    trainer = trainer_of(0, 1, 1, stage)
    trainer.ctx.mesh.group("tp-pp")
    assert trainer.step().comm == {}
