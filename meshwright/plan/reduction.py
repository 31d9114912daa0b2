"""Predicts the seconds of data parallelism in a step: gradient reductions and weight gathers. No torch.

The calls are those of `communication.rank_sums`, from which bytes are counted as well. This module decides how many of
their seconds are hidden, and behind which compute.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import GradientSum, RepeatedCall, rank_sums, round_calls
from meshwright.plan.compute import TENSOR_AXES, Setting, unit_time
from meshwright.plan.efficiency import ClusterNetwork, collective_seconds
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.stack import Stack
from meshwright.plan.switches import adapter_rate_left
from meshwright.spec.layout.layout import REPLICAS, whole_axis


@dataclass
class AxisTime:
    """The seconds that one rank spends on one axis in one step, and how many of them are hidden behind compute."""

    seconds: float = 0.0
    hidden: float = 0.0

    def add(self, seconds: float, hidden: float = 0.0) -> None:
        """Add seconds, of which some are hidden."""
        self.seconds += seconds
        self.hidden += hidden

    @property
    def exposed_seconds(self) -> float:
        """The seconds that compute waits for."""
        return self.seconds - self.hidden

    def __add__(self, other: AxisTime) -> AxisTime:
        return AxisTime(self.seconds + other.seconds, self.hidden + other.hidden)


@dataclass(frozen=True)
class StageCost:
    """The cost of one micro-batch on one pipeline rank: the seconds of all its chunks, and the forward FLOPs."""

    forward: float
    backward: float
    flops: float
    params: int  # The number of parameters on one rank.


def contention(cluster: Cluster, stack: Stack) -> float:
    """Return the share of a hidden collective's time that concurrent compute loses."""
    return max(stack.contention, cluster.efficiency.contention)


class RankSums:
    """The seconds of a rank's gradient reductions and weight gathers in a step, and those that can be hidden at best.

    Blocks and the ends of the model (embedding and head) are counted separately. Keys are the axes under which time is
    counted. `copies` are the all-reduces over copies of shards, and `shared` those over axes of partial gradients.
    """

    def __init__(self, job: Job, cluster: Cluster, pp_rank: int) -> None:
        self.gradients, self.end_gradients = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        self.forward, self.end_forward = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        self.backward, self.end_backward = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        self.copies, self.shared = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        sums = {"gradients": (self.gradients, self.end_gradients), "copies": (self.copies, self.copies)}
        for each in rank_sums(job, pp_rank) if job.stack.own else _in_few_calls(job, rank_sums(job, pp_rank)):
            call = each.asked if isinstance(each, GradientSum) else each
            if call.size == 1 or not call.times:
                continue
            on_node = min(call.size, ranks_per_node(job.layout, call.axis))
            network = ClusterNetwork(cluster, adapter_rate_left(cluster, job, call.axis, call.op))
            axis = "edp" if call.axis == "edp" else "dp"
            if isinstance(each, GradientSum):
                seconds = call.times * each.seconds(network, on_node)
                overlaps = each.reducer.overlaps(call.op, call.payload, call.size, on_node)
                sums[call.source][call.ends][axis].add(seconds, job.hides_gradients * overlaps * seconds)
            elif call.of_weights:
                # Other programs gather a block's weights one by one.
                parts = 1 if call.ends or job.config.zero.stage < 3 else job.stack.gathers
                seconds = parts * network.collective(call.op, call.payload / parts, call.size, on_node)
                for side, times in (
                    ((self.forward, self.end_forward), call.forwards),
                    ((self.backward, self.end_backward), call.times - call.forwards),
                ):
                    side[call.ends][axis].add(times * seconds, times * job.hides_weights * seconds)
            else:
                axis = "tp" if whole_axis(call.axis) in TENSOR_AXES else "embedding"
                seconds = network.collective(call.op, call.payload, call.size, on_node)
                self.shared[axis].add(call.times * seconds)

    @property
    def axes(self) -> list[str]:
        """The axes among dp and edp over which gradients are reduced or weights gathered."""
        return [axis for axis in ("dp", "edp") if axis in {**self.gradients, **self.end_gradients, **self.forward}]


def _in_few_calls(job: Job, calls: Iterable[RepeatedCall | GradientSum]) -> Iterator[RepeatedCall | GradientSum]:
    """Merge the calls of other programs, which don't use separate buffers for vectors.

    They also sum the whole gradients of tied parameters, not shards of them.
    """
    sums: dict[RepeatedCall, GradientSum] = {}
    payloads: Counter[RepeatedCall] = Counter()
    for each in calls:
        if isinstance(each, GradientSum):
            key = replace(each.asked, payload=0)
            before = sums.setdefault(key, each._replace(elements=0))
            sums[key] = before._replace(elements=before.elements + each.elements)
        elif each.of_weights:
            payloads[replace(each, payload=0)] += each.payload
        else:
            yield replace(each, payload=each.payload * job.sharding_over()[1])
    yield from sums.values()
    yield from (replace(call, payload=payload) for call, payload in payloads.items())


def sharded_seconds(
    job: Job, where: Setting, pp_rank: int, sums: RankSums, axes: dict[str, AxisTime]
) -> tuple[float, float]:
    """Return the exposed seconds per micro-batch that ZeRO stages 2 and 3 add to a rank's forward and backward.

    Only blocks are counted. The seconds of all micro-batches are added to `axes`.
    """
    zero, m = job.config.zero.stage, job.micro_batches
    if zero < 2:
        return 0.0, 0.0
    blocks = [(unit_time(unit, where), count) for unit, count in job.rank_units(pp_rank) if unit.stackable]
    slowed = contention(where.cluster, where.stack)
    room = [m * sum(count * t.forward for t, count in blocks)]
    room.append(m * sum(count * (t.backward + t.again) for t, count in blocks))
    exposed = [0.0, 0.0]
    for axis in sums.axes:
        gathers = (sums.forward[axis], sums.backward[axis]) if zero == 3 else (AxisTime(), AxisTime())
        for side, time in enumerate((gathers[0], gathers[1] + sums.gradients[axis])):
            hidden = min(time.hidden, room[side])
            axes[axis].add(time.seconds, hidden)
            room[side] -= hidden
            exposed[side] += (time.seconds - hidden + slowed * hidden) / m
    return exposed[0], exposed[1]


def reduce_seconds(job: Job, cluster: Cluster, stage: StageCost, sums: RankSums, axes: dict[str, AxisTime]) -> float:
    """Return the exposed seconds per step of gradient reductions and weight gathers outside of `sharded_seconds`."""
    zero, exposed, taken = job.config.zero.stage, 0.0, 0.0
    slowed = contention(cluster, job.stack)

    def hide(axis: str, time: AxisTime, room: float) -> float:
        """Hide as much as possible behind `room` seconds of compute and return the seconds by which the step grows."""
        hidden = min(time.hidden, max(0.0, room))
        axes[axis].add(time.seconds, hidden)
        return time.seconds - hidden + slowed * hidden

    for axis in sums.axes:
        before = axes[axis].hidden
        ends = sums.end_gradients[axis]
        gathers = sums.forward[axis] + sums.end_forward[axis]
        if zero < 2:
            room = stage.backward + (stage.forward if zero else 0.0) - taken
            exposed += hide(axis, sums.gradients[axis] + ends + gathers, room)
        elif zero == 2:
            # Updated weights are gathered once, and the gradients of the ends are reduced with every micro-batch.
            exposed += hide(axis, gathers, stage.forward) + hide(axis, ends, job.micro_batches * stage.backward)
        else:
            # The ends wait for their gathers and reductions, and no compute is left to hide them.
            time = ends + sums.end_forward[axis] + sums.end_backward[axis]
            axes[axis].add(time.seconds)
            exposed += time.seconds
        # Copies of shards are summed over other nodes, once per step.
        exposed += hide(axis, sums.copies[axis], stage.backward)
        taken += axes[axis].hidden - before
    for axis, time in sums.shared.items():
        axes[axis].add(time.seconds)
        exposed += time.seconds
    return exposed


def outer_seconds(job: Job, cluster: Cluster, step_s: float, axes: dict[str, AxisTime]) -> float:
    """Return the exposed seconds of synchronising replicas, as the mean over steps.

    With `delay`, a fragment's sum is hidden behind that number of steps of `step_s` seconds each. A compressed sum
    consists of two calls, and the first of them is exposed.
    """
    local, n = job.config.train.local, job.layout.replicas
    if n == 1:
        return 0.0
    on_node = min(n, ranks_per_node(job.layout, REPLICAS))
    left = adapter_rate_left(cluster, job, REPLICAS, "all_reduce")
    seconds = max(
        sum(collective_seconds(cluster, call.op, call.payload, n, on_node, left) for call in round_calls(job, rank))
        for rank in set(job.representative_ranks)
    ) / local.steps  # fmt: skip
    room = local.fragments * local.delay * step_s / local.steps
    hidden = min(job.hides_gradients * seconds * (0.5 if job.outer_sums.mixes else 1.0), room)
    axes[REPLICAS].add(seconds, hidden)
    return seconds - hidden + contention(cluster, job.stack) * hidden
