"""One rank of `meshwright comm savings`: it trains a few steps with every technique, together with the other ranks."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from meshwright.comm.flight import FlightRecord
from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import watchdog_for
from meshwright.config.comm import EmulateConfig
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.compression.making import begin_sum
from meshwright.engine.step import Trainer
from meshwright.lab.reducers import GatherToOne
from meshwright.lab.techniques import Figures, Technique, calibrate, with_links
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import Job
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import layout_of

FREE_GB_S = 1e6  # A rate at which links take practically no time.
# The steps before the timed ones. Buckets are reduced during backward from the second step on.
WARM_UP_STEPS = 2


def usual(times: Sequence[float]) -> float:
    """Return the first quartile. It is a robust minimum, because other work on a machine only makes steps longer."""
    return statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def make_trainer(config: Config, rank: int, world: int, device: Device, groups: dict[str, Any], naive: bool) -> Trainer:
    node_size = config.layout.node_size or world
    ctx = build_context(config, rank, world, device, node_size, groups, trains=True)
    reducer = GatherToOne() if naive else None
    data = RandomTokens(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data, reducer=reducer)


class TechniqueRun:
    """One technique's trainer, and the measurements of its steps. The techniques take turns, step by step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.times: list[float] = []
        self.waits: list[float] = []
        self.work: list[float] = []
        self.making: list[float] = []

    def step(self) -> None:
        """Train one step together with all ranks, and then make a step's compressed messages without sending them."""
        trainer, device = self.trainer, self.trainer.ctx.device
        trainer.ctx.mesh.world.max_over_ranks(0.0, device.torch)
        begin, worked = time.perf_counter(), device.work_seconds()
        trainer.step()
        self.work.append(device.work_seconds() - worked)
        self.times.append(time.perf_counter() - begin)
        self.waits.append(sum(trainer.ctx.ledger.waited.values()))
        self.sent = _sent_bytes(trainer)
        self.making.append(making_work(trainer))

    def slowest_median(self, values: Sequence[float]) -> float:
        """Return the usual value of the slowest rank."""
        return self.trainer.ctx.mesh.world.max_over_ranks(usual(values), self.trainer.ctx.device.torch)

    def figures(self) -> Figures:
        config = self.trainer.ctx.config
        step, exposed = self.slowest_median(self.times), self.slowest_median(self.waits)
        return Figures(self.sent, exposed, step, config.train.global_batch * config.model.seq / step)

    def making_seconds(self, own: TechniqueRun) -> float:
        """Return the seconds per step of making and reading compressed messages.

        Their processor time is scaled like a step's compute on the machine's `own` links, where ranks also share
        processors and wait for each other. The wall time of making messages is not used: it is a few milliseconds, and
        depends mostly on which rank happens to get a processor.
        """
        return self.slowest_median(self.making) * own.slowest_median(own.times) / own.slowest_median(own.work)


def measure(
    found: Sequence[Technique], rank: int, world: int, device: Device, steps: int, say: Callable[[str], None],
    own_world: bool = True,
) -> tuple[list[Figures], list[float], float]:  # fmt: skip
    """Return (each technique's figures, its seconds of making messages, the seconds of a step on the machine's real
    links), the same on every rank.

    The techniques take turns, step by step, so that other work on the machine affects all of them alike. `own_world`:
    Meshwright set up torch.distributed itself.
    """
    with ExitStack() as watching:
        turns = _ready(found, rank, world, device, say, own_world, watching)
        for _ in range(steps):
            for turn in turns:
                turn.step()
        figures = [turn.figures() for turn in turns]
        making = [turn.making_seconds(turns[-1]) for turn in turns]
    del turns
    gc.collect()
    return figures[:-1], making[:-1], figures[-1].step_s


def _ready(
    found: Sequence[Technique], rank: int, world: int, device: Device, say: Callable[[str], None], own_world: bool,
    watching: ExitStack,
) -> list[TechniqueRun]:  # fmt: skip
    """Return the trainers of all techniques, and last that of the machine's real links, without emulation. One watchdog
    watches the calls of all trainers, until `watching` ends."""
    turns: list[TechniqueRun] = []
    made: dict[Layout, dict[str, Any]] = {}
    flight: FlightRecord | None = None
    base = found[0].config
    own = Technique("own links", replace(base, comm=replace(base.comm, emulate=EmulateConfig())))
    for technique in (*found, own):
        layout = layout_of(technique.config, world, technique.config.layout.node_size or world)
        if layout not in made:  # torch never frees process groups, so each is made once.
            timeout = technique.config.comm.timeout
            mesh = Mesh(layout, rank, timeout=timeout)
            made[layout] = {name: group.process_group for name, group in mesh.groups.items() if not group.alone}
            flight = flight or watching.enter_context(watchdog_for(mesh, timeout, device, own_world)).flight
        naive = isinstance(technique.reducer, GatherToOne)
        turns.append(TechniqueRun(make_trainer(technique.config, rank, world, device, made[layout], naive)))
        assert flight is not None
        turns[-1].trainer.ctx.mesh.use_flight(flight)
        for _ in range(WARM_UP_STEPS):
            turns[-1].trainer.step()
        say(f"{technique.name} is ready")
    return turns


def _sent_bytes(trainer: Trainer) -> dict[str, float]:
    """Return the bytes that a rank sent in the last step, by axis, averaged over all ranks."""
    axes = trainer.ctx.layout.step_groups()
    sums = Counter[str]()
    for entry, totals in trainer.ctx.ledger.entries.items():
        sums[entry.axis] += totals.wire_bytes
    names = sorted({trainer.ctx.layout.without_ones(axis) for axis in axes})
    counts = torch.tensor([sums[name] for name in names], dtype=torch.float64)
    trainer.ctx.mesh.world.all_reduce(counts)
    return {name: float(count) / trainer.ctx.layout.world for name, count in zip(names, counts, strict=True) if count}


def own_compute(job: Job, measured_s: float, cluster: Cluster) -> Cluster:
    """Return the cluster with compute rates calibrated to this machine.

    `measured_s` is the time of a step on the machine's real links. It is compared with the planned time of a step whose
    communication is free, so the real links must be much faster than the emulated ones.
    """
    fast = EmulateConfig(link_gb_s=FREE_GB_S, network_gb_s=FREE_GB_S)
    return calibrate(cluster, predict_cost(job, with_links(cluster, fast, job.node_size)).step_s, measured_s)


def making_work(trainer: Trainer) -> float:
    """Return a rank's work per step to make and read compressed messages, as `Device.work_seconds` counts it.

    The planner does not know this work. It is measured without sending, while all ranks do the same.
    """
    parallel, ctx = trainer.data_parallel, trainer.ctx
    reducer = parallel.reducer
    if not ctx.config.comm.reduce.facts.compresses or not reducer.mixes:
        return 0.0
    buckets = [bucket for bucket in parallel.buckets if bucket.buffer.key.compressed]
    # Draw the gradients before the clock starts: in a real step, backward provides them.
    drawn = [torch.randn_like(bucket.own_grads.new_empty(bucket.stop - bucket.start)) for bucket in buckets]
    ctx.mesh.world.max_over_ranks(0.0, ctx.device.torch)
    begin, pendings = ctx.device.work_seconds(), []
    for bucket, grads in zip(buckets, drawn, strict=True):
        pendings.append(begin_sum(reducer, bucket, grads, *parallel.groups(bucket.buffer), links=False))
    for pending in pendings:
        pending.wait()
    times_per_step = trainer.micro_batches if ctx.config.zero.stage >= 2 else 1
    return (ctx.device.work_seconds() - begin) * times_per_step
