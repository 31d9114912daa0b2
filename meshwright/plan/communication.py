"""Predicts every byte that a training step sends from the config alone, in exact integers. No torch.

Inside the model, parts declare their collectives (`spec/model/`). Every other source of traffic is one small function
here with its closed formula. These functions yield calls as one rank's ledger counts them. Their sums over calls and
ranks equal the `comm` of metrics.jsonl. The letters of the formulas:

    b micro-batch, s sequence, h hidden     T = b s, the tokens of a micro-batch
    M micro-batches of one rank in a step   H = T h a, the bytes of one micro-batch's activations [tokens, hidden]
    t = tp, d = dp x cp, p = pp             a, g, w bytes of one activation, one gradient, one number of the loss
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from meshwright.config.comm import GatherConfig
from meshwright.config.memory import ZeroConfig
from meshwright.config.sections import Config
from meshwright.engine.sharding.compression.sizes import gathered_bytes
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, LinkCost, ReducerPlan
from meshwright.plan.held import Buffer, HeldParameter, fetches_of, packing_of
from meshwright.plan.job import FIELD_BYTES, Job, checked_job
from meshwright.plan.matrices import matrix_calls
from meshwright.plan.stack import NF4
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout import INNER, REPLICAS, neighbours_on_node
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE, ParamRecord
from meshwright.spec.model.description import field_elements, fields_read, stages_of
from meshwright.spec.model.gpt import OutputLayerPart
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.loss_pieces import answers_of
from meshwright.spec.model.part import Collective, Coordinate, MicroBatch, Unit, innermost
from meshwright.spec.traffic.counts import WIDE, balance_length, checks_bytes, counts_bytes, sums_bytes
from meshwright.spec.traffic.fragments import FragmentMoment, fragment_bounds, moment_of
from meshwright.spec.traffic.ledger import wire_bytes
from meshwright.spec.traffic.placement import copy_axis


class Traffic(NamedTuple):
    """A number of calls, the bytes of the whole logical tensors, and the bytes that leave the ranks in a ring."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        """Return the sum of this traffic and `times` the other."""
        return Traffic(*(a + times * b for a, b in zip(self, other, strict=True)))


class Line(NamedTuple):
    """The key under which traffic is summed: a ledger entry without layer and node."""

    phase: str
    axis: str
    op: str


@dataclass(frozen=True)
class RepeatedCall:
    """`times` equal calls of one rank over a group of `size` ranks. `source` names the origin of the traffic."""

    source: str
    phase: str
    axis: str
    op: str
    size: int
    payload: int
    times: int = 1
    forwards: int = 0  # The calls among these that a forward waits for.
    ends: bool = False  # True for units other than blocks: the embedding and the head.
    wire: int | None = None  # Bytes that leave the rank, if they don't follow from the op and the payload.

    @property
    def of_weights(self) -> bool:
        """True if the calls gather or update weights, instead of summing gradients."""
        return self.source == "weights"

    @property
    def line(self) -> Line:
        return Line(self.phase, self.axis, self.op)

    @property
    def traffic(self) -> Traffic:
        wire = wire_bytes(self.op, self.payload, self.size) if self.wire is None else self.wire
        return Traffic(self.times, self.times * self.payload, self.times * wire)


# If ranks of a stage send different amounts, their calls are counted one by one up to this number of ranks. Beyond it,
# each rank is assumed to send as much as the first of its stage.
LARGEST_COUNTED = 64

Detail = dict[Line, Traffic]
Key = TypeVar("Key", Line, str)


# The sources of traffic. Calls over a group of one rank are dropped by `stage_calls`.


def batch(job: Job, held: Sequence[Stage]) -> Iterator[RepeatedCall]:
    """Yield the broadcasts of the batch over tp, where one rank reads it.

    There is one broadcast per micro-batch and dtype, whatever the number of chunks: M x (elements of the fields of this
    dtype that a chunk of this rank reads x bytes), with T elements for most fields.
    """
    needs = set().union(*(fields_read(stage, job.model, job.layout.cp) for stage in held))
    fields = {name: dtype for name, dtype in job.data_fields.items() if name in needs}
    for dtype in dict.fromkeys(fields.values()):
        names = (name for name, own in fields.items() if own == dtype)
        payload = sum(field_elements(name, job.model, job.at, job.batch) for name in names) * FIELD_BYTES[dtype]
        # With cp, the row numbers and the documents of all ranks' rows travel with the int64 fields.
        if dtype == "int64" and job.layout.cp > 1:
            payload += job.batch.sequences * job.batch.seq * (1 + ("segments" in job.data_fields)) * WIDE
        yield _over(job.layout, "batch", "data", "tp", "broadcast", payload, job.micro_batches)


def units(job: Job, stage: Stage) -> Iterator[RepeatedCall]:
    """Yield the collectives that the parts of a stage declare, once per micro-batch.

    Recomputation repeats the collectives of a block's forward in backward.
    """
    for unit, count in job.units(stage):
        again = unit.stackable and job.config.recompute.blocks > 0
        for call in (*unit_collectives(unit, job.at, job.batch), *answer_collectives(job, unit)):
            times = count * call.times * job.micro_batches
            repeats = again and call.forward and not call.replayed
            for phase in (call.phase, "backward") if repeats else (call.phase,):
                yield _over(job.layout, "units", phase, call.axis, call.op, call.payload, times)


@lru_cache(maxsize=20_000)
def unit_collectives(unit: Unit, at: Coordinate, batch: MicroBatch) -> tuple[Collective, ...]:
    """Return the collectives that a unit's parts declare for one micro-batch."""
    return tuple(unit.collectives(at, batch))


def answer_collectives(job: Job, unit: Unit) -> Iterator[Collective]:
    """Yield the calls of a unit for one micro-batch that losses over answers add to those that its parts declare.

    A reference model repeats all calls of a forward, except those for the norms of DoRA. The output layer repeats its
    calls of forward in backward, since its input is gathered again. Ranks that share sequences sum three numbers for
    each answer: with A = s + 2 places for answers in a sample, 3 b A w bytes.
    """
    if not job.config.objective_facts.judges_answers:
        return
    at, batch = unit.seen_by(job.at), unit.rows.of(job.batch)
    for part in (innermost(each.part) for each in unit.parts):
        forward = [call for call in part.collectives(at, batch) if call.forward and at.size(call.axis) > 1]
        if job.config.compares:
            yield from (replace(call, replayed=True) for call in forward)
        if isinstance(part, OutputLayerPart):
            yield from (replace(call, phase="backward") for call in forward)
            payload = 3 * batch.sequences * answers_of(batch.seq) * batch.wide
            yield Collective("forward", "cp", "all_reduce", payload, 1 + job.config.compares, replayed=True)


def passed_bytes(job: Job, stage: Stage, back: bool = False) -> list[int]:
    """Return the bytes of each tensor that a stage receives from the stage before for one micro-batch.

    With `back`, return those that the stage sends back as gradients.
    """
    shapes = job.model.passes(job.at, job.batch, stage).items()
    left = job.model.ungraded if back else ()
    return [math.prod(shape) * job.batch.element for name, shape in shapes if name not in left]


def crossings(job: Job, pp_rank: int) -> list[tuple[int, int]]:
    """Return 0 or 1 for each chunk of a pipeline rank: whether its forward and its backward send to another rank."""
    places = job.placement

    def crosses(index: int) -> int:
        return int(0 <= index < len(places) and places[index][0] != pp_rank)

    return [(crosses(stage.index + 1), crosses(stage.index - 1)) for stage in job.chunks[pp_rank]]


def pipeline(job: Job, pp_rank: int) -> Iterator[RepeatedCall]:
    """Yield the sends between stages: each chunk's output onward, and its input's gradient back.

    Nothing is sent to a neighbouring stage on the same rank.

    M sends of H (H / t with split tokens) in either direction for each boundary between virtual stages: over all ranks
    2 M (p chunks - 1) x world / p sends where p > 1, under every schedule that goes round the ranks. Between stages of
    a decoder that attends to an encoder there are two sends, the second of the encoder's output. A program that
    scatters its sends gathers each one over tp after receiving it.
    """
    stages = stages_of(job.config)
    divided = job.layout.tp if job.scatters_sends else 1
    payloads: Counter[tuple[str, int]] = Counter()
    for stage, crosses in zip(job.chunks[pp_rank], crossings(job, pp_rank), strict=True):
        ways = (("forward", stage.index + 1, False), ("backward", stage.index, True))
        for (phase, taker, back), sends in zip(ways, crosses, strict=True):
            sizes = passed_bytes(job, stages[taker], back) if sends else ()
            payloads.update((phase, size) for size in sizes)
    for (phase, payload), count in payloads.items():
        yield _over(job.layout, "pipeline", phase, "pp", "send", payload // divided, count * job.micro_batches)
        if job.scatters_sends:
            yield _over(job.layout, "pipeline", phase, "tp", "all_gather", payload, count * job.micro_batches)


class GradientSum(NamedTuple):
    """A sum of gradients: the collective that computes it plainly, and the reducer that may use other calls."""

    asked: RepeatedCall
    reducer: ReducerPlan
    elements: int
    element_bytes: int
    records: list[ParamRecord]  # The parameters of the whole bucket.
    on_node: int

    @property
    def calls(self) -> Iterator[RepeatedCall]:
        """The calls that the reducer makes for this sum."""
        sizes = (self.elements, self.element_bytes, self.asked.size, self.records, self.on_node)
        for op, payload in self.reducer.calls(self.asked.op, *sizes):
            yield replace(self.asked, op=op, payload=payload)

    def seconds(self, network: LinkCost, on_node: int) -> float:
        """Return the seconds of one such sum with `on_node` ranks of its group on each node."""
        sizes = (self.elements, self.element_bytes, self.asked.size, self.records, on_node)
        return self.reducer.seconds(network, self.asked.op, *sizes)


def expand_calls(calls: Iterable[RepeatedCall | GradientSum]) -> Iterator[RepeatedCall]:
    """Yield the calls as a ledger counts them, with each gradient sum replaced by its reducer's calls."""
    for each in calls:
        yield from each.calls if isinstance(each, GradientSum) else (each,)


def bucket_calls(
    params: Sequence[HeldParameter],
    buffers: Iterable[Buffer],
    layout: Layout,
    zero: ZeroConfig | None = None,
    micro_batches: int = 1,
    reducer: ReducerPlan = PLAIN_REDUCER,
    gather: GatherConfig | None = None,
    fetches: Sequence[int] = (),
    ends: Container[int] = (),
) -> Iterator[RepeatedCall | GradientSum]:
    """Yield the calls by which a rank sends gradients and weights of its parameters in a step.

    Parameters with the same dtype, data axes and further partial axes share a buffer, in the order of backward. The
    size of each parameter is rounded up to 16 elements. The parameter that brings a bucket to the bucket size closes
    it, and a bucket is rounded up to 16 d elements. In ZeRO stage 3 each unit's parameters form a bucket. With B the
    padded elements of a bucket, g and w the bytes of a gradient and a weight, S the ranks that shard the bucket, and M
    micro-batches:

    stage 0   1 all_reduce of B g over the data axes
    stage 1   1 reduce_scatter of B g and 1 all_gather of B w over the S ranks
    stage 2   M reduce_scatter of B g and 1 all_gather of B w
    stage 3   M reduce_scatter of B g and M f all_gather of B w, where f is the number of times that a micro-batch
              gathers the bucket, usually 2. If each node keeps a copy, all but the first are inside the node

    In addition, there is 1 all_reduce of a share, B g / S, over the copies of the S ranks, if there are any, and over
    each further axis along which the gradients are partial sums. A `reducer` may use other calls for the sums over the
    data axes. `gather` is the form in which weights travel in stage 3, `fetches` is f of each parameter, and `ends` are
    the numbers of the units that are not blocks. Equal buckets are counted together.
    """
    zero = zero or ZeroConfig()
    for buffer in buffers:
        summing = reducer if buffer.mixed or not reducer.mixes else PLAIN_REDUCER
        stage, shards, replicas = buffer.division(layout, zero)
        dividing = layout.size(shards) if shards else 1
        equal = _equal_buckets(params, buffer, fetches, ends, summing.mixes)
        for (size, fetched, end, records), count in equal.items():
            share, grad = size // dividing, buffer.gradient
            if shards is None:
                sums = [("gradients", buffer.data_axes, "all_reduce", size, records, 1)]
            else:
                sums = [("gradients", shards, "reduce_scatter", size, records, micro_batches if stage >= 2 else 1)]
                sums += [("copies", replicas, "all_reduce", share, (), 1)] if replicas is not None else []
                yield from _gathers(buffer, layout, zero, gather, size, micro_batches, fetched, count, end)
            for source, axes, op, elements, of, times in sums if buffer.trained else []:
                own = reducer is not PLAIN_REDUCER and "." not in axes
                on_node = neighbours_on_node(layout.group(axes, 0), layout.node_size or layout.world) if own else 1
                call = _over(layout, source, "reduce", axes, op, elements * grad, count * times)
                yield GradientSum(replace(call, ends=end), summing, elements, grad, list(of), on_node)
            for axis in buffer.partial:
                yield _over(layout, "shared gradients", "reduce", axis, "all_reduce", share * grad, count)


def _equal_buckets(
    params: Sequence[HeldParameter], buffer: Buffer, fetches: Sequence[int], ends: Container[int], by_records: bool
) -> Counter[tuple[int, int, bool, tuple[ParamRecord, ...]]]:
    """Count the equal buckets of a buffer.

    The key is a bucket's size, the number of times that a micro-batch gathers it, whether all of its parameters are
    outside of blocks and, for reducers that depend on them, the records of its parameters.
    """
    held: list[list[int]] = [[] for _ in buffer.buckets]
    for number, bucket in zip(buffer.params, buffer.places, strict=True):
        held[bucket].append(number)
    return Counter(
        (
            size, max(fetches[n] for n in inside) if fetches else 2, all(params[n].unit in ends for n in inside),
            tuple(params[n].record for n in inside) if by_records else (),
        )
        for size, inside in zip(buffer.buckets, held, strict=True)
    )  # fmt: skip


def _gathers(
    buffer: Buffer, layout: Layout, zero: ZeroConfig, gather: GatherConfig | None, size: int, micro_batches: int,
    fetched: int, count: int, end: bool,
) -> Iterator[RepeatedCall]:  # fmt: skip
    """Yield the weight gathers of `count` buckets of `size` elements each."""
    stage, shards, _ = buffer.division(layout, zero)
    assert shards is not None
    times, forwards = (micro_batches * fetched, micro_batches) if stage == 3 else (1, 1)
    how = gather if gather and stage == 3 else GatherConfig()
    # nf4 weights already have few bits and are not compressed further.
    how = replace(how, kind="plain") if buffer.dtype == NF4 else how
    if node := copy_axis(layout, zero, how, buffer.data_axes):
        inside = _over(layout, "weights", "gather", node, "all_gather", size * buffer.weight, count * (times - 1))
        yield replace(inside, forwards=count * (forwards - 1), ends=end)
        times = forwards = 1
    payload = gathered_bytes(how, size, buffer.weight, layout.size(shards))
    call = _over(layout, "weights", "gather", shards, "all_gather", payload, count * times)
    yield replace(call, forwards=count * forwards, ends=end)


def rank_sums(job: Job, pp_rank: int) -> list[RepeatedCall | GradientSum]:
    """Return the calls by which a rank of a pipeline stage sends its gradients and weights in a step.

    Bytes (here) and seconds (`plan/reduction.py`) are both computed from these calls.
    """
    c, packing = job.config, packing_of(job, pp_rank)
    ends = {number for chunk in packing.chunks for number, unit, _ in chunk if not unit.stackable}
    fetches = fetches_of(job, pp_rank) if c.zero.stage == 3 else ()
    return list(bucket_calls(
        packing.params, packing.buffers, job.layout, c.zero, job.micro_batches, job.sums, c.comm.gather, fetches, ends,
    ))  # fmt: skip


def _over(layout: Layout, source: str, phase: str, axes: str, op: str, payload: int, times: int = 1) -> RepeatedCall:
    """Return calls over the groups of some axes, which are named without axes of one rank."""
    return RepeatedCall(source, phase, layout.without_ones(axes), op, layout.size(axes), payload, times)


def replica_calls(job: Job, pp_rank: int, moment: FragmentMoment) -> Iterator[RepeatedCall]:
    """Yield the calls by which replicas sum the parameters of a pipeline rank at this moment.

    With S a rank's share of a bucket, n replicas and F fragments, a fragment of a share is about S / F elements, in
    multiples of 16 n. It takes 1 all_reduce in float32, or the calls of a compressed one. The copies of a tied
    parameter at both ends of the model are averaged after the sum has arrived.
    """
    config, layout, n = job.config, job.layout, job.layout.replicas
    for buffer in packing_of(job, pp_rank).buffers:
        shards = buffer.division(layout, config.zero).shards
        wide = max(4, buffer.weight)
        compresses = buffer.mixed and not buffer.partial and (job.step or 0) > config.train.local.compress.warmup_steps
        reducer = job.outer_sums if compresses else PLAIN_REDUCER
        for size in buffer.buckets if buffer.trained else ():
            share = size // (layout.size(shards) if shards else 1)
            bounds = fragment_bounds(share, config.train.local.fragments, n)
            for low, high in (bounds[f] for f in moment.begin if bounds[f][1] > bounds[f][0]):
                for op, payload in reducer.calls("all_reduce", high - low, wide, n):
                    yield _over(layout, "synchronised", "outer", REPLICAS, op, payload)
            arrived = (*moment.arrive, *(moment.begin if moment.at_once else ()))
            tied = arrived if "embedding" in buffer.partial else ()
            for low, high in (bounds[f] for f in tied if bounds[f][1] > bounds[f][0]):
                payload = (min(high, share) - low) * wide
                yield _over(layout, "synchronised", "outer", "embedding", "all_reduce", payload)


def round_calls(job: Job, pp_rank: int) -> list[RepeatedCall]:
    """Return the calls by which a rank synchronises all of its parameters once, every `train.local.steps` steps."""
    c = job.config
    everything = FragmentMoment((), tuple(range(c.train.local.fragments)), at_once=True)
    after_warmup = replace(job, step=c.train.local.compress.warmup_steps + 1)
    calls = replica_calls(after_warmup, pp_rank, everything) if job.layout.replicas > 1 else ()
    return [call for call in calls if call.size > 1]


def mean_traffic(job: Job, pp_rank: int) -> dict[str, Traffic]:
    """Return the traffic of a rank of a pipeline stage over each axis in a step.

    Replicas synchronise only in some steps, so their traffic is the mean over steps, rounded down.
    """
    return _with_rounds(job, by_axis(by_line(stage_calls(job, pp_rank))), [pp_rank], 1)


def mean_of_all_ranks(job: Job) -> dict[str, Traffic]:
    """Return the traffic over each axis in a step, as `mean_traffic` does, summed over all ranks."""
    return _with_rounds(job, by_axis(all_ranks(job)), range(job.layout.pp), job.world // job.layout.pp)


def _with_rounds(job: Job, totals: dict[str, Traffic], pp_ranks: Iterable[int], times: int) -> dict[str, Traffic]:
    """Add the mean traffic per step with which `times` ranks of each stage synchronise replicas."""
    steps = job.config.train.local.steps
    for rounds in (by_axis(by_line(round_calls(job, pp_rank))) for pp_rank in pp_ranks):
        for axis, whole in rounds.items():
            totals[axis] = totals.get(axis, Traffic()).plus(Traffic(*(times * each // steps for each in whole)))
    return dict(sorted(totals.items()))


def sums(job: Job) -> Iterator[RepeatedCall]:
    """Yield the reductions of small vectors, each 1 all_reduce over the world per step.

    Loss, tokens and squared gradient norm: 3 x 8 bytes. With n replicas these are summed inside a replica first, as are
    declared terms, and then over the replicas, with each replica's tokens: (3 + n) x 8.
    Monitored values, if there are any, with their counts: 2 x values x 8, from the second step on, when all ranks know
    their names. The metrics, including their own bytes: (4 x axes of the mesh + 5 phases + 4 x ranks + 1) x 8.
    With experts, the rows that they received: (experts + 2) x 8 per block that has experts. For `run.noise_scale`: 2 x
    8. Checksums of the tensors that ranks hold alike, in every `faults.check_every`-th step: 1 all_gather of axes of
    the mesh x ranks x 8.
    """
    terms = max(1, job.declared_terms) + len(job.model.losses)
    replicas = job.layout.replicas
    together = INNER if job.layout.replicas > 1 else "world"
    yield _over(job.layout, "sums", "optimizer", together, "all_reduce", sums_bytes(terms))
    yield _over(job.layout, "sums", "optimizer", REPLICAS, "all_reduce", sums_bytes(terms) + WIDE * replicas)
    experts = job.config.model.experts
    layers = range(job.config.model.layers)
    if experts.count:
        payload = WIDE * balance_length(experts.count) * sum(map(experts.in_block, layers))
        yield _over(job.layout, "sums", "optimizer", "world", "all_reduce", payload)
    if job.declared_terms:
        yield _over(job.layout, "sums", "data", together, "all_reduce", WIDE * job.declared_terms)
    if monitored := job.monitored + len(job.config.monitored_names):
        yield _over(job.layout, "sums", "optimizer", "world", "all_reduce", WIDE * 2 * monitored)
    if job.config.run.noise_scale:
        yield _over(job.layout, "sums", "optimizer", "world", "all_reduce", WIDE * 2)
    axes, every = len(job.layout.step_groups()), job.config.faults.check_every
    if every and job.step is not None and job.step % every == 0:
        yield _over(job.layout, "checksums", "metrics", "world", "all_gather", checks_bytes(axes, job.world))
    yield _over(job.layout, "metrics", "metrics", "world", "all_reduce", counts_bytes(axes, job.world))


def stage_calls(job: Job, pp_rank: int) -> list[RepeatedCall]:
    """Return all calls in one step of a rank of a pipeline stage.

    All ranks of a stage make the same calls, unless the optimizer updates whole matrices.
    """
    held, c = job.chunks[pp_rank], job.config
    calls = [*batch(job, held), *(call for stage in held for call in units(job, stage)), *pipeline(job, pp_rank)]
    calls += expand_calls(rank_sums(job, pp_rank))
    if job.step is not None and job.layout.replicas > 1:
        calls += replica_calls(job, pp_rank, moment_of(c.train.local, job.step, job.step == c.train.steps))
    for axis, payload in matrix_calls(job, pp_rank):
        calls.append(replace(_over(job.layout, "matrices", "optimizer", axis, "all_to_all", payload), wire=payload))
    calls += sums(job)
    return [call for call in calls if call.size > 1 and call.times]


def _sum_traffic(traffic: Iterable[tuple[Key, Traffic]], times: int = 1) -> dict[Key, Traffic]:
    totals: dict[Key, Traffic] = {}
    for key, each in traffic:
        totals[key] = totals.get(key, Traffic()).plus(each, times)
    return totals


def by_line(calls: Iterable[RepeatedCall]) -> Detail:
    """Sum calls by phase, axis and op."""
    return _sum_traffic((call.line, call.traffic) for call in calls)


def by_axis(detail: Detail) -> dict[str, Traffic]:
    """Sum traffic by axis."""
    return dict(sorted(_sum_traffic((line.axis, traffic) for line, traffic in detail.items()).items()))


def all_ranks(job: Job) -> Detail:
    """Return the sum of all ranks' ledgers after one training step of a job, by (phase, axis, op)."""
    # When the optimizer updates whole matrices, the ranks of a stage send different amounts.
    if job.config.optimizer.whole_matrices and job.world <= LARGEST_COUNTED:
        places = [job.layout.coordinate(rank) for rank in range(job.world)]
        each = (
            stage_calls(replace(job, replica=at.get(REPLICAS, 0), rank=rank), at["pp"])
            for rank, at in enumerate(places)
        )
        return by_line(call for calls in each for call in calls)
    # Replicas with different shares of the batch have different numbers of micro-batches.
    replicas = job.layout.replicas
    unequal = bool(job.config.train.local.shares)
    jobs = [replace(job, replica=replica) for replica in range(replicas)] if unequal else [job]
    calls = (call for each in jobs for pp_rank in range(job.layout.pp) for call in stage_calls(each, pp_rank))
    return _sum_traffic(((call.line, call.traffic) for call in calls), times=job.world // job.layout.pp // len(jobs))


def predict_rank(config: Config, world: int, rank: int, **step: Any) -> Detail:
    """Return one rank's ledger after one training step, by (phase, axis, op)."""
    job = checked_job(config, world, **step)
    at = job.layout.coordinate(rank)
    return by_line(stage_calls(replace(job, replica=at.get(REPLICAS, 0), rank=rank), at["pp"]))


def predict_detail(config: Config, world: int, **step: Any) -> Detail:
    """Return the sum of all ranks' ledgers after one training step of a config, by (phase, axis, op)."""
    return all_ranks(checked_job(config, world, **step))


def unplanned_axes(config: Config) -> set[str]:
    """Return the axes whose bytes can't be planned: the rows that experts exchange depend on the tokens."""
    return {"ep", EP_NODE, EP_ACROSS, "etp", "edp"} if config.model.experts.count else set()


def predict_step(config: Config, world: int, **step: Any) -> dict[str, Traffic]:
    """Return the traffic of one training step over each axis, summed over all ranks: the `comm` of metrics.jsonl.

    `step` may set `samples` (the step's global batch), `step`, `fields` and `monitored` of `plan.job.Job`.
    """
    return by_axis(predict_detail(config, world, **step))
