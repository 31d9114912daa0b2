"""The seconds that one rank takes for one unit of the model and one micro-batch: its products, its memory passes and
its collectives, priced on a cluster. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.parts.part import BlockUnit, Coordinate, Kernels, MicroBatch, Product, Unit, Work
from meshwright.plan.cluster import Cluster
from meshwright.plan.communication import unit_collectives
from meshwright.plan.efficiency import collective_seconds, product_seconds
from meshwright.plan.flops import unit_work
from meshwright.plan.job import Job, ranks_per_node
from meshwright.plan.stack import Stack

ATTENTION_BACKWARD = 2.5  # the backward of a fused core has five products, its forward two
MOVED_BACKWARD = 1.5  # a backward kernel reads the forward's input and the gradient, and writes one gradient


@dataclass(frozen=True)
class UnitTime:
    """The seconds of one unit on one rank; compute and the communication inside the unit are separate."""

    forward: float
    backward: float
    again: float  # the part of forward that is recomputed before backward
    tp_forward: float = 0.0  # exposed
    tp_backward: float = 0.0
    tp_hidden: float = 0.0
    flops: float = 0.0  # in forward
    cp: float = 0.0  # exposed, forward and backward
    cp_hidden: float = 0.0

    @property
    def computed(self) -> float:
        return self.forward + self.backward + self.again

    @property
    def whole_forward(self) -> float:
        return self.forward + self.tp_forward

    @property
    def whole_backward(self) -> float:
        return self.backward + self.again + self.tp_backward + self.cp


@dataclass(frozen=True)
class Setting:
    """Where and how units run: everything about a job that their time depends on."""

    at: Coordinate
    batch: MicroBatch
    kernels: Kernels
    cluster: Cluster
    stack: Stack
    precision: str
    recompute: str
    tp_on_node: int
    cp_on_node: int


def setting_of(job: Job, cluster: Cluster, recompute: str | None = None) -> Setting:
    c = job.config
    return Setting(
        job.at, job.batch, job.kernels, cluster, job.stack, c.train.precision,
        c.recompute.mode if recompute is None else recompute,
        ranks_per_node(job.layout, "tp"), ranks_per_node(job.layout, "cp"),
    )  # fmt: skip


@lru_cache(maxsize=50_000)
def unit_time(unit: Unit, where: Setting) -> UnitTime:
    """Returns the time of one unit and one micro-batch. The embedding and the head are never recomputed."""
    cluster, stack = where.cluster, where.stack
    work = unit_work(unit, where.at, where.batch, where.kernels)
    linear, attention, rest = _forward(work, where)
    block = isinstance(unit, BlockUnit)
    # A block has many small kernels, and the host may launch them more slowly than the device runs them.
    launch = work.kernels * stack.kernel_us * 1e-6 if block else 0.0
    calls = work.kernels * cluster.device.kernel_us * 1e-6
    forward = max(linear + attention + rest, launch) + calls
    core = ATTENTION_BACKWARD if stack.fused_attention else 2.0
    # Both gradients of every product with a weight.
    gradients = [(p, each) for p in work.products if p.linear for each in ((p.m, p.k, p.n), (p.k, p.n, p.m))]
    backward = sum(_product_seconds(p, each, where) for p, each in gradients) + attention * core + rest * MOVED_BACKWARD
    backward = max(backward, 2 * launch) + 2 * calls
    again = share = 0.0
    if block and where.recompute == "selective":
        again = (attention if stack.selective_core else 0.0) + stack.selective * (linear + rest)
        share = stack.selective
    elif block and where.recompute != "none":
        again, share = forward, 1.0
    again += sum(_product_seconds(p, (p.m, p.n, p.k), where) for p in work.products if p.again)
    tp = _tensor_parallel(unit, where, linear, share)
    cp = _context_parallel(unit, where, attention, share if where.recompute != "selective" else 0.0)
    return UnitTime(forward, backward, again, *tp, work.flops, *cp)


def _forward(work: Work, where: Setting) -> tuple[float, float, float]:
    """Returns the seconds of one forward: linear products, attention, everything else."""
    device, e = where.cluster.device, where.cluster.efficiency
    linear = attention = 0.0
    for p in work.products:
        seconds = _product_seconds(p, (p.m, p.n, p.k), where)
        if p.linear:
            linear += seconds
        else:
            attention += seconds
    if work.attention_flops:
        rate = device.rate("bf16" if where.precision == "fp8" else where.precision)
        attention += work.attention_flops / (rate * e.attention * where.stack.attention)
    attention += work.softmax / where.cluster.memory_rate
    return linear, attention, work.moved * where.stack.passes / where.cluster.memory_rate


def _product_seconds(p: Product, sizes: tuple[int, int, int], where: Setting) -> float:
    """Returns the seconds of one product. Only products with a weight run in fp8, except the output layer's."""
    cluster = where.cluster
    fp8 = where.precision == "fp8" and p.linear and not p.precise
    precision = "bf16" if where.precision == "fp8" and not fp8 else where.precision
    share = cluster.efficiency.product * (cluster.efficiency.fp8 if fp8 else 1.0)
    element = where.batch.element
    return product_seconds(cluster.device, precision, share, cluster.memory_rate, *sizes, p.count, element)


def _seconds_by_phase(
    unit: Unit, where: Setting, axis: str, on_node: int, with_repeated: bool = True
) -> dict[str, float]:
    """Returns the seconds of a unit's collectives over one axis, in forward and in backward."""
    times = {"forward": 0.0, "backward": 0.0}
    for call in unit_collectives(unit, where.at, where.batch):
        if call.axis == axis and (with_repeated or not call.repeated):
            seconds = collective_seconds(where.cluster, call.op, call.payload, where.at.size(axis), on_node)
            times[call.phase] += call.times * seconds
    return times


def _tensor_parallel(unit: Unit, where: Setting, linear: float, again: float) -> tuple[float, float, float]:
    """Returns the exposed forward, exposed backward and hidden seconds of a unit's tp collectives; `again` is the share
    of forward that is recomputed."""
    if where.at.size("tp") == 1:
        return 0.0, 0.0, 0.0
    stack = where.stack
    # Stacks that hide anything hide all gathers that backward repeats, behind the product for the input's gradient.
    times = _seconds_by_phase(unit, where, "tp", where.tp_on_node, with_repeated=not stack.hide_tp)
    forward, backward = times["forward"], times["backward"] + again * times["forward"]
    if not isinstance(unit, BlockUnit):  # the embedding and the head have nothing to hide behind
        return forward, backward, 0.0
    room = stack.hide_tp * linear
    hidden_forward, hidden_backward = min(forward * stack.hide_tp, room), min(backward * stack.hide_tp, 2 * room)
    return forward - hidden_forward, backward - hidden_backward, hidden_forward + hidden_backward


def _context_parallel(unit: Unit, where: Setting, attention: float, again: float) -> tuple[float, float]:
    """Returns the exposed and hidden seconds of the ring over the cp group, which overlaps attention's core."""
    size = where.at.size("cp")
    if size == 1:
        return 0.0, 0.0
    times = {"forward": 0.0, "backward": 0.0}
    for axis in ("cp", "cp.inner", "cp.outer"):
        for phase, seconds in _seconds_by_phase(unit, where, axis, where.cp_on_node).items():
            times[phase] += seconds
    if where.at.context in ("gather", "ulysses"):  # attention waits for these
        return sum(times.values()) + again * times["forward"], 0.0
    compute = {"forward": attention * (1 + again), "backward": attention * ATTENTION_BACKWARD}
    times["forward"] *= 1 + again
    hidden = sum(min(times[phase], compute[phase] * (size - 1) / size) for phase in times)
    return sum(times.values()) - hidden, hidden
