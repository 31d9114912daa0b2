"""Every byte that a training step sends, from the config alone, in exact integers. No torch.

Inside the model, parts declare what they communicate (`parts/`); every other source is one small function here
with its closed formula. What they yield are calls as one rank's ledger counts them; sums over calls and ranks equal the
`comm` of metrics.jsonl. The letters of the formulas:

    b micro-batch, s sequence, h hidden     T = b s, the tokens of a micro-batch
    M micro-batches of one rank in a step   H = T h a, the bytes of one micro-batch's activations [tokens, hidden]
    t = tp, d = dp x cp, p = pp             a, g, w bytes of one activation, one gradient, one number of the loss
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from meshwright.config.comm import GatherConfig
from meshwright.config.sections import Config, ZeroConfig
from meshwright.engine.sharding.compression.sizes import gathered_bytes
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, ReducerPlan, mixing
from meshwright.plan.answers import answer_collectives
from meshwright.plan.held import HeldParameter, dtype_of, packed, parameters
from meshwright.plan.job import FIELD_BYTES, Job, checked_job
from meshwright.plan.stack import BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout import INNER, REPLICAS
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.description import field_elements, fields_read, stages_of
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.part import Collective, Coordinate, MicroBatch, Unit
from meshwright.spec.traffic.algorithms import neighbours_on_node
from meshwright.spec.traffic.counts import WIDE, balance_length, checks_bytes, counts_bytes, sums_bytes
from meshwright.spec.traffic.fragments import Moment, fragment_bounds, moment_of
from meshwright.spec.traffic.ledger import wire_bytes
from meshwright.spec.traffic.placement import copy_axis, grad_bytes, shard_axes


class Traffic(NamedTuple):
    """A number of calls, the bytes of the whole logical tensors, and the bytes that leave the ranks by the ring."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        return Traffic(*(a + times * b for a, b in zip(self, other, strict=True)))


class Line(NamedTuple):
    """The key under which traffic is summed: a ledger entry without layer and node."""

    phase: str
    axis: str
    op: str


@dataclass(frozen=True)
class RepeatedCall:
    """`times` equal calls of one rank over a group of `size` ranks; the function `source` here explains them."""

    source: str
    phase: str
    axis: str
    op: str
    size: int
    payload: int
    times: int = 1

    @property
    def line(self) -> Line:
        return Line(self.phase, self.axis, self.op)

    @property
    def traffic(self) -> Traffic:
        wire = wire_bytes(self.op, self.payload, self.size)
        return Traffic(self.times, self.times * self.payload, self.times * wire)


Detail = dict[Line, Traffic]
Key = TypeVar("Key", Line, str)


# The sources of traffic. Calls over a group of one rank are dropped by `stage_calls`.


def batch(job: Job, held: Sequence[Stage]) -> Iterator[RepeatedCall]:
    """One tp rank reads the batch; it broadcasts once per micro-batch and dtype, whatever the number of chunks:
    M x (elements of the fields of this dtype that a chunk of this rank reads x bytes), T for most fields."""
    needs = set().union(*(fields_read(stage, job.model, job.layout.cp) for stage in held))
    fields = {name: dtype for name, dtype in job.data_fields.items() if name in needs}
    for dtype in dict.fromkeys(fields.values()):
        names = (name for name, own in fields.items() if own == dtype)
        payload = sum(field_elements(name, job.model, job.at, job.batch) for name in names) * FIELD_BYTES[dtype]
        if dtype == "int64" and job.layout.cp > 1:  # the numbers and the documents of all ranks' rows travel with them
            payload += job.batch.sequences * job.batch.seq * (1 + ("segments" in job.data_fields)) * WIDE
        yield _over(job.layout, "batch", "data", "tp", "broadcast", payload, job.micro_batches)


def units(job: Job, stage: Stage) -> Iterator[RepeatedCall]:
    """What the parts of a stage declare, once per micro-batch. Recomputation repeats a block's forward in backward."""
    for unit, count in job.units(stage):
        again = unit.stackable and job.config.recompute.blocks > 0
        for call in (*unit_collectives(unit, job.at, job.batch), *answer_collectives(job, unit)):
            times = count * call.times * job.micro_batches
            repeats = again and call.phase == "forward" and not call.replayed
            for phase in (call.phase, "backward") if repeats else (call.phase,):
                yield _over(job.layout, "units", phase, call.axis, call.op, call.payload, times)


@lru_cache(maxsize=20_000)
def unit_collectives(unit: Unit, at: Coordinate, batch: MicroBatch) -> tuple[Collective, ...]:
    return tuple(unit.collectives(at, batch))


def passed_bytes(job: Job, stage: Stage, back: bool = False) -> list[int]:
    """Returns the bytes of each tensor that a stage receives for one micro-batch from the one before; or sends back."""
    shapes = job.model.passes(job.at, job.batch, stage).items()
    left = job.model.ungraded if back else ()
    return [math.prod(shape) * job.batch.element for name, shape in shapes if name not in left]


def crossings(job: Job, pp_rank: int) -> list[tuple[int, int]]:
    """Returns, by chunk of a pipeline rank, whether its forward and its backward send to another rank."""
    places = job.placement

    def crosses(index: int) -> int:
        return int(0 <= index < len(places) and places[index][0] != pp_rank)

    return [(crosses(stage.index + 1), crosses(stage.index - 1)) for stage in job.chunks[pp_rank]]


def pipeline(job: Job, pp_rank: int) -> Iterator[RepeatedCall]:
    """Each chunk sends its output on and its input's gradient back, unless the neighbour is on the same rank.

    M sends of H (H / t with split tokens) in either direction for each boundary between virtual stages: over all ranks
    2 M (p chunks - 1) x world / p sends where p > 1, under every schedule that goes round the ranks. Between stages of
    a decoder that attends to an encoder there are two sends, the second of the encoder's output. A program that
    scatters its sends gathers each one over tp after receiving it.
    """
    stages, divided = stages_of(job.config), job.layout.tp if job.scatters_sends else 1
    payloads: Counter[tuple[str, int]] = Counter()
    for stage, crosses in zip(job.chunks[pp_rank], crossings(job, pp_rank), strict=True):
        for phase, does, taker in zip(("forward", "backward"), crosses, (stage.index + 1, stage.index), strict=True):
            sizes = passed_bytes(job, stages[taker], phase == "backward") if does else ()
            payloads.update((phase, size) for size in sizes)
    for (phase, payload), count in payloads.items():
        yield _over(job.layout, "pipeline", phase, "pp", "send", payload // divided, count * job.micro_batches)
        if job.scatters_sends:
            yield _over(job.layout, "pipeline", phase, "tp", "all_gather", payload, count * job.micro_batches)


def gradients(
    params: Iterable[tuple[HeldParameter, str]],
    layout: Layout,
    bucket_mib: float,
    zero: ZeroConfig | None = None,
    micro_batches: int = 1,
    grad_dtype: str = "fp32",
    reducer: ReducerPlan = PLAIN_REDUCER,
    align: int = 0,
    gather: GatherConfig | None = None,
) -> Iterator[RepeatedCall]:
    """Gradients and weights of parameters (held, dtype), given in the order of forward.

    Parameters of one dtype, data axes and further partial axes share a buffer, in the order of backward. A
    parameter takes its size rounded up to 16 elements; the one that brings a bucket to the bucket size closes it,
    and a bucket is rounded up to 16 d elements; in ZeRO stage 3 a unit's parameters make a bucket. With B the padded
    elements of a bucket, g and w the bytes of a gradient and a weight, S the ranks that divide it, M micro-batches:

    stage 0   1 all_reduce of B g over the data axes
    stage 1   1 reduce_scatter of B g and 1 all_gather of B w over the S ranks
    stage 2   M reduce_scatter of B g and 1 all_gather of B w
    stage 3   M reduce_scatter of B g and M f all_gather of B w, where f is how often a micro-batch fetches it: 2; all
              but the first are inside the node, where that keeps a copy

    and 1 all_reduce of a share, B g / S, over the copies of the S ranks, if there are any, and over each further axis
    along which the gradients are partial sums. A `reducer` may make other calls for the sums over the data axes.
    `gather`: how weights travel in stage 3.
    """
    zero, align = zero or ZeroConfig(), align or mixing(reducer)
    for shared, items, places, buckets in packed(params, layout, bucket_mib, zero, grad_dtype, align):
        dtype, data_axes, partial, trained, mixed = shared
        summing = reducer if mixed or not reducer.mixes else PLAIN_REDUCER
        stage, shards, replicas = shard_axes(layout, zero, data_axes, trained)
        grad, weight = grad_bytes(BYTES[dtype], BYTES[grad_dtype]), BYTES[dtype]
        for number, (start, stop) in enumerate(buckets):
            size = stop - start
            share = size // (layout.size(shards) if shards else 1)
            inside = [held for (held, _), (_, where) in zip(items, places, strict=True) if where == number]
            records = [held.record for held in inside]
            if shards is None:
                sums = [("gradients", data_axes, "all_reduce", size, records, 1)]
            else:
                sums = [("gradients", shards, "reduce_scatter", size, records, micro_batches if stage >= 2 else 1)]
                sums += [("copies", replicas, "all_reduce", share, [], 1)] if replicas is not None else []
                times = micro_batches * max(held.fetches for held in inside) if stage == 3 else 1
                how = gather if gather and stage == 3 else GatherConfig()
                how = replace(how, kind="plain") if dtype == "nf4" else how  # which is in few bits already
                payload = gathered_bytes(how, size, weight, layout.size(shards))
                if node := copy_axis(layout, zero, how, data_axes):
                    yield _over(layout, "weights", "gather", node, "all_gather", size * weight, times - 1)
                    times = 1
                yield _over(layout, "weights", "gather", shards, "all_gather", payload, times)
            for source, axes, asked, elements, of, times in sums if trained else []:
                own = reducer is not PLAIN_REDUCER and "." not in axes
                on_node = neighbours_on_node(layout.group(axes, 0), layout.node_size or layout.world) if own else 1
                for op, payload in summing.calls(asked, elements, grad, layout.size(axes), of, on_node):
                    yield _over(layout, source, "reduce", axes, op, payload, times)
            for axis in partial:
                yield _over(layout, "shared gradients", "reduce", axis, "all_reduce", share * grad)


def _over(layout: Layout, source: str, phase: str, axes: str, op: str, payload: int, times: int = 1) -> RepeatedCall:
    return RepeatedCall(source, phase, layout.without_ones(axes), op, layout.size(axes), payload, times)


def synchronised(job: Job, params: Iterable[tuple[HeldParameter, str]], moment: Moment) -> Iterator[RepeatedCall]:
    """What replicas sum of their parameters (held, dtype), given in the order of forward, at this moment.

    With S a rank's share of a bucket, n replicas and F fragments, a fragment of a share is about S / F elements, in
    multiples of 16 n: 1 all_reduce of them in float32, or what compressing makes of that. What both ends of a tie hold
    is averaged over them when it has arrived.
    """
    c, layout, n = job.config, job.layout, job.layout.replicas
    for shared, _, _, buckets in packed(params, layout, c.comm.bucket_mib, c.zero, c.train.grad_dtype, job.mixing):
        dtype, data_axes, partial, trained, mixed = shared
        shards, wide = shard_axes(layout, c.zero, data_axes, trained).shards, max(4, BYTES[dtype])
        compresses = mixed and not partial and (job.step or 0) > c.train.local.compress.warmup_steps
        reducer = job.outer_sums if compresses else PLAIN_REDUCER
        for size in (stop - start for start, stop in buckets if trained):
            share = size // (layout.size(shards) if shards else 1)
            bounds = fragment_bounds(share, c.train.local.fragments, n)
            for low, high in (bounds[f] for f in moment.begin if bounds[f][1] > bounds[f][0]):
                for op, payload in reducer.calls("all_reduce", high - low, wide, n):
                    yield _over(layout, "synchronised", "outer", REPLICAS, op, payload)
            arrived = (*moment.arrive, *(moment.begin if moment.at_once else ()))
            for low, high in (bounds[f] for f in arrived if bounds[f][1] > bounds[f][0] and "embedding" in partial):
                payload = (min(high, share) - low) * wide
                yield _over(layout, "synchronised", "outer", "embedding", "all_reduce", payload)


def round_calls(job: Job, pp_rank: int) -> list[RepeatedCall]:
    """Returns what a rank sends to synchronise all of its parameters once, as happens every `train.local.steps`."""
    c = job.config
    everything = Moment((), tuple(range(c.train.local.fragments)), at_once=True)
    params = [(param, dtype_of(param.record, c.train.precision)) for param in parameters(job, job.chunks[pp_rank])]
    after_warmup = replace(job, step=c.train.local.compress.warmup_steps + 1)
    found = synchronised(after_warmup, params, everything) if job.layout.replicas > 1 else ()
    return [call for call in found if call.size > 1]


def mean_traffic(job: Job, pp_rank: int) -> dict[str, Traffic]:
    """Returns what a rank of a pipeline stage sends over each axis in a step; of synchronisations, which most steps
    have none of, the mean, rounded down."""
    return _with_rounds(job, by_axis(by_line(stage_calls(job, pp_rank))), [pp_rank], 1)


def mean_of_all_ranks(job: Job) -> dict[str, Traffic]:
    """Returns the same, summed over all ranks."""
    return _with_rounds(job, by_axis(all_ranks(job)), range(job.layout.pp), job.world // job.layout.pp)


def _with_rounds(job: Job, found: dict[str, Traffic], pp_ranks: Iterable[int], times: int) -> dict[str, Traffic]:
    steps = job.config.train.local.steps
    for rounds in (by_axis(by_line(round_calls(job, pp_rank))) for pp_rank in pp_ranks):
        for axis, whole in rounds.items():
            found[axis] = found.get(axis, Traffic()).plus(Traffic(*(times * each // steps for each in whole)))
    return dict(sorted(found.items()))


def sums(job: Job) -> Iterator[RepeatedCall]:
    """The small vectors, each 1 all_reduce over the world per step.

    Loss, tokens and squared gradient norm: 3 x 8. With n replicas these are summed inside a replica first, as are
    declared terms, and then over the replicas, with each one's tokens: (3 + n) x 8. Values to monitor, if there are
    any, and how often each was given: 2 x values x 8, from the second step on, when all ranks know their names. The
    metrics, which count themselves: (4 x axes of the mesh + 5 phases + 4 x ranks + 1) x 8.
    With experts, their rows: (experts + 2) x 8 per block that has them. Checksums of what ranks hold alike, in every
    `faults.check_every`-th step: 1 all_gather of axes of the mesh x ranks x 8.
    """
    terms = max(1, job.declared_terms) + len(job.model.losses)
    replicas, together = job.layout.replicas, INNER if job.layout.replicas > 1 else "world"
    yield _over(job.layout, "sums", "optimizer", together, "all_reduce", sums_bytes(terms))
    yield _over(job.layout, "sums", "optimizer", REPLICAS, "all_reduce", sums_bytes(terms) + WIDE * replicas)
    experts, layers = job.config.model.experts, range(job.config.model.layers)
    if experts.count:
        payload = WIDE * balance_length(experts.count) * sum(map(experts.in_block, layers))
        yield _over(job.layout, "sums", "optimizer", "world", "all_reduce", payload)
    if job.declared_terms:
        yield _over(job.layout, "sums", "data", together, "all_reduce", WIDE * job.declared_terms)
    if monitored := job.monitored + len(job.config.monitored):
        yield _over(job.layout, "sums", "optimizer", "world", "all_reduce", WIDE * 2 * monitored)
    axes, every = len(job.layout.step_groups()), job.config.faults.check_every
    if every and job.step is not None and job.step % every == 0:
        yield _over(job.layout, "checksums", "metrics", "world", "all_gather", checks_bytes(axes, job.world))
    yield _over(job.layout, "metrics", "metrics", "world", "all_reduce", counts_bytes(axes, job.world))


def stage_calls(job: Job, pp_rank: int) -> list[RepeatedCall]:
    """Returns all calls in one step of any rank of a pipeline stage: all ranks of a stage send the same."""
    held, c = job.chunks[pp_rank], job.config
    params = [(param, dtype_of(param.record, c.train.precision)) for param in parameters(job, held)]
    calls = [*batch(job, held), *(call for stage in held for call in units(job, stage)), *pipeline(job, pp_rank)]
    calls += gradients(
        params,
        job.layout,
        c.comm.bucket_mib,
        c.zero,
        job.micro_batches,
        c.train.grad_dtype,
        job.sums,
        job.mixing,
        c.comm.gather,
    )
    if job.step is not None and job.layout.replicas > 1:
        calls += synchronised(job, params, moment_of(c.train.local, job.step, job.step == c.train.steps))
    calls += sums(job)
    return [call for call in calls if call.size > 1 and call.times]


def _summed(traffic: Iterable[tuple[Key, Traffic]], times: int = 1) -> dict[Key, Traffic]:
    found: dict[Key, Traffic] = {}
    for key, each in traffic:
        found[key] = found.get(key, Traffic()).plus(each, times)
    return found


def by_line(calls: Iterable[RepeatedCall]) -> Detail:
    """Sums calls by phase, axis and op."""
    return _summed((call.line, call.traffic) for call in calls)


def by_axis(detail: Detail) -> dict[str, Traffic]:
    return dict(sorted(_summed((line.axis, traffic) for line, traffic in detail.items()).items()))


def all_ranks(job: Job) -> Detail:
    """Returns the sum of all ranks' ledgers after one training step, by (phase, axis, op)."""
    replicas, unequal = job.layout.replicas, bool(job.config.train.local.shares)
    jobs = [replace(job, replica=replica) for replica in range(replicas)] if unequal else [job]
    calls = (call for each in jobs for pp_rank in range(job.layout.pp) for call in stage_calls(each, pp_rank))
    return _summed(((call.line, call.traffic) for call in calls), times=job.world // job.layout.pp // len(jobs))


def predict_rank(config: Config, world: int, rank: int, **step: Any) -> Detail:
    """Returns one rank's ledger after one training step, by (phase, axis, op)."""
    job = checked_job(config, world, **step)
    at = job.layout.coordinate(rank)
    return by_line(stage_calls(replace(job, replica=at.get(REPLICAS, 0)), at["pp"]))


def predict_detail(config: Config, world: int, **step: Any) -> Detail:
    """Returns the sum of all ranks' ledgers after one training step, by (phase, axis, op)."""
    return all_ranks(checked_job(config, world, **step))


def unplanned_axes(config: Config) -> set[str]:
    """Returns the axes whose bytes depend on the tokens: what experts exchange is not known beforehand."""
    return {"ep", EP_NODE, EP_ACROSS, "etp", "edp"} if config.model.experts.count else set()


def predict_step(config: Config, world: int, **step: Any) -> dict[str, Traffic]:
    """Returns what one training step sends over each axis, summed over all ranks: the `comm` of metrics.jsonl. `step`
    may set `samples` (the step's global batch), `step`, `fields` and `monitored` of `plan.job.Job`."""
    return by_axis(predict_detail(config, world, **step))
