"""The seconds of data parallelism in a step, and how many are hidden: gradients reduced, weights gathered. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.engine.sharding.algorithms import AlgorithmReducer, GatherToOne
from meshwright.engine.sharding.compression.sizes import gathered_bytes
from meshwright.engine.sharding.server import ServerReducer
from meshwright.plan.algorithms import algorithm_seconds, gather_to_one_seconds
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import round_calls
from meshwright.plan.compute import Setting, unit_time
from meshwright.plan.efficiency import collective_seconds
from meshwright.plan.held import records_once, unit_records
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.stack import Stack
from meshwright.spec.layout.grid import GRID_AXES
from meshwright.spec.layout.layout import REPLICAS
from meshwright.spec.layout.params import DATA_AXES
from meshwright.spec.model.experts import EXPERT_DATA_AXES
from meshwright.spec.model.part import Coordinate, Unit
from meshwright.spec.traffic.placement import copy_axis, may_be_mixed, shard_axes


@dataclass
class AxisTime:
    """The seconds that one rank spends on one axis in one step, and how many of them are hidden behind compute."""

    seconds: float = 0.0
    hidden: float = 0.0

    def add(self, seconds: float, hidden: float = 0.0) -> None:
        self.seconds += seconds
        self.hidden += hidden

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden


@dataclass(frozen=True)
class StageCost:
    """The cost of one pipeline rank and one micro-batch: the seconds of all its chunks, and the forward FLOPs."""

    forward: float
    backward: float
    flops: float
    params: int  # on one rank
    trained: int  # of these, those that have gradients
    trained_experts: int = 0  # and of those, the ones that are summed and divided over edp


@dataclass(frozen=True)
class Divided:
    """The ranks that sum the gradients of some parameters, and how many of them divide their states."""

    axis: str  # under which their time is counted
    ranks: int
    stage: int  # of ZeRO
    shards: int
    copies: int
    on_node: int  # of the ranks that divide, or else of those that sum


def contention(cluster: Cluster, stack: Stack) -> float:
    """Returns the share of a hidden collective's time that concurrent compute loses."""
    return max(stack.contention, cluster.efficiency.contention)


def divided(job: Job, axes: str) -> Divided:
    """Returns how the parameters that are summed over these axes are divided."""
    layout, found = job.layout, job.known.get(("divided", axes, job.config.zero))
    if found is None:
        stage, shards, replicas = shard_axes(layout, job.config.zero, axes)
        name = layout.without_ones(axes)
        ranks, size = layout.size(axes), layout.size(shards) if shards else 1
        on_node = min(size if stage else ranks, ranks_per_node(layout, name))
        counted = "edp" if name == "edp" else "dp"
        copies = layout.size(replicas) if replicas else 1
        found = Divided(counted, ranks, stage, size, copies, on_node)
        job.known["divided", axes, job.config.zero] = found
    answer: Divided = found
    return answer


@lru_cache(maxsize=20_000)
def unit_parameters(unit: Unit, at: Coordinate, trained: bool) -> tuple[int, int]:
    """Returns the parameters of a unit on one rank, all or those that are `trained`: of experts, and all others. Bytes
    that stand for weights count as so many elements of 16 bits."""
    sizes = [(record.data_axes == EXPERT_DATA_AXES, record.numel // (2 if record.packs else 1))
             for record in unit_records(unit, at) if record.trained or not trained]  # fmt: skip
    return sum(numel for expert, numel in sizes if expert), sum(numel for expert, numel in sizes if not expert)


def trained_experts(job: Job, pp_rank: int) -> int:
    """Returns the trained parameters of experts on a rank of this pipeline stage."""
    return sum(count * unit_parameters(unit, job.at, True)[0] for unit, count in job.rank_units(pp_rank))


def by_division(job: Job, experts: int, others: int) -> Iterator[tuple[Divided, int]]:
    """Yields these numbers of parameters with how they are divided, where several ranks share them. Experts that are
    divided like everything else count with it."""
    usual = divided(job, DATA_AXES)
    own = divided(job, EXPERT_DATA_AXES) if experts else usual
    pairs = [(usual, others + experts)] if own == usual else [(usual, others), (own, experts)]
    yield from ((how, count) for how, count in pairs if how.ranks > 1 and count)


def sharded_block(job: Job, where: Setting, block: Unit, count: int, axes: dict[str, AxisTime]) -> tuple[float, float]:
    """Returns the exposed seconds per block and micro-batch that sharded weights and gradients add to forward and
    backward; `axes` get the seconds of `count` blocks and all micro-batches."""
    zero = job.config.zero.stage
    if zero < 2:
        return 0.0, 0.0
    cluster, stack, pieces = where.cluster, where.stack, where.stack.gathers
    # Blocks that are recomputed together gather the weights of all but the last once more.
    again = 1.0 - 1.0 / max(1, job.config.recompute.blocks) if zero == 3 else 0.0
    time, times, slowed = unit_time(block, where), count * job.micro_batches, contention(cluster, stack)
    forward, backward, room = 0.0, 0.0, [time.forward, time.backward + time.again]
    graded = dict(by_division(job, *unit_parameters(block, job.at, True)))
    for how, params in by_division(job, *unit_parameters(block, job.at, False)):
        reduce = sum_seconds(job, cluster, "reduce_scatter", graded.get(how, 0), how, [(block, 1)])
        first, later = gather_seconds(job, cluster, params, how, pieces) if zero == 3 else (0.0, 0.0)
        comm = (first, (1 + again) * later + reduce)
        hides = job.hides_weights
        could = (hides * first, (1 + again) * hides * later + hides_sum(job, "reduce_scatter", params, how) * reduce)
        hidden = [min(each, left) for each, left in zip(could, room, strict=True)]
        axes[how.axis].add(times * sum(comm), times * sum(hidden))
        room = [left - each for left, each in zip(room, hidden, strict=True)]
        forward += comm[0] - hidden[0] + slowed * hidden[0]
        backward += comm[1] - hidden[1] + slowed * hidden[1]
    return forward, backward


def gather_seconds(job: Job, cluster: Cluster, params: int, how: Divided, pieces: int) -> tuple[float, float]:
    """Returns the seconds of gathering so many weights in stage 3 for forward, as the mean over micro-batches, and for
    backward. Where nodes keep a copy, only a step's first gather crosses them."""
    element, c = job.states.param, job.config
    fetched = gathered_bytes(c.comm.gather, params, element, how.shards)
    across = pieces * collective_seconds(cluster, "all_gather", fetched / pieces, how.shards, how.on_node)
    axis = copy_axis(job.layout, c.zero, c.comm.gather, how.axis)
    if axis is None:
        return across, across
    node, m = job.layout.size(axis), job.micro_batches
    inside = pieces * collective_seconds(cluster, "all_gather", params * element / pieces, node, node)
    return (across + (m - 1) * inside) / m, inside


def reduce_seconds(job: Job, cluster: Cluster, stages: tuple[StageCost, ...], axes: dict[str, AxisTime]) -> float:
    """Returns the exposed seconds per step of reducing gradients and gathering weights."""
    slow = max(range(job.layout.pp), key=lambda rank: stages[rank].params)
    stage, exposed, taken = stages[slow], 0.0, 0.0
    for how, params in by_division(job, stage.trained_experts, stage.trained - stage.trained_experts):
        before = axes[how.axis].hidden
        exposed += _reduced(job, cluster, stage, slow, how, params, axes[how.axis], taken)
        if how.stage >= 2:
            exposed += _sharded_rest(job, cluster, stage, slow, how, params, axes[how.axis])
        if how.stage and how.copies > 1:  # the replicas on other nodes are summed once per step
            seconds = sum_seconds(job, cluster, "copies", params, how, job.rank_units(slow))
            could = job.hides_gradients * seconds
            exposed += _hide(job, cluster, seconds, could, stage.backward, axes[how.axis])
        taken += axes[how.axis].hidden - before
    seconds = _grid_copies_seconds(job, cluster, slow)
    axes["tp"].add(seconds)
    exposed += seconds
    tied = job.layout.size("embedding") if job.model.tied else 1
    if tied > 1:
        table = max(record.numel for record in unit_records(job.model.head, job.at)) * job.states.grad
        on_node = ranks_per_node(job.layout, "embedding")
        seconds = collective_seconds(cluster, "all_reduce", table, tied, on_node)
        axes["embedding"].add(seconds)
        exposed += seconds
    return exposed


def _grid_copies_seconds(job: Job, cluster: Cluster, pp_rank: int) -> float:
    """Returns the seconds of summing, once per step, the gradients of matrices of which ranks along an axis of a grid
    hold copies: those of a 2.5D grid along its depth. (Norms and biases are small.)"""
    sums: dict[str, int] = {}
    for _, record, count in records_once(job.rank_units(pp_rank), job.at):
        for axis in (axis for axis in record.partial if axis in GRID_AXES and len(record.shape) > 1):
            sums[axis] = sums.get(axis, 0) + count * record.numel
    shards = divided(job, DATA_AXES).shards
    return sum(
        collective_seconds(
            cluster, "all_reduce", numel * job.states.grad / shards, job.layout.size(axis),
            ranks_per_node(job.layout, axis),
        )
        for axis, numel in sums.items()
    )  # fmt: skip


def _reduced(
    job: Job, cluster: Cluster, stage: StageCost, pp_rank: int, how: Divided, params: int, axis: AxisTime, taken: float
) -> float:
    """Returns the exposed seconds of stages 0 and 1. `taken`: seconds of compute behind which others hide already."""
    weights, units = params * job.states.param, job.rank_units(pp_rank)
    if how.stage >= 2:
        return 0.0
    if how.stage == 0:
        seconds, room = sum_seconds(job, cluster, "all_reduce", params, how, units), stage.backward
        could = hides_sum(job, "all_reduce", params, how) * seconds
    else:
        seconds = sum_seconds(job, cluster, "reduce_scatter", params, how, units)
        gather = collective_seconds(cluster, "all_gather", weights, how.shards, how.on_node)
        room = stage.backward + stage.forward
        could = hides_sum(job, "reduce_scatter", params, how) * seconds + job.hides_weights * gather
        seconds += gather
    return _hide(job, cluster, seconds, could, max(0.0, room - taken), axis)


def outer_seconds(job: Job, cluster: Cluster, step_s: float, axes: dict[str, AxisTime]) -> float:
    """Returns the exposed seconds of synchronising replicas, as the mean of a step. With a delay a fragment's sum hides
    behind so many steps of `step_s` seconds; of a compressed one the first of two calls is waited for."""
    local, n = job.config.train.local, job.layout.replicas
    if n == 1:
        return 0.0
    on_node = min(n, ranks_per_node(job.layout, REPLICAS))
    seconds = max(
        sum(collective_seconds(cluster, call.op, call.payload, n, on_node) for call in round_calls(job, rank))
        for rank in set(job.representative_ranks)
    ) / local.steps  # fmt: skip
    room = local.fragments * local.delay * step_s / local.steps
    hidden = min(job.hides_gradients * seconds * (0.5 if job.outer_sums.mixes else 1.0), room)
    axes[REPLICAS].add(seconds, hidden)
    return seconds - hidden + contention(cluster, job.stack) * hidden


def _algorithm(job: Job, reducer: AlgorithmReducer, op: str, params: int, how: Divided) -> tuple[int, int, str]:
    """Returns the ranks of a sum, the buckets in which it is made, each in rounds of its own, and its algorithm. (Own
    algorithms know no copies of shares.)"""
    ranks, payload = how.ranks if op == "all_reduce" else how.shards, params * job.states.grad
    buckets = math.ceil(payload / (job.config.comm.bucket_mib * 2**20)) or 1
    return ranks, buckets, reducer.chosen(op, payload // buckets, ranks, how.on_node)


def hides_sum(job: Job, op: str, params: int, how: Divided) -> float:
    """Returns the share of a sum of gradients that can be hidden. Our own algorithms sum after backward; where `auto`
    finds torch's the fastest, it begins during backward as always."""
    reducer = job.sums
    if isinstance(reducer, AlgorithmReducer) and reducer.kind == "auto" and job.config.comm.overlap.gradients:
        return job.stack.hide_dp if _algorithm(job, reducer, op, params, how)[2] == "torch" else 0.0
    return job.hides_gradients


def sum_seconds(
    job: Job, cluster: Cluster, op: str, params: int, how: Divided, units: Sequence[tuple[Unit, int]]
) -> float:
    """Returns the seconds of summing so many gradients, those of units (each with its number) that are divided in this
    way, as the job's reducer does. `copies`: of summing the shares over the nodes that hold the same. (The time of
    making compressed messages is not in it.)"""
    grad, reducer, shares = job.states.grad, job.sums, how.shards if op == "copies" else 1
    if isinstance(reducer, AlgorithmReducer):
        ranks, buckets, kind = _algorithm(job, reducer, op, params, how)
        return buckets * algorithm_seconds(cluster, kind, op, params * grad / buckets, ranks, how.on_node)
    ranks = {"all_reduce": how.ranks, "copies": how.copies}.get(op, how.shards)
    on_node, op = 1 if op == "copies" else how.on_node, "all_reduce" if op == "copies" else op
    if isinstance(reducer, GatherToOne):
        return gather_to_one_seconds(cluster, params // shares * grad, ranks, on_node)
    if not params or not reducer.mixes:
        calls = list(reducer.calls(op, params // shares, grad, ranks, (), on_node))
    else:
        held = ((record, count) for _, record, count in records_once(units, job.at) if may_be_mixed(record, job.layout))
        mixed = [record for record, count in held for _ in range(count) if divided(job, record.data_axes) == how]
        elements = sum(record.numel for record in mixed)
        calls = list(reducer.calls(op, elements // shares, grad, ranks, mixed if shares == 1 else (), on_node))
        calls.append((op, (params - elements) // shares * grad))
    crowded = ranks / reducer.servers if isinstance(reducer, ServerReducer) else 1.0  # each server serves so many
    return crowded * sum(collective_seconds(cluster, each, payload, ranks, on_node) for each, payload in calls)


def _hide(job: Job, cluster: Cluster, seconds: float, could: float, room: float, axis: AxisTime) -> float:
    """Returns the exposed part of `seconds`, of which some `could` be hidden, behind `room` seconds of compute; the two
    slow each other down."""
    hidden = min(could, room)
    axis.add(seconds, hidden)
    return seconds - hidden + contention(cluster, job.stack) * hidden


def _sharded_rest(
    job: Job, cluster: Cluster, stage: StageCost, pp_rank: int, how: Divided, params: int, axis: AxisTime
) -> float:
    """Returns the exposed seconds per step of the embedding and the head. Like those of the blocks, their gradients are
    reduced with every micro-batch, and in stage 3 their weights are gathered too; in stage 2 the gathers of all updated
    weights are added."""
    s, m = job.states, job.micro_batches
    pairs = job.rank_units(pp_rank)
    ends = fetched = 0
    if how == divided(job, DATA_AXES):
        # A tied table is gathered for both ends.
        fetched = sum(unit_parameters(unit, job.at, False)[1] for unit, _ in pairs if not unit.stackable)
        inside = [(unit, count) for unit, count in pairs if unit.stackable]
        ends = stage.trained - sum(count * sum(unit_parameters(unit, job.at, True)) for unit, count in inside)
    outside = [(unit, count) for unit, count in pairs if not unit.stackable]
    reduce = sum_seconds(job, cluster, "reduce_scatter", ends, how, outside)
    if how.stage == 3:
        seconds = m * (reduce + sum(gather_seconds(job, cluster, fetched, how, 1)))
        axis.add(seconds)
        return seconds
    gather = collective_seconds(cluster, "all_gather", params * s.param, how.shards, how.on_node)
    hidden = min(job.hides_weights * gather, stage.forward) + m * min(
        hides_sum(job, "reduce_scatter", ends, how) * reduce, stage.backward
    )
    axis.add(m * reduce + gather, hidden)
    return m * reduce + gather - hidden
