"""The time of one training step: compute by stage, bubble, communication by axis with its hidden share, optimizer.

The same layout, stages and schedule tables that a run uses; docs/planner.md has the formulas and the source of every
constant. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.pipeline.schedules import build
from meshwright.pipeline.simulate import Simulation, simulate
from meshwright.plan.cluster import Cluster
from meshwright.plan.compute import Part, Place, block_part, end_parts
from meshwright.plan.efficiency import collective_seconds, wait_seconds
from meshwright.plan.flops import (
    Cut,
    embedding_params,
    head_params,
    layer_params,
    model_flops,
    recomputed_flops,
    recomputed_run,
)
from meshwright.plan.stack import Stack
from meshwright.plan.workload import States, Workload, ranks_per_node, senders_across

LARGEST_TABLE = 12_000  # computes of a table that is simulated; beyond it the closed formula is used
OPTIMIZER_BYTES = 4  # besides what it reads and writes of the states: the gradient's norm is a pass of its own
JITTER = 0.005  # a step waits for the slowest of all: share of its time for each doubling of the nodes
STEP_CALLS = 2  # small sums over all ranks, once a step: loss and norm, and the counts
STEP_FLOOR = 2e-3  # seconds that a step takes beside all that is modelled: the host's loop, data, logging


@dataclass
class AxisCost:
    """One axis in one step of one rank: bytes on the wire, seconds, and how many of these are hidden.
    (`plan/communication.py` counts calls.)"""

    wire_bytes: float = 0.0
    seconds: float = 0.0
    hidden: float = 0.0

    def add(self, wire: float, seconds: float, hidden: float = 0.0) -> None:
        self.wire_bytes += wire
        self.seconds += seconds
        self.hidden += hidden

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden


@dataclass(frozen=True)
class StageCost:
    """One pipeline rank and one micro-batch: seconds of all its chunks, and the FLOPs of forward."""

    forward: float
    backward: float
    flops: float
    params: float  # on one rank


@dataclass(frozen=True)
class Cost:
    workload: Workload
    cluster: Cluster
    stack: Stack
    step_s: float
    compute_s: float  # of the busiest pipeline rank, all micro-batches, no communication
    bubble: float  # idle share of the pipeline's time, over all its ranks
    bubble_s: float
    idle_s: float  # of the busiest pipeline rank
    optimizer_s: float
    axes: dict[str, AxisCost]
    stages: tuple[StageCost, ...]
    simulated: bool
    chunk_times: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False, default=())
    send_s: float = 0.0

    @property
    def tokens_per_s_device(self) -> float:
        return self.workload.tokens / self.step_s / self.workload.world

    @property
    def _peak(self) -> float:
        precision = self.workload.precision
        return self.cluster.device.rate(precision) * self.workload.world * self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs (attention whole, nothing recomputed) over what the devices could do in that time."""
        return model_flops(self.workload.model, self.workload.tokens) / self._peak

    @property
    def hfu(self) -> float:
        w = self.workload
        return self.mfu + recomputed_flops(w.model, w.tokens, w.recompute) / self._peak


def cut_of(w: Workload) -> Cut:
    p = w.parallel
    return Cut(w.micro_batch, w.rank_tokens, p.tp, p.cp, p.sequence_parallel, w.activation_bytes)


def place_of(w: Workload) -> Place:
    return Place(ranks_per_node(w, "tp"), ranks_per_node(w, "cp"))


def predict_cost(
    w: Workload, cluster: Cluster, stack: Stack, exact: bool = True, largest: int = LARGEST_TABLE
) -> Cost:
    """The cost of one step. `exact`: time the pipeline by its own table where that has at most `largest` computes."""
    p = w.parallel
    cut, place = cut_of(w), place_of(w)
    block = block_part(w.model, cut, place, cluster, stack, w.precision, w.recompute)
    embedding, head = end_parts(w.model, cut, place, cluster, stack, w.precision)
    axes = {name: AxisCost() for name in ("tp", "cp", "dp", "pp", "embedding")}
    gathered = _sharded_layer(w, cluster, stack, block, axes)
    chunk_times, stages = _stages(w, cluster, stack, (block, embedding, head), gathered)
    send = _send_seconds(w, cluster, stack)
    pipeline, bubble, idle, simulated = _pipeline_seconds(w, stack, chunk_times, send, largest if exact else 0)
    _layer_traffic(w, block, embedding, head, send, stack, axes)
    reduce = _reduce_seconds(w, cluster, stack, stages, axes)
    optimizer = _optimizer_seconds(w, cluster, max(stage.params for stage in stages))
    compute = w.micro_batches * _compute_only(w, block, embedding, head)
    step = (pipeline + reduce + optimizer) * jitter(w.world, w.node_size) + STEP_FLOOR
    step += STEP_CALLS * wait_seconds(cluster) if w.world > 1 else 0.0
    return Cost(
        w, cluster, stack, step, compute, bubble, bubble * pipeline, idle, optimizer,
        {name: axis for name, axis in axes.items() if axis.wire_bytes}, stages, simulated,
        chunk_times, send * (1 - stack.hide_pp) if p.pp > 1 else 0.0,
    )  # fmt: skip


def jitter(world: int, node_size: int) -> float:
    """How much longer a step takes because nodes differ and all wait for each other."""
    return 1.0 + JITTER * math.log2(max(1.0, world / node_size))


def stage_params(w: Workload) -> list[float]:
    """Parameters on one rank of each pipeline rank."""
    p, model = w.parallel, w.model
    layer = layer_params(model, p.tp)
    params = [layer * sum(chunks) for chunks in w.stage_layers]
    params[0] += embedding_params(model, p.tp)
    params[-1] += head_params(model, p.tp)
    if model.tied_embeddings and p.pp == 1:
        params[0] -= -(-model.vocab // p.tp) * model.hidden
    return params


def _stages(
    w: Workload, cluster: Cluster, stack: Stack, parts: tuple[Part, Part, Part], gathered: tuple[float, float]
) -> tuple[tuple[tuple[tuple[float, float], ...], ...], tuple[StageCost, ...]]:
    """Forward and backward seconds of one micro-batch by [pp rank][chunk], and their sums."""
    p = w.parallel
    block, embedding, head = parts
    forward = block.forward + block.tp_forward + gathered[0]
    # Adding a weight gradient to the sum of the micro-batches before it reads and writes every parameter's place.
    adds = layer_params(w.model, p.tp) * stack.accumulate / cluster.memory_rate if w.micro_batches > 1 else 0.0
    backward = block.backward + block.again + block.tp_backward + block.cp + gathered[1] + adds
    rows, stages = [], []
    params = stage_params(w)
    for rank, counts in enumerate(w.stage_layers):
        times, flops = [], 0.0
        for chunk, count in enumerate(counts):
            f, b = count * forward, count * backward
            flops += count * block.flops
            if rank == 0 and chunk == 0:
                f, b = f + embedding.forward + embedding.tp_forward, b + embedding.backward + embedding.tp_backward
            if rank == p.pp - 1 and chunk == p.chunks - 1:
                f, b = f + head.forward + head.tp_forward, b + head.backward + head.tp_backward
                flops += head.flops
            times.append((f, b))
        rows.append(tuple(times))
        stages.append(StageCost(sum(f for f, _ in times), sum(b for _, b in times), flops, params[rank]))
    return tuple(rows), tuple(stages)


def _compute_only(w: Workload, block: Part, embedding: Part, head: Part) -> float:
    """Of the busiest pipeline rank and one micro-batch."""
    seconds = [sum(chunks) * (block.forward + block.backward + block.again) for chunks in w.stage_layers]
    seconds[0] += embedding.forward + embedding.backward
    seconds[-1] += head.forward + head.backward
    return max(seconds)


def _send_seconds(w: Workload, cluster: Cluster, stack: Stack) -> float:
    """One activation to the next stage."""
    p = w.parallel
    if p.pp == 1:
        return 0.0
    payload = float(w.rank_tokens * w.model.hidden * w.activation_bytes)
    scattered = stack.scatter_sends and p.tp > 1 and not p.sequence_parallel
    if p.sequence_parallel or scattered:
        payload /= p.tp
    away = senders_across(w)
    if away:  # at once, each with its share of the node's adapters
        share = min(1.0, away / cluster.node.devices)
        seconds = collective_seconds(cluster, "send", payload * share, 2, 1)
    else:
        seconds = collective_seconds(cluster, "send", payload, 2, 2)
    if scattered:
        seconds += collective_seconds(cluster, "all_gather", payload * p.tp, p.tp, ranks_per_node(w, "tp"))
    return seconds


def _pipeline_seconds(
    w: Workload, stack: Stack, times: tuple[tuple[tuple[float, float], ...], ...], send: float, largest: int
) -> tuple[float, float, float, bool]:
    """Seconds from the first forward to the last backward, the idle share of all ranks and the idle seconds of the
    busiest, where a send that isn't hidden is no idle time, and whether the table was simulated."""
    p, m = w.parallel, w.micro_batches
    blocked = send * (1 - stack.hide_pp) if p.pp > 1 else 0.0
    busy = [m * sum(f + b + 2 * blocked for f, b in row) for row in times]
    if p.pp == 1:
        return busy[0], 0.0, 0.0, True
    simulated = p.pp * m * p.chunks * 2 <= largest
    if simulated:
        longest = timeline_of(w, times, blocked).makespan
    else:
        longest = closed_seconds([each / m for each in busy], m, p.chunks)
    return longest, 1.0 - sum(busy) / (p.pp * longest), max(0.0, longest - max(busy)), simulated


def timeline_of(w: Workload, times: tuple[tuple[tuple[float, float], ...], ...], blocked: float) -> Simulation:
    """The schedule's own table with modelled times; a send that isn't hidden holds its sender up."""
    p = w.parallel
    table = build(p.schedule, p.pp, w.micro_batches, p.chunks)
    return simulate(
        table,
        lambda rank, chunk: times[rank][chunk][0] + blocked,
        lambda rank, chunk: times[rank][chunk][1] + blocked,
        blocked,
    )


def closed_seconds(busy: list[float], micro_batches: int, chunks: int) -> float:
    """The makespan by the closed formulas: (M - 1) x the slowest stage and once through all, divided by chunks. Micro-
    batches that don't fill their last group of p leave gaps: about half of what the missing ones would have taken in
    all chunks but one (within 8 % of the makespan of the tables where M is at least p)."""
    slowest = max(busy)
    if chunks == 1:
        return (micro_batches - 1) * slowest + sum(busy)
    missing = -micro_batches % len(busy)
    return (micro_batches + missing * (chunks - 1) / 2 / chunks) * slowest + (sum(busy) - slowest) / chunks


def _layer_traffic(
    w: Workload, block: Part, embedding: Part, head: Part, send: float, stack: Stack, axes: dict[str, AxisCost]
) -> None:
    """What one rank of a middle stage sends over tp, cp and pp, and how long that takes."""
    p, m = w.parallel, w.micro_batches
    times = m * max(sum(chunks) for chunks in w.stage_layers)
    if p.tp > 1:
        seconds = times * (block.tp_forward + block.tp_backward + block.tp_hidden)
        axes["tp"].add(times * block.tp_bytes, seconds, times * block.tp_hidden)
        if p.pp == 1:
            ends = [embedding, head]
            axes["tp"].add(m * sum(e.tp_bytes for e in ends), m * sum(e.tp_forward + e.tp_backward for e in ends))
    if p.cp > 1:
        seconds = times * (block.cp + block.cp_hidden)
        axes["cp"].add(times * block.cp_bytes, seconds, times * block.cp_hidden)
    if p.pp > 1:
        payload = w.rank_tokens * w.model.hidden * w.activation_bytes
        payload //= p.tp if p.sequence_parallel or stack.scatter_sends else 1
        calls = 2 * m * p.chunks
        axes["pp"].add(calls * payload, calls * send, calls * send * stack.hide_pp)


def _sharded_layer(
    w: Workload, cluster: Cluster, stack: Stack, block: Part, axes: dict[str, AxisCost]
) -> tuple[float, float]:
    """Exposed seconds a layer and micro-batch that sharded parameters and gradients add to forward and backward."""
    p = w.parallel
    if p.zero < 2 or p.dp * p.cp == 1:
        return 0.0, 0.0
    size = p.shard_ranks
    on_node = min(size, _data_on_node(w))
    params = layer_params(w.model, p.tp)
    pieces = stack.gathers
    gather = pieces * collective_seconds(cluster, "all_gather", params * w.states.param / pieces, size, on_node)
    reduce = collective_seconds(cluster, "reduce_scatter", params * w.states.grad, size, on_node)
    if p.zero == 2:
        gather = 0.0
    layers = max(sum(chunks) for chunks in w.stage_layers) * w.micro_batches
    # A run of blocks that is recomputed together fetches all but its last once more.
    again = 1.0 - 1.0 / recomputed_run(w.recompute) if p.zero == 3 else 0.0
    exposed = []
    hidden_all = 0.0
    for comm, compute in ((gather, block.forward), ((1 + again) * gather + reduce, block.backward + block.again)):
        hidden = min(comm * stack.hide_dp, compute)
        hidden_all += hidden
        exposed.append(comm - hidden + contention(cluster, stack) * hidden)
    ring = (size - 1) / size * params
    wire = ring * (((2 + again) * w.states.param if p.zero == 3 else 0) + w.states.grad)
    axes["dp"].add(layers * wire, layers * ((2 + again) * gather + reduce), layers * hidden_all)
    return exposed[0], exposed[1]


def contention(cluster: Cluster, stack: Stack) -> float:
    """The share of a hidden collective's time that compute loses beside it."""
    return max(stack.contention, cluster.efficiency.contention)


def _data_on_node(w: Workload) -> int:
    """Ranks of one data-parallel group (with context parallelism inside) on one node."""
    return ranks_per_node(w, "dp-cp" if w.parallel.cp > 1 else "dp")


def _reduce_seconds(
    w: Workload, cluster: Cluster, stack: Stack, stages: tuple[StageCost, ...], axes: dict[str, AxisCost]
) -> float:
    """Exposed seconds of the gradients' reduction and the parameters' gathers, once a step."""
    p = w.parallel
    exposed = 0.0
    ranks = p.dp * p.cp
    slow = max(range(p.pp), key=lambda rank: stages[rank].params)
    params = stages[slow].params
    size = p.shard_ranks if p.zero else ranks
    on_node, ring = min(size, _data_on_node(w)), (size - 1) / size
    grads, weights = params * w.states.grad, params * w.states.param
    if ranks > 1 and p.zero < 2:
        if p.zero == 0:
            seconds = collective_seconds(cluster, "all_reduce", grads, ranks, on_node)
            axes["dp"].add(2 * ring * grads, seconds)
            room = stages[slow].backward
        else:
            gather = collective_seconds(cluster, "all_gather", weights, size, on_node)
            seconds = collective_seconds(cluster, "reduce_scatter", grads, size, on_node) + gather
            axes["dp"].add(ring * (grads + weights), seconds)
            room = stages[slow].backward + stages[slow].forward
        hidden = min(stack.hide_dp * seconds, room)
        axes["dp"].hidden += hidden
        exposed += seconds - hidden + contention(cluster, stack) * hidden
    elif ranks > 1:
        exposed += _sharded_ends(w, cluster, stack, stages[slow], (size, on_node), axes["dp"])
    if p.zero and size < ranks:  # what the copies on other nodes have, once a step
        seconds = collective_seconds(cluster, "all_reduce", grads / size, ranks // size, 1)
        hidden = min(stack.hide_dp * seconds, stages[slow].backward)
        axes["dp"].add(2 * (1 - size / ranks) * grads / size, seconds, hidden)
        exposed += seconds - hidden + contention(cluster, stack) * hidden
    if w.model.tied_embeddings and p.pp > 1:
        table = -(-w.model.vocab // p.tp) * w.model.hidden * w.states.grad
        seconds = collective_seconds(cluster, "all_reduce", table, 2, ranks_per_node(w, "embedding"))
        axes["embedding"].add(table, seconds)
        exposed += seconds
    return exposed


def _sharded_ends(
    w: Workload, cluster: Cluster, stack: Stack, stage: StageCost, group: tuple[int, int], axis: AxisCost
) -> float:
    """Exposed seconds a step of the embedding and the head, whose gradients are reduced, and in stage 3 weights
    gathered, with every micro-batch as the layers' are; and in stage 2 of the gathers of all updated weights."""
    p, s, m = w.parallel, w.states, w.micro_batches
    size, on_node = group
    ring = (size - 1) / size
    ends = stage.params - layer_params(w.model, p.tp) * max(sum(chunks) for chunks in w.stage_layers)
    reduce = collective_seconds(cluster, "reduce_scatter", ends * s.grad, size, on_node)
    if p.zero == 3:
        twice = w.model.tied_embeddings and p.pp == 1  # the one table is fetched for both ends
        fetched = ends + (-(-w.model.vocab // p.tp) * w.model.hidden if twice else 0)
        seconds = m * (reduce + 2 * collective_seconds(cluster, "all_gather", fetched * s.param, size, on_node))
        axis.add(m * ring * (ends * s.grad + 2 * fetched * s.param), seconds)
        return seconds
    gather = collective_seconds(cluster, "all_gather", stage.params * s.param, size, on_node)
    hidden = min(stack.hide_dp * gather, stage.forward) + m * min(stack.hide_dp * reduce, stage.backward)
    axis.add(ring * (m * ends * s.grad + stage.params * s.param), m * reduce + gather, hidden)
    return m * reduce + gather - hidden


def _optimizer_seconds(w: Workload, cluster: Cluster, params: float) -> float:
    """The update: every state is read and written once at the memory's rate, or by the host's processors."""
    p, s = w.parallel, w.states
    mine = params / (p.shard_ranks if p.zero >= 1 else 1)
    if s.optimizer_on != "device":
        return mine * min(w.node_size, p.world) / cluster.node.host_params_s
    return mine * optimizer_bytes(s) / cluster.optimizer_rate


def optimizer_bytes(s: States) -> float:
    """Read and written for a parameter by its update and the norm before it."""
    return s.grad + OPTIMIZER_BYTES + 2 * (s.master or s.param) + 2 * s.moments * s.moment + s.param
