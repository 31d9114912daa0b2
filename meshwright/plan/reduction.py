"""The seconds of data parallelism in a step, and how many are hidden: gradients reduced, weights gathered. No torch.

The calls are those of `communication.rank_sums`, which bytes are counted from too; this file knows what hides what."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import GradientSum, RepeatedCall, rank_sums, round_calls
from meshwright.plan.compute import Setting, unit_time
from meshwright.plan.efficiency import ClusterNetwork, collective_seconds
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.stack import Stack
from meshwright.spec.layout.grid import GRID_AXES
from meshwright.spec.layout.layout import REPLICAS


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

    def __add__(self, other: AxisTime) -> AxisTime:
        return AxisTime(self.seconds + other.seconds, self.hidden + other.hidden)


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


class RankSums:
    """The seconds of a rank's sums of gradients and gathers of weights in a step, and those of them that can be hidden
    at best: of units in general, and of the ends of the model. Keys are the axes under which time is counted."""

    def __init__(self, job: Job, cluster: Cluster, pp_rank: int) -> None:
        self.gradients, self.end_gradients = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        self.forward, self.end_forward = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        self.backward, self.end_backward = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        self.copies, self.shared = defaultdict[str, AxisTime](AxisTime), defaultdict[str, AxisTime](AxisTime)
        sums = {"gradients": (self.gradients, self.end_gradients), "copies": (self.copies, self.copies)}
        network = ClusterNetwork(cluster)
        for each in rank_sums(job, pp_rank) if job.stack.own else _in_few_calls(job, rank_sums(job, pp_rank)):
            call = each.asked if isinstance(each, GradientSum) else each
            if call.size == 1 or not call.times:
                continue
            on_node = min(call.size, ranks_per_node(job.layout, call.axis))
            axis = "edp" if call.axis == "edp" else "dp"
            if isinstance(each, GradientSum):
                seconds = call.times * each.seconds(network, on_node)
                overlaps = each.reducer.overlaps(call.op, call.payload, call.size, on_node)
                sums[call.source][call.ends][axis].add(seconds, job.hides_gradients * overlaps * seconds)
            elif call.source == "weights":
                # Other programs gather a block's weights one by one.
                parts = 1 if call.ends or job.config.zero.stage < 3 else job.stack.gathers
                seconds = parts * network.collective(call.op, call.payload / parts, call.size, on_node)
                for side, times in (
                    ((self.forward, self.end_forward), call.forwards),
                    ((self.backward, self.end_backward), call.times - call.forwards),
                ):
                    side[call.ends][axis].add(times * seconds, times * job.hides_weights * seconds)
            else:
                axis = "tp" if call.axis.split(".")[0] in ("tp", *GRID_AXES) else "embedding"
                seconds = network.collective(call.op, call.payload, call.size, on_node)
                self.shared[axis].add(call.times * seconds)

    @property
    def axes(self) -> list[str]:
        return [axis for axis in ("dp", "edp") if axis in {**self.gradients, **self.end_gradients, **self.forward}]


def _in_few_calls(job: Job, found: Iterable[RepeatedCall | GradientSum]) -> Iterator[RepeatedCall | GradientSum]:
    """Yields the calls of other programs, which don't put vectors into buffers of their own, nor sum shares of what
    both ends of a tie hold."""
    sums: dict[RepeatedCall, GradientSum] = {}
    payloads: Counter[RepeatedCall] = Counter()
    for each in found:
        if isinstance(each, GradientSum):
            before = sums.setdefault(replace(each.asked, payload=0), each._replace(elements=0))
            sums[replace(each.asked, payload=0)] = before._replace(elements=before.elements + each.elements)
        elif each.source == "weights":
            payloads[replace(each, payload=0)] += each.payload
        else:
            yield replace(each, payload=each.payload * job.sharding()[1])
    yield from sums.values()
    yield from (replace(call, payload=payload) for call, payload in payloads.items())


def sharded_seconds(
    job: Job, where: Setting, pp_rank: int, sums: RankSums, axes: dict[str, AxisTime]
) -> tuple[float, float]:
    """Returns the exposed seconds per micro-batch that ZeRO stages 2 and 3 add to forward and backward of a rank's
    blocks; `axes` get the seconds of all micro-batches."""
    zero, m = job.config.zero.stage, job.micro_batches
    if zero < 2:
        return 0.0, 0.0
    blocks = [(unit_time(unit, where), count) for unit, count in job.rank_units(pp_rank) if unit.stackable]
    slowed = contention(where.cluster, where.stack)
    room = [m * sum(count * t.forward for t, count in blocks)]
    room.append(m * sum(count * (t.backward + t.again) for t, count in blocks))
    found = [0.0, 0.0]
    for axis in sums.axes:
        gathers = (sums.forward[axis], sums.backward[axis]) if zero == 3 else (AxisTime(), AxisTime())
        for side, time in enumerate((gathers[0], gathers[1] + sums.gradients[axis])):
            hidden = min(time.hidden, room[side])
            axes[axis].add(time.seconds, hidden)
            room[side] -= hidden
            found[side] += (time.seconds - hidden + slowed * hidden) / m
    return found[0], found[1]


def reduce_seconds(job: Job, cluster: Cluster, stage: StageCost, sums: RankSums, axes: dict[str, AxisTime]) -> float:
    """Returns the exposed seconds per step of reducing gradients and gathering weights, besides those of
    `sharded_seconds`."""
    zero, exposed, taken = job.config.zero.stage, 0.0, 0.0
    slowed = contention(cluster, job.stack)

    def hide(axis: str, time: AxisTime, room: float) -> float:
        """Hides what can be behind `room` seconds of compute; the two slow each other down."""
        hidden = min(time.hidden, max(0.0, room))
        axes[axis].add(time.seconds, hidden)
        return time.seconds - hidden + slowed * hidden

    for axis in sums.axes:
        before, ends = axes[axis].hidden, sums.end_gradients[axis]
        gathers = sums.forward[axis] + sums.end_forward[axis]
        if zero < 2:
            room = stage.backward + (stage.forward if zero else 0.0) - taken
            exposed += hide(axis, sums.gradients[axis] + ends + gathers, room)
        elif zero == 2:  # the ends' gradients are reduced with every micro-batch, and updated weights are gathered
            exposed += hide(axis, gathers, stage.forward) + hide(axis, ends, job.micro_batches * stage.backward)
        else:  # nothing hides what the ends wait for
            time = ends + sums.end_forward[axis] + sums.end_backward[axis]
            axes[axis].add(time.seconds)
            exposed += time.seconds
        exposed += hide(axis, sums.copies[axis], stage.backward)  # on other nodes, once per step
        taken += axes[axis].hidden - before
    for axis, time in sums.shared.items():
        axes[axis].add(time.seconds)
        exposed += time.seconds
    return exposed


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
