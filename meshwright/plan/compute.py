"""Seconds that one rank computes for one micro-batch: a block, the embedding, the output layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.config.sections import ModelConfig
from meshwright.plan.cluster import Cluster
from meshwright.plan.efficiency import collective_seconds, product_seconds, wait_seconds
from meshwright.plan.flops import Cut, LayerWork, embedding_work, head_work, layer_work, recomputed_share
from meshwright.plan.stack import Stack

ATTENTION_BACKWARD = 2.5  # five products in the backward of a fused core for two in its forward
SMALL_CALLS = 3  # over tp in forward, too small for their bytes to count: the batch, and the loss's maximum and sums
MOVED_BACKWARD = 1.5  # a backward kernel reads what its forward read and the gradient, and writes one


@dataclass(frozen=True)
class Part:
    """Forward and backward of one part of a model on one rank, compute and tensor-parallel traffic apart."""

    forward: float
    backward: float
    again: float  # of forward, run again before backward
    tp_forward: float = 0.0  # exposed
    tp_backward: float = 0.0
    tp_hidden: float = 0.0
    tp_bytes: float = 0.0  # on the wire, forward and backward
    flops: float = 0.0  # forward
    cp: float = 0.0  # exposed, forward and backward
    cp_hidden: float = 0.0
    cp_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.again + self.tp_forward + self.tp_backward + self.cp


@dataclass(frozen=True)
class Place:
    """Where a rank's tp and cp groups stand: ranks of each on one node."""

    tp_on_node: int
    cp_on_node: int


def _forward(
    work: LayerWork, cluster: Cluster, stack: Stack, precision: str, element: int
) -> tuple[float, float, float]:
    """(linear products, attention, the rest) of one forward."""
    device, e = cluster.device, cluster.efficiency
    share = e.product * (e.fp8 if precision == "fp8" else 1.0)
    core_precision = "bf16" if precision == "fp8" else precision
    linear = attention = 0.0
    for p in work.products:
        kind = precision if p.linear and p.name != "logits" else core_precision
        eff = share if kind == precision else e.product
        seconds = product_seconds(device, kind, eff, cluster.memory_rate, p.m, p.n, p.k, p.count, element)
        if p.linear:
            linear += seconds
        else:
            attention += seconds
    if work.attention_flops:
        attention += work.attention_flops / (device.rate(core_precision) * e.attention * stack.attention)
    attention += work.softmax / cluster.memory_rate
    return linear, attention, work.moved * stack.passes / cluster.memory_rate


def _backward_linear(work: LayerWork, cluster: Cluster, stack: Stack, precision: str, element: int) -> float:
    """The gradients of both factors of every product with a weight."""
    device, e = cluster.device, cluster.efficiency
    total = 0.0
    for p in work.products:
        if not p.linear:
            continue
        kind = precision if p.name != "logits" or precision != "fp8" else "bf16"
        eff = e.product * (e.fp8 if kind == "fp8" else 1.0)
        for m, n, k in ((p.m, p.k, p.n), (p.k, p.n, p.m)):
            total += product_seconds(device, kind, eff, cluster.memory_rate, m, n, k, p.count, element)
    return total


@lru_cache(maxsize=20_000)
def block_part(
    model: ModelConfig, cut: Cut, place: Place, cluster: Cluster, stack: Stack, precision: str, recompute: str
) -> Part:
    """One block."""
    work = layer_work(model, cut, stack.fused_attention)
    linear, attention, rest = _forward(work, cluster, stack, precision, cut.element)
    launch, calls = work.kernels * stack.kernel_us * 1e-6, work.kernels * cluster.device.kernel_us * 1e-6
    forward = max(linear + attention + rest, launch) + calls
    core = 2.0 if not stack.fused_attention else ATTENTION_BACKWARD
    backward = _backward_linear(work, cluster, stack, precision, cut.element) + attention * core + rest * MOVED_BACKWARD
    backward = max(backward, 2 * launch) + 2 * calls
    share = recomputed_share(recompute)
    if recompute == "selective":
        again = attention if not stack.fused_attention else 0.0
        again += stack.selective * (linear + rest)
    elif recompute == "core":
        again = attention
    else:
        again = share * forward
    tp = _block_tp(model, cut, place, cluster, stack, linear, recompute)
    cp, cp_hidden, cp_bytes = _ring(model, cut, place, cluster, attention, share if recompute != "selective" else 0.0)
    return Part(
        forward, backward, again, *tp, flops=work.flops, cp=cp, cp_hidden=cp_hidden, cp_bytes=cp_bytes
    )  # fmt: skip


def _block_tp(
    model: ModelConfig, cut: Cut, place: Place, cluster: Cluster, stack: Stack, linear: float, recompute: str
) -> tuple[float, float, float, float]:
    """Exposed forward, exposed backward, hidden and wire bytes of a block's tp collectives."""
    if cut.tp == 1:
        return 0.0, 0.0, 0.0, 0.0
    payload = cut.tokens * model.hidden * cut.element
    ring = (cut.tp - 1) / cut.tp * payload
    again = recomputed_share(recompute) if recompute != "selective" else stack.selective

    def time(op: str) -> float:
        return collective_seconds(cluster, op, payload, cut.tp, place.tp_on_node)

    if cut.sequence_parallel:
        half = time("all_gather") + time("reduce_scatter")
        forward, regather = 2 * half, 2 * time("all_gather")
        # Of the gathers that backward repeats, stacks that hide anything hide them all behind the input's gradient.
        backward = 2 * half + (0.0 if stack.hide_tp else regather)
        wire = 10 * ring
    else:
        forward = backward = 2 * time("all_reduce")
        wire = 8 * ring
    backward += again * forward
    wire += again * 4 * ring
    room = stack.hide_tp * linear
    hidden_forward, hidden_backward = min(forward * stack.hide_tp, room), min(backward * stack.hide_tp, 2 * room)
    return forward - hidden_forward, backward - hidden_backward, hidden_forward + hidden_backward, wire


def _ring(
    model: ModelConfig, cut: Cut, place: Place, cluster: Cluster, attention: float, again: float
) -> tuple[float, float, float]:
    """Exposed and hidden seconds and wire bytes of keys and values that go round the cp group."""
    if cut.cp == 1:
        return 0.0, 0.0, 0.0
    kv = max(1, model.kv_heads // cut.tp) * model.head_dim * 2 * cut.element * cut.tokens
    hop = collective_seconds(cluster, "send", kv, cut.cp, place.cp_on_node)
    total = hidden = 0.0
    # Backward passes keys and values round once more, and their gradients.
    for passes, compute in ((1.0 + again, attention * (1 + again)), (2.0, attention * ATTENTION_BACKWARD)):
        seconds = passes * (cut.cp - 1) * hop
        covered = min(seconds, compute * (cut.cp - 1) / cut.cp)
        total += seconds
        hidden += covered
    return total - hidden, hidden, (3.0 + again) * (cut.cp - 1) * kv


@lru_cache(maxsize=4_000)
def end_parts(
    model: ModelConfig, cut: Cut, place: Place, cluster: Cluster, stack: Stack, precision: str
) -> tuple[Part, Part]:
    """The embedding and the head with the loss."""
    payload = cut.tokens * model.hidden * cut.element
    op = ("all_gather", "reduce_scatter") if cut.sequence_parallel else ("all_reduce", "all_reduce")
    times = [collective_seconds(cluster, name, payload, cut.tp, place.tp_on_node) for name in op]
    ring = (cut.tp - 1) / cut.tp * payload
    whole = 2 if cut.sequence_parallel else 1
    head = head_work(model, cut, stack.logit_bytes)
    small = SMALL_CALLS * wait_seconds(cluster) if cut.tp > 1 else 0.0
    parts = []
    for work, forward_tp, backward_tp in (
        (embedding_work(model, cut), times[1], times[0] if cut.sequence_parallel else 0.0),
        (head, small + (times[0] if cut.sequence_parallel else 0.0), sum(times) if whole == 2 else times[0]),
    ):
        linear, _, rest = _forward(work, cluster, stack, precision, cut.element)
        backward = _backward_linear(work, cluster, stack, precision, cut.element) + rest * MOVED_BACKWARD
        calls = work.kernels * cluster.device.kernel_us * 1e-6
        parts.append(
            Part(
                linear + rest + calls, backward + 2 * calls, 0.0, forward_tp, backward_tp, 0.0,
                2 * ring if cut.tp > 1 else 0.0, work.flops,
            )
        )  # fmt: skip
    return parts[0], parts[1]
