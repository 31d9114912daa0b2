"""The seconds of data parallelism in a step, and how many are hidden: gradients reduced, weights gathered. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.params import ParamRecord
from meshwright.parts.part import BlockUnit
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import records_once, unit_records
from meshwright.plan.compute import Setting, unit_time
from meshwright.plan.efficiency import collective_seconds
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.stack import Stack
from meshwright.sharding.placement import may_be_mixed


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


def contention(cluster: Cluster, stack: Stack) -> float:
    """Returns the share of a hidden collective's time that concurrent compute loses."""
    return max(stack.contention, cluster.efficiency.contention)


def _divided(job: Job) -> tuple[int, int]:
    """Returns the number of ranks that shard the states, and how many of them are on one node."""
    size = job.sharding[1] if job.sharding[0] else job.layout.size("dp-cp")
    axis = "dp-cp" if job.layout.cp > 1 else "dp"
    return size, min(size, ranks_per_node(job.layout, axis))


def sharded_block(job: Job, where: Setting, block: BlockUnit, count: int, axis: AxisTime) -> tuple[float, float]:
    """Returns the exposed seconds per block and micro-batch that sharded weights and gradients add to forward and
    backward; `axis` gets the seconds of `count` blocks and all micro-batches."""
    zero = job.sharding[0]
    if zero < 2 or job.layout.size("dp-cp") == 1:
        return 0.0, 0.0
    cluster, stack, s = where.cluster, where.stack, job.states
    size, on_node = _divided(job)
    records, pieces = unit_records(block, job.at), stack.gathers
    params = sum(record.numel for record in records)
    reduce = sum_seconds(job, cluster, "reduce_scatter", [(record, 1) for record in records], (size, on_node))
    gather = pieces * collective_seconds(cluster, "all_gather", params * s.param / pieces, size, on_node)
    if zero == 2:
        gather = 0.0
    # Blocks that are recomputed together gather the weights of all but the last once more.
    again = 1.0 - 1.0 / max(1, job.config.recompute.blocks) if zero == 3 else 0.0
    time = unit_time(block, where)
    comm = (gather, (1 + again) * gather + reduce)
    compute = (time.forward, time.backward + time.again)
    hidden = [min(each * stack.hide_dp, room) for each, room in zip(comm, compute, strict=True)]
    times = count * job.micro_batches
    axis.add(times * ((2 + again) * gather + reduce), times * sum(hidden))
    slowed = contention(cluster, stack)
    return comm[0] - hidden[0] + slowed * hidden[0], comm[1] - hidden[1] + slowed * hidden[1]


def reduce_seconds(job: Job, cluster: Cluster, stages: tuple[StageCost, ...], axes: dict[str, AxisTime]) -> float:
    """Returns the exposed seconds per step of reducing gradients and gathering weights."""
    zero, _, copies = job.sharding
    ranks = job.layout.size("dp-cp")
    slow = max(range(job.layout.pp), key=lambda rank: stages[rank].params)
    stage, (size, on_node) = stages[slow], _divided(job)
    weights = stage.params * job.states.param
    held = [(record, count) for _, record, count in records_once(job.rank_units(slow), job.at)]
    exposed = 0.0
    if ranks > 1 and zero < 2:
        if zero == 0:
            seconds, room = sum_seconds(job, cluster, "all_reduce", held, (ranks, on_node)), stage.backward
        else:
            seconds = sum_seconds(job, cluster, "reduce_scatter", held, (size, on_node))
            seconds += collective_seconds(cluster, "all_gather", weights, size, on_node)
            room = stage.backward + stage.forward
        exposed += _hide(job, cluster, seconds, room, axes["dp"])
    elif ranks > 1:
        exposed += _sharded_ends(job, cluster, stage, slow, axes["dp"])
    if zero and copies > 1:  # the replicas on other nodes are summed once per step
        seconds = sum_seconds(job, cluster, "all_reduce", held, (copies, 1), shares=size)
        exposed += _hide(job, cluster, seconds, stage.backward, axes["dp"])
    tied = job.layout.size("embedding") if job.model.tied else 1
    if tied > 1:
        table = max(record.numel for record in unit_records(job.model.head, job.at)) * job.states.grad
        on_node = ranks_per_node(job.layout, "embedding")
        seconds = collective_seconds(cluster, "all_reduce", table, tied, on_node)
        axes["embedding"].add(seconds)
        exposed += seconds
    return exposed


def sum_seconds(
    job: Job, cluster: Cluster, op: str, held: Sequence[tuple[ParamRecord, int]], group: tuple[int, int],
    shares: int = 1,
) -> float:  # fmt: skip
    """Returns the seconds of summing the gradients of parameters (record, number of equal ones) as the job's reducer
    does, over a group of so many ranks with so many on a node; `shares`: a rank sums one of so many parts of them.
    (The time of making compressed messages is not in it.)"""
    grad, reducer = job.states.grad, job.sums
    mixed = [each for each in held if not reducer.mixes or may_be_mixed(each[0], job.layout)]
    elements, rest = (sum(count * record.numel for record, count in each) for each in (mixed, held))
    records = [record for record, count in mixed for _ in range(count)] if reducer.mixes and shares == 1 else []
    calls = list(reducer.calls(op, elements // shares, grad, group[0], records, group[1]))
    calls.append((op, (rest - elements) // shares * grad))
    return sum(collective_seconds(cluster, each, payload, *group) for each, payload in calls if payload)


def _hide(job: Job, cluster: Cluster, seconds: float, room: float, axis: AxisTime) -> float:
    """Returns the exposed part of `seconds` behind `room` seconds of compute; the two slow each other down."""
    hidden = min(job.stack.hide_dp * seconds, room)
    axis.add(seconds, hidden)
    return seconds - hidden + contention(cluster, job.stack) * hidden


def _sharded_ends(job: Job, cluster: Cluster, stage: StageCost, pp_rank: int, axis: AxisTime) -> float:
    """Returns the exposed seconds per step of the embedding and the head. Like those of the blocks, their gradients are
    reduced with every micro-batch, and in stage 3 their weights are gathered too; in stage 2 the gathers of all updated
    weights are added."""
    s, m, (size, on_node) = job.states, job.micro_batches, _divided(job)
    pairs = job.rank_units(pp_rank)
    counts = {unit: sum(record.numel for record in unit_records(unit, job.at)) for unit, _ in pairs}
    # A tied table is gathered for both ends.
    fetched = sum(counts[unit] for unit, _ in pairs if not isinstance(unit, BlockUnit))
    others = [(unit, count) for unit, count in pairs if not isinstance(unit, BlockUnit)]
    outside = [(record, count) for _, record, count in records_once(others, job.at)]
    reduce = sum_seconds(job, cluster, "reduce_scatter", outside, (size, on_node))
    if job.sharding[0] == 3:
        seconds = m * (reduce + 2 * collective_seconds(cluster, "all_gather", fetched * s.param, size, on_node))
        axis.add(seconds)
        return seconds
    gather = collective_seconds(cluster, "all_gather", stage.params * s.param, size, on_node)
    hidden = min(job.stack.hide_dp * gather, stage.forward) + m * min(job.stack.hide_dp * reduce, stage.backward)
    axis.add(m * reduce + gather, hidden)
    return m * reduce + gather - hidden
