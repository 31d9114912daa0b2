"""Predicts the time of one training step. No torch.

The time is made up of compute by stage, the pipeline bubble, exposed communication by axis, and the optimizer.
docs/planner.md has the formulas and the source of every constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from meshwright.config.memory import Place
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import Traffic, crossings, mean_traffic, passed_bytes
from meshwright.plan.compute import Setting, setting_of, unit_time
from meshwright.plan.efficiency import collective_seconds, wait_seconds
from meshwright.plan.flops import model_flops, recomputed_flops
from meshwright.plan.held import unit_records
from meshwright.plan.job import Job, ranks_per_node, senders_across
from meshwright.plan.matrices import matrix_seconds
from meshwright.plan.memory import Memory, buffer_sizes, largest, rank_parameters
from meshwright.plan.reduction import (
    AxisTime,
    RankSums,
    StageCost,
    outer_seconds,
    reduce_seconds,
    sharded_seconds,
)
from meshwright.plan.stack import States
from meshwright.plan.switches import adapter_rate_left
from meshwright.spec.schedule.kinds import KINDS, build, compute_table
from meshwright.spec.schedule.simulate import Simulation, simulate
from meshwright.spec.schedule.table import PhaseTimes, Table
from meshwright.spec.traffic.placement import DEFAULT_UPDATE, UpdateKind

# The largest schedule table, in computes, that is simulated. Larger ones use the closed formula.
LARGEST_SIMULATED = 12_000
NORM_BYTES = 4  # The grad norm reads the gradients in a separate pass, in addition to the update's traffic.
JITTER = 0.005  # A step waits for its slowest node: the share of its time lost per doubling of the nodes.
STEP_CALLS = 2  # Small all_reduces over all ranks per step: loss and grad norm, and the counts.
TIMED_AXES = ("tp", "cp", "ep", "etp", "dp", "edp", "pp", "embedding", "replicas")
STEP_FLOOR = 2e-3  # Seconds per step that nothing else here models: the host's loop, data, logging.

RankTimes = tuple[PhaseTimes, ...]  # The times of a rank's chunks.
ChunkTimes = tuple[RankTimes, ...]  # Indexed by [pipeline rank][chunk].


@dataclass(frozen=True)
class Cost:
    """The predicted time of one step and its parts."""

    job: Job
    cluster: Cluster
    step_s: float
    compute_s: float  # Of the busiest pipeline rank, for all micro-batches, without communication.
    bubble: float  # The idle share of the pipeline's time, averaged over its ranks.
    bubble_s: float
    idle_s: float  # Of the busiest pipeline rank.
    optimizer_s: float
    axes: dict[str, AxisTime]
    stages: tuple[StageCost, ...]
    simulated: bool
    chunk_times: ChunkTimes = field(repr=False, default=())
    send_s: float = 0.0
    # The part of the bubble in which ranks wait for the gradient norm of all stages: with a zero-bubble schedule they
    # end one after the other, and would begin their next step so. 0 if the table was not simulated.
    barrier_s: float = 0.0

    @property
    def tokens_per_s_device(self) -> float:
        return self.job.tokens / self.step_s / self.job.world

    @property
    def _peak(self) -> float:
        """The FLOPs that all devices could compute in the step at their peak rate."""
        return self.cluster.device.rate(self.job.config.train.precision) * self.job.world * self.step_s

    @property
    def mfu(self) -> float:
        """The model FLOPs (full attention, nothing recomputed) divided by the devices' peak FLOPs in that time."""
        return model_flops(self.job.config.model, self.job.tokens) / self._peak

    @property
    def hfu(self) -> float:
        """The model FLOPs utilisation with recomputed FLOPs counted as well."""
        c = self.job.config
        return self.mfu + recomputed_flops(c.model, self.job.tokens, c.recompute.mode) / self._peak

    @cached_property
    def memory(self) -> Memory:
        """The memory of the pipeline rank with the highest peak."""
        return largest(self.job)

    @cached_property
    def traffic(self) -> dict[str, Traffic]:
        """The calls and bytes per step by axis, for a rank with the highest memory peak."""
        return mean_traffic(self.job, self.memory.pp_rank)


def predict_cost(job: Job, cluster: Cluster, exact: bool = True, largest: int = LARGEST_SIMULATED) -> Cost:
    """Predict the time of a step.

    With `exact`, the pipeline is timed by its schedule table if that has at most `largest` computes.
    """
    where = setting_of(job, cluster)
    axes = {name: AxisTime() for name in TIMED_AXES}
    sums = {rank: RankSums(job, cluster, rank) for rank in _ranks_with_sums(job)}
    chunk_times, stages = _stages(job, where, sums, axes)
    send = _send_seconds(job, cluster)
    time = _pipeline_time(job, chunk_times, send, largest if exact else 0)
    pipeline = time.seconds
    sends = job.micro_batches * max(sum(map(sum, crossings(job, rank))) for rank in range(job.layout.pp))
    axes["pp"].add(sends * send, sends * send * job.hides_sends)
    ranks, slow = set(job.representative_ranks), _largest_rank(job)
    reduce = reduce_seconds(job, cluster, stages[slow], sums[slow], axes)
    reduce += outer_seconds(job, cluster, pipeline, axes)
    optimizer = max(_optimizer_seconds(job, cluster, rank) for rank in ranks) + matrix_seconds(job, cluster)
    compute = job.micro_batches * max(_compute_only(job, where, rank) for rank in ranks)
    # Nodes vary in speed, and all of them wait for the slowest.
    jitter = 1.0 + JITTER * math.log2(max(1.0, job.world / job.node_size))
    step = (pipeline + reduce + optimizer) * jitter + STEP_FLOOR
    step += STEP_CALLS * wait_seconds(cluster) if job.world > 1 else 0.0
    return Cost(
        job, cluster, step, compute, time.bubble, time.bubble * pipeline, time.idle, optimizer,
        {name: axis for name, axis in axes.items() if axis.seconds}, stages, time.simulated, chunk_times,
        send * (1 - job.hides_sends) if job.layout.pp > 1 else 0.0, time.barrier,
    )  # fmt: skip


def _largest_rank(job: Job) -> int:
    """Return the pipeline rank with the most parameters, whose gradient reductions take longest."""
    return max(dict.fromkeys(job.representative_ranks), key=lambda rank: rank_parameters(job, rank))


def _ranks_with_sums(job: Job) -> set[int]:
    """Return the pipeline ranks whose gradient reductions are timed.

    From ZeRO stage 2 on, every micro-batch has some, so they are part of each stage's time.
    """
    return {_largest_rank(job), *(job.representative_ranks if job.config.zero.stage >= 2 else ())}


def _stages(
    job: Job, where: Setting, sums: dict[int, RankSums], axes: dict[str, AxisTime]
) -> tuple[ChunkTimes, tuple[StageCost, ...]]:
    """Return the forward and backward seconds of one micro-batch by [pipeline rank][chunk], and their sums.

    The seconds of the rank that communicates longest are added to each axis.
    """
    made = {rank: _stage(job, where, rank, sums.get(rank)) for rank in dict.fromkeys(job.representative_ranks)}
    for name, axis in axes.items():
        longest = max((inside.get(name, AxisTime()) for _, _, inside in made.values()), key=lambda each: each.seconds)
        axis.add(longest.seconds, longest.hidden)
    ranks = job.representative_ranks
    return tuple(made[rank][0] for rank in ranks), tuple(made[rank][1] for rank in ranks)


def _stage(
    job: Job, where: Setting, pp_rank: int, sums: RankSums | None
) -> tuple[RankTimes, StageCost, dict[str, AxisTime]]:
    """Return the times of one pipeline rank's chunks, their sums, and the communication inside its units."""
    m, flops = job.micro_batches, 0.0
    times: list[PhaseTimes] = []
    inside = {name: AxisTime() for name in TIMED_AXES}
    blocks = sum(len(stage.layers) for stage in job.chunks[pp_rank])
    extra = sharded_seconds(job, where, pp_rank, sums, inside) if sums is not None else (0.0, 0.0)
    for stage in job.chunks[pp_rank]:
        # A rank that holds an end of the model reads the batch, in one small broadcast over tp.
        reads = stage.first or (stage.last and not job.chunks[pp_rank][0].first)
        read = wait_seconds(where.cluster) * (reads and job.layout.tp > 1)
        inside["tp"].add(m * read)
        own = len(stage.layers) / max(1, blocks)
        forward = read + own * extra[0]
        backward = own * extra[1]
        weights = 0.0
        for unit, count in job.units(stage):
            t, adding = unit_time(unit, where), 0.0
            if unit.stackable and m > 1:
                # Adding a weight gradient to the sum over micro-batches reads and writes the sum.
                trained = sum(record.numel for record in unit_records(unit, job.at) if record.trained)
                adding = trained * job.stack.accumulate / where.cluster.memory_rate
            forward += count * t.whole_forward
            backward += count * (t.whole_backward + adding)
            weights += count * (t.weights + adding)
            flops += count * t.flops
            for use in t.axes:
                inside[use.axis].add(count * m * (use.forward + use.backward + use.hidden), count * m * use.hidden)
        times.append(PhaseTimes(forward, backward, weights))
    whole = together(times)
    return tuple(times), StageCost(whole.forward, whole.backward, flops, rank_parameters(job, pp_rank)), inside


def together(times: Iterable[PhaseTimes]) -> PhaseTimes:
    """Return the summed times of a rank's chunks."""
    return PhaseTimes(*(sum(each) for each in zip(*times, strict=True)))


def _compute_only(job: Job, where: Setting, pp_rank: int) -> float:
    """Return the compute seconds of one micro-batch on a pipeline rank."""
    return sum(count * unit_time(unit, where).compute_seconds for unit, count in job.rank_units(pp_rank))


def _send_seconds(job: Job, cluster: Cluster) -> float:
    """Return the seconds for sending one micro-batch's activations to the next stage."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    passed = max(sum(passed_bytes(job, stage)) for stages in job.chunks for stage in stages)
    payload = passed / (layout.tp if job.scatters_sends else 1)
    ranks = [rank for rank, _ in job.placement]
    away = senders_across(layout, (layout.pp - 1, 0) in pairwise(ranks))
    # The ranks that send to another node do so at the same time, each with its share of the node's adapters.
    share = min(1.0, away / cluster.node.devices) if away else 1.0
    left = adapter_rate_left(cluster, job, "pp", "send")
    seconds = collective_seconds(cluster, "send", payload * share, 2, 1 if away else 2, left)
    if job.scatters_sends:
        on_node = ranks_per_node(layout, "tp")
        seconds += collective_seconds(cluster, "all_gather", payload * layout.tp, layout.tp, on_node)
    return seconds


class PipelineTime(NamedTuple):
    """The time of the pipeline, and its idle parts. An exposed send is not idle time."""

    seconds: float  # From the first forward to the last backward or, without a barrier, to the next step's forward.
    bubble: float  # The idle share of all ranks.
    idle: float  # The idle seconds of the busiest rank.
    barrier: float  # The seconds that ranks wait for the last one before the update.
    simulated: bool


def _pipeline_time(job: Job, times: ChunkTimes, send: float, largest: int) -> PipelineTime:
    """Return the time of the pipeline, by its table if that has at most `largest` computes."""
    pp, m, chunks = job.layout.pp, job.micro_batches, job.config.layout.chunks
    blocked = send * (1 - job.hides_sends)
    times = blocked_times(job, times, blocked)
    ranks = [together(row) for row in times]
    busy = [m * rank.whole for rank in ranks]
    if pp == 1:
        return PipelineTime(busy[0], 0.0, 0.0, 0.0, True)
    closed = KINDS[job.config.pipeline.schedule].seconds
    simulated = pp * m * chunks * 2 <= largest or closed is None
    barrier = 0.0
    if closed is not None and not simulated:
        longest = closed(ranks, m, chunks)
    else:
        # Beyond the largest table, more micro-batches repeat the steady state, which the slowest rank fills.
        few = min(m, max(2 * pp, largest // (pp * chunks * 2)) // pp * pp + m % pp)
        simulation = _simulated(job, times, blocked, few)
        barrier = simulation.makespan - max(simulation.active)
        longest = simulation.makespan + (m - few) * max(rank.whole for rank in ranks)
    if not job.stack.update_waits:
        longest, barrier = longest - barrier, 0.0
    return PipelineTime(
        longest, 1.0 - sum(busy) / (pp * longest), max(0.0, longest - max(busy)), barrier, simulated
    )  # fmt: skip


def blocked_times(job: Job, times: ChunkTimes, blocked: float, slow: dict[int, float] | None = None) -> ChunkTimes:
    """Return the chunks' times, including the sends that block their sender.

    `slow` maps slow ranks to the share of their speed that is left.
    """
    speed = slow or {}
    return tuple(
        tuple(
            PhaseTimes(
                each.forward / speed.get(rank, 1.0) + sends[0] * blocked,
                each.backward / speed.get(rank, 1.0) + sends[1] * blocked, each.weights / speed.get(rank, 1.0),
            )
            for each, sends in zip(row, crossings(job, rank), strict=True)
        )
        for rank, row in enumerate(times)
    )  # fmt: skip


def _simulated(job: Job, times: ChunkTimes, blocked: float, micro_batches: int) -> Simulation:
    """Simulate the computes of the schedule's table. Each exposed send takes `blocked` more seconds."""
    c = job.config
    table = compute_table(c.pipeline.schedule, c.layout.pp, micro_batches, c.layout.chunks)
    return _simulate_chunks(table, times, blocked)


def timeline_of(job: Job, times: ChunkTimes, blocked: float) -> Simulation:
    """Simulate the schedule's table, including transfers."""
    c = job.config
    return _simulate_chunks(build(c.pipeline.schedule, c.layout.pp, job.micro_batches, c.layout.chunks), times, blocked)


def _simulate_chunks(table: Table, times: ChunkTimes, blocked: float) -> Simulation:
    def of(phase: int) -> Callable[[int, int], float]:
        return lambda rank, chunk: times[rank][chunk][phase]

    return simulate(table, of(0), of(1), blocked, of(2))


def _optimizer_seconds(job: Job, cluster: Cluster, pp_rank: int) -> float:
    """Return the seconds of the update, in which all states are read and written once.

    The states move at the rate of the device's memory or, if they are offloaded, at that of the host's CPUs.
    """
    mine = [(sum(one.buckets) / one.shards, one.update) for one in buffer_sizes(job, pp_rank) if one.trained]
    if job.states.optimizer_at is not Place.DEVICE:
        return sum(size for size, _ in mine) * min(job.node_size, job.world) / cluster.node.host_params_s
    return sum(size * optimizer_bytes(job.states, update) for size, update in mine) / cluster.optimizer_rate


def optimizer_bytes(s: States, update: UpdateKind = DEFAULT_UPDATE) -> float:
    """Return the bytes per parameter that the update, and the grad norm before it, read and write.

    With master weights, the weights are written, and also read if they are one half of the masters. Without masters,
    they are read and written. A rule of whole matrices has a pass more, which replaces the gradients.
    """
    weights = 2 * s.master + (1 + s.paired) * s.param if s.master else 2 * s.param
    return s.grad + NORM_BYTES + weights + 2 * (sum(s.of_rule(update)) + s.grad * update.matrices)
