"""Predicts the seconds of one unit of the model for one micro-batch on one rank of a cluster. No torch.

The time is that of the unit's matrix products, memory passes and collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwright.config.memory import Recomputed
from meshwright.config.precision import PRECISIONS
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import unit_collectives
from meshwright.plan.efficiency import ALIGNED, collective_seconds, product_seconds
from meshwright.plan.flops import unit_work
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.stack import Stack
from meshwright.plan.switches import adapter_rate_left
from meshwright.spec.layout.grid import GRID_AXES
from meshwright.spec.layout.layout import CUT_EXPERTS, whole_axis
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.part import Coordinate, Kernels, MicroBatch, Product, Unit, Work, hash_once
from meshwright.spec.model.pieces import TP_CHUNKS
from meshwright.spec.traffic.ledger import OPERATIONS, wire_bytes

ATTENTION_BACKWARD = 2.5  # The backward of a fused attention core has five products, its forward two.
EXCHANGE_AXES = ("ep", EP_NODE, EP_ACROSS)
CONTEXT_AXES = ("cp", "cp.inner", "cp.outer")
TENSOR_AXES = ("tp", *GRID_AXES)
UNIT_AXES = (*TENSOR_AXES, *CONTEXT_AXES, *EXCHANGE_AXES, "etp", "tp-cp")  # All axes over which units communicate.
# A backward kernel reads the forward's input and the gradient, and writes one gradient: three passes to forward's two.
MOVED_BACKWARD = 1.5


class AxisUse(NamedTuple):
    """The seconds of a unit's collectives over one axis: exposed in forward, exposed in backward, and hidden."""

    axis: str
    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True)
class UnitTime:
    """The seconds of one unit on one rank. Compute is separate from the communication inside the unit (`axes`)."""

    forward: float
    backward: float
    again: float  # The part of forward that is recomputed before backward.
    flops: float  # FLOPs of forward.
    weights: float = 0.0  # The part of backward that computes weight gradients which can be deferred.
    axes: tuple[AxisUse, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """The seconds of all compute, without communication."""
        return self.forward + self.backward + self.again

    @property
    def whole_forward(self) -> float:
        """The seconds of forward with its exposed communication."""
        return self.forward + sum(use.forward for use in self.axes)

    @property
    def whole_backward(self) -> float:
        """The seconds of backward with recomputation and exposed communication."""
        return self.backward + self.again + sum(use.backward for use in self.axes)


@dataclass(frozen=True)
class Setting:
    """The conditions under which units run: everything about a job on which their time depends."""

    at: Coordinate
    batch: MicroBatch
    kernels: Kernels
    cluster: Cluster
    stack: Stack
    precision: str
    recompute: Recomputed
    per_node: tuple[tuple[str, int], ...]  # The ranks of a group on one node, by axis.
    # The share of the adapters' rate that switches leave, by (axis, op). Missing ones are 1.
    left: tuple[tuple[tuple[str, str], float], ...] = ()
    forwards: int = 1  # Forwards per micro-batch: two if the frozen weights run in addition to the trained ones.

    __hash__ = hash_once

    @cached_property
    def dense(self) -> Setting:
        """The same setting without the axes of experts, on which no other unit depends."""
        axes = tuple(each for each in self.per_node if whole_axis(each[0]) not in CUT_EXPERTS)
        left = tuple(each for each in self.left if whole_axis(each[0][0]) not in CUT_EXPERTS)
        return self if self.at.dense is self.at else replace(self, at=self.at.dense, per_node=axes, left=left)

    def on_node(self, axis: str) -> int:
        """Return the number of ranks of a group along the axis that are on one node."""
        return next((count for name, count in self.per_node if name == axis), 1)


def setting_of(job: Job, cluster: Cluster, recompute: Recomputed | None = None) -> Setting:
    """Return the setting of a job's units on a cluster. They recompute the same parts as the job, or else
    `recompute`."""
    c = job.config
    axes = [axis for axis in UNIT_AXES if job.at.size(axis) > 1]
    return Setting(
        job.at, job.batch, job.kernels, cluster, job.stack, c.train.precision,
        c.recompute.part if recompute is None else recompute,
        tuple((axis, ranks_per_node(job.layout, axis)) for axis in axes), _rates_left(cluster, job, axes),
        1 + c.compares,
    )  # fmt: skip


def _rates_left(cluster: Cluster, job: Job, axes: list[str]) -> tuple[tuple[tuple[str, str], float], ...]:
    """Return the shares of the adapters' rate that switches leave, by (axis, op), where they take any."""
    if not cluster.network.is_oversubscribed:
        return ()
    shares = {(axis, op): adapter_rate_left(cluster, job, axis, op) for axis in axes for op in OPERATIONS}
    return tuple((key, share) for key, share in shares.items() if share < 1.0)


def unit_time(unit: Unit, where: Setting) -> UnitTime:
    """Return the time of one unit for one micro-batch. The embedding and the head are never recomputed."""
    # Units without experts share one cached result for all divisions of experts.
    return _unit_time(unit, where if unit.has_experts else where.dense)


@lru_cache(maxsize=50_000)
def _unit_time(unit: Unit, where: Setting) -> UnitTime:
    cluster, stack = where.cluster, where.stack
    work = unit_work(unit, where.at, where.batch, where.kernels)
    linear, attention, rest = _forward(work, where)
    block = unit.stackable
    # A block has many small kernels, and the host may launch them more slowly than the device runs them.
    launch = work.kernels * stack.kernel_us * 1e-6 if block else 0.0
    calls = work.kernels * cluster.device.kernel_us * 1e-6
    forward = max(linear + attention + rest, launch) + calls
    core = ATTENTION_BACKWARD if stack.fused_attention else 2.0

    # Every product with a weight has an input gradient (1) and, unless the weight is frozen, a weight gradient (2).
    linears = [(p, (1,) if p.frozen else (1, 2)) for p in work.products if p.linear]
    gradients = sum(_product_seconds(p, where, gradient) for p, wanted in linears for gradient in wanted)
    weights = sum(_product_seconds(p, where, 2) for p, wanted in linears if p.defers and 2 in wanted)
    backward = max(gradients + attention * core + rest * MOVED_BACKWARD, 2 * launch) + 2 * calls

    again = share = 0.0
    if block and where.recompute is Recomputed.CORE:
        again = (attention if stack.selective_core else 0.0) + stack.selective * (linear + rest)
        share = stack.selective
    elif block and where.recompute is Recomputed.BLOCK:
        again, share = forward, 1.0
    again += sum(_product_seconds(p, where) for p in work.products if p.again)
    axes = (
        _tensor_parallel(unit, where, linear, share),
        _context_parallel(unit, where, attention, share if where.recompute is not Recomputed.CORE else 0.0),
        *_expert_parallel(unit, where, share),
    )
    uses = tuple(use._replace(forward=use.forward * where.forwards) for use in axes if any(use[1:]))
    return UnitTime(forward * where.forwards, backward, again, work.flops, weights, uses)


def _forward(work: Work, where: Setting) -> tuple[float, float, float]:
    """Return the seconds of one forward: of linear products, of attention, and of everything else."""
    device, e = where.cluster.device, where.cluster.efficiency
    linear = attention = 0.0
    for p in work.products:
        seconds = _product_seconds(p, where)
        if p.linear:
            linear += seconds
        else:
            attention += seconds
    if work.attention_flops:
        rate = device.rate(PRECISIONS[where.precision].stored)
        attention += work.attention_flops / (rate * e.attention * where.stack.attention)
    attention += work.softmax / where.cluster.memory_rate
    return linear, attention, work.moved * where.stack.passes / where.cluster.memory_rate


def _product_seconds(p: Product, where: Setting, gradient: int = 0) -> float:
    """Return the seconds of one product (`gradient` 0), or of the gradient of its first (1) or second factor (2).

    Only products with a weight run in fp8, except the output layer's. A grouped product, whose rows are divided among
    several weights, counts as one smaller product per weight.
    """
    cluster = where.cluster
    facts, plain = PRECISIONS[where.precision], p.precise or not p.linear
    fp8 = facts.scales_products and not plain
    precision = facts.stored if plain else where.precision
    share = cluster.efficiency.product * (cluster.efficiency.fp8 if fp8 else 1.0)
    m, count = p.m, p.count
    # A weight may get any number of rows, and kernels pad them to an aligned number.
    if p.groups:
        m = -(-p.m // (p.groups * ALIGNED)) * ALIGNED
        count = p.count * p.groups
    sizes = ((m, p.n, p.k), (m, p.k, p.n), (p.k, p.n, m))[gradient]
    return product_seconds(cluster.device, precision, share, cluster.memory_rate, *sizes, count, where.batch.element)


class _Phases(NamedTuple):
    """Seconds of collectives by phase."""

    forward: float
    backward: float
    again: float  # The seconds of forward's collectives that a recomputation of all of forward repeats.


def _seconds(unit: Unit, where: Setting, axes: tuple[str, ...], with_repeated: bool = True) -> _Phases:
    """Return the seconds of a unit's collectives over these axes."""
    times = {"forward": 0.0, "backward": 0.0}
    again = 0.0
    for call in unit_collectives(unit, where.at, where.batch):
        if call.axis in axes and (with_repeated or not call.repeated):
            payload = call.payload * (where.batch.imbalance if call.routed else 1.0)
            size, per_node = where.at.size(call.axis), where.on_node(call.axis)
            left = dict(where.left).get((call.axis, call.op), 1.0) if where.left else 1.0
            seconds = call.times * collective_seconds(where.cluster, call.op, payload, size, per_node, left)
            times[call.phase] += seconds
            again += seconds if call.forward and not call.replayed else 0.0
    return _Phases(times["forward"], times["backward"], again)


def _tensor_parallel(unit: Unit, where: Setting, linear: float, again: float) -> AxisUse:
    """Return the use of tp. `again` is the share of forward that is recomputed."""
    if where.at.size("tp") == 1:
        return AxisUse("tp")
    stack = where.stack
    # Stacks that hide any tp communication hide all gathers that backward repeats, behind the input gradient's product.
    times = _seconds(unit, where, TENSOR_AXES, with_repeated=not stack.hide_tp)
    forward = times.forward
    backward = times.backward + again * times.again
    # The embedding and the head have no products to hide behind.
    if not unit.stackable:
        return AxisUse("tp", forward, backward)
    share, room = stack.hide_tp, stack.hide_tp * linear
    # With products in chunks, the first chunk has no communication before it, or the last none after it.
    if where.at.overlaps:
        size = where.at.size("tp")
        cut = _in_pieces(unit, where)
        share = cut
        room = linear * cut * ((size - 1) / size if where.at.splits_tokens else 1 - 1 / TP_CHUNKS)
    hidden_forward = min(forward * share, room)
    hidden_backward = min(backward * share, 2 * room)
    slowed = max(stack.contention, where.cluster.efficiency.contention) if where.at.overlaps else 0.0
    hidden_forward, hidden_backward = ((1 - slowed) * each for each in (hidden_forward, hidden_backward))
    hidden = hidden_forward + hidden_backward
    return AxisUse("tp", forward - hidden_forward, backward - hidden_backward, hidden)


def _in_pieces(unit: Unit, where: Setting) -> float:
    """Return the share of a unit's bytes over tp that travel while its products are computed.

    Without sequence parallelism all bytes of backward do, during the computation of weight gradients.
    """
    calls = [call for call in unit_collectives(unit, where.at, where.batch) if call.axis == "tp"]
    hides = [
        OPERATIONS[call.op].is_message if where.at.splits_tokens else call.times > 1 or call.backward for call in calls
    ]
    wire = [call.times * wire_bytes(call.op, call.payload, where.at.size("tp")) for call in calls]
    return sum(each for each, hidden in zip(wire, hides, strict=True) if hidden) / max(1, sum(wire))


def _context_parallel(unit: Unit, where: Setting, attention: float, again: float) -> AxisUse:
    """Return the use of cp. A ring overlaps with the attention core. Attention waits for all other communication."""
    size = where.at.size("cp")
    if size == 1:
        return AxisUse("cp")
    times = _seconds(unit, where, CONTEXT_AXES)
    forward = times.forward * (1 + again)
    backward = times.backward
    if not where.at.context.passes:
        return AxisUse("cp", 0.0, forward + backward)
    # In all rounds of the ring but one, keys and values travel while attention computes.
    overlapped = (size - 1) / size * attention
    hidden = min(forward, overlapped * (1 + again)) + min(backward, overlapped * ATTENTION_BACKWARD)
    return AxisUse("cp", 0.0, forward + backward - hidden, hidden)


def _expert_parallel(unit: Unit, where: Setting, again: float) -> Iterator[AxisUse]:
    """Yield the uses of ep, of etp and of the axes over which routers sum. None of them is hidden.

    If tp also divides the experts, the communication over etp is counted as tp.
    """
    alike = where.at.cuts_experts_alike
    for name, axes in (("ep", EXCHANGE_AXES), ("tp" if alike else "etp", ("etp",)), ("tp", ("tp-cp",))):
        if where.at.size(axes[0]) > 1:
            times = _seconds(unit, where, axes)
            yield AxisUse(name, times.forward, times.backward + again * times.again)
