"""Every byte that a training step sends, from the config alone, in exact integers. No torch.

Each source of traffic is one small function with its closed formula. What they yield are calls as one rank's
ledger counts them; sums over calls and ranks equal the `comm` of metrics.jsonl. The letters of the formulas:

    b micro-batch, s sequence, h hidden     T = b s, the tokens of a micro-batch
    M micro-batches of one rank in a step   H = T h a, the bytes of one micro-batch's activations [tokens, hidden]
    t = tp, d = dp x cp, p = pp             a, g, w bytes of one activation, one gradient, one number of the loss
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.comm.ledger import wire_bytes
from meshwright.config.rules import check
from meshwright.config.sections import Config, ZeroConfig
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.layout.chunks import chunk_rows
from meshwright.layout.params import DATA_AXES, ParamRecord
from meshwright.models.description import GPTDescription, Stage, fields_read, layout_of, prefixed, stages
from meshwright.pipeline.table import looped
from meshwright.sharding.placement import backward_order, bucket_elements, divided, grad_bytes, place
from meshwright.train.counts import WIDE, counts_bytes, sums_bytes

# Bytes of one element, by precision and by dtype of a batch's field.
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
FIELD_BYTES = {
    "int64": 8, "float64": 8, "int32": 4, "float32": 4, "int16": 2, "float16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Traffic(NamedTuple):
    """Number of calls, bytes of the whole logical tensors, and bytes that leave the ranks by the ring."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0

    def plus(self, other: Traffic, times: int = 1) -> Traffic:
        return Traffic(*(a + times * b for a, b in zip(self, other, strict=True)))


class Line(NamedTuple):
    """What is counted together: the ledger's entry without layer and node."""

    phase: str
    axis: str
    op: str


@dataclass(frozen=True)
class Call:
    """`times` equal calls of one rank over a group of `size` ranks; `source` is the function that knows why."""

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


@dataclass(frozen=True)
class Job:
    """A config on a number of ranks, and the letters of the formulas. `fields` are the data's, name -> dtype,
    with one element a token; `monitored` is how many values `forward_step` returns beside the loss."""

    config: Config
    layout: Layout
    samples: int
    fields: Mapping[str, str]
    monitored: int = 0

    @property
    def micro_batches(self) -> int:
        return self.samples // (self.layout.size(DATA_AXES) * self.config.train.micro_batch)

    @property
    def tokens(self) -> int:
        return self.config.train.micro_batch * self.config.model.seq

    @property
    def splits_tokens(self) -> bool:
        """Whether each tp rank holds only its rows of the tokens between the products."""
        return self.config.layout.sequence_parallel and self.layout.tp > 1

    @property
    def activation_bytes(self) -> int:
        return BYTES[self.config.train.precision]

    @property
    def hidden_bytes(self) -> int:
        """H = T h a."""
        return self.tokens * self.config.model.hidden * self.activation_bytes

    @property
    def stages(self) -> list[Stage]:
        c = self.config
        return stages(c.model.layers, c.layout.pp * c.layout.chunks, c.pipeline.split)

    def held(self, pp_rank: int) -> list[Stage]:
        """The chunks of a pipeline rank, in the order of the layers."""
        placement = looped(self.layout.pp, self.config.layout.chunks)
        return [stage for stage, (rank, _) in zip(self.stages, placement, strict=True) if rank == pp_rank]

    def tp_call(self, source: str, phase: str, op: str, payload: int, times: int) -> Call:
        return Call(source, phase, self.layout.without_ones("tp"), op, self.layout.tp, payload, times)

    def world_call(self, source: str, phase: str, payload: int) -> Call:
        return Call(source, phase, "world", "all_reduce", self.layout.world, payload)


def job_of(
    config: Config,
    world: int,
    samples: int | None = None,
    fields: Mapping[str, str] | None = None,
    monitored: int = 0,
) -> Job:
    """The checked job. `samples` is the step's global batch (default: the config's, at the end of a ramp)."""
    check(config, world)
    layout = layout_of(config, world)
    samples = config.train.global_batch if samples is None else samples
    unit = layout.size(DATA_AXES) * config.train.micro_batch
    if samples < 1 or samples % unit:
        near = max(1, samples // unit) * unit
        raise UserError(f"samples={samples} is not a multiple of dp x micro_batch = {unit}: try {near}")
    fields = data_fields(config) if fields is None else fields
    for name, dtype in fields.items():
        if dtype not in FIELD_BYTES:
            known = ", ".join(FIELD_BYTES)
            raise UserError(f"field '{name}' has the unknown dtype '{dtype}': use one of {known}")
    return Job(config, layout, samples, fields, monitored)


def data_fields(config: Config) -> dict[str, str]:
    """The fields of a token file's samples."""
    names = ["tokens", "labels", "loss_mask"]
    names += ["positions"] if config.data.reset_positions else []
    names += ["segments"] if config.data.reset_attention else []
    return dict.fromkeys(names, "int64")


# The sources of traffic. Calls over a group of one rank are dropped where they are collected.


def batch(job: Job, held: Sequence[Stage]) -> Iterator[Call]:
    """One tp rank reads; it broadcasts once for each micro-batch and dtype, whatever the number of chunks.

    M x (T x fields of this dtype that a chunk of this rank reads x bytes).
    """
    needs = set().union(*(fields_read(stage) for stage in held))
    dtypes = [dtype for name, dtype in job.fields.items() if name in needs]
    for dtype in dict.fromkeys(dtypes):
        payload = job.tokens * dtypes.count(dtype) * FIELD_BYTES[dtype]
        yield job.tp_call("batch", "data", "broadcast", payload, job.micro_batches)


def embedding(job: Job) -> Iterator[Call]:
    """Rows of the vocabulary lie on different tp ranks, so the looked-up rows are summed.

    Plain: forward 1 all_reduce of H. Split tokens: forward 1 reduce_scatter, backward 1 all_gather of H.
    """
    m, payload = job.micro_batches, job.hidden_bytes
    if not job.splits_tokens:
        yield job.tp_call("embedding", "forward", "all_reduce", payload, m)
        return
    yield job.tp_call("embedding", "forward", "reduce_scatter", payload, m)
    yield job.tp_call("embedding", "backward", "all_gather", payload, m)


def column(job: Job, source: str, products: int) -> Iterator[Call]:
    """Products whose output features are cut: all ranks use the same input, so its gradient is a sum.

    Plain: backward 1 all_reduce of H. Split tokens: forward 1 all_gather; backward 1 all_gather (of the input
    again, which is not kept) and 1 reduce_scatter of H.
    """
    times, payload = job.micro_batches * products, job.hidden_bytes
    if not job.splits_tokens:
        yield job.tp_call(source, "backward", "all_reduce", payload, times)
        return
    yield job.tp_call(source, "forward", "all_gather", payload, times)
    yield job.tp_call(source, "backward", "all_gather", payload, times)
    yield job.tp_call(source, "backward", "reduce_scatter", payload, times)


def row(job: Job, source: str, products: int) -> Iterator[Call]:
    """Products whose input features are cut: the output is a sum.

    Plain: forward 1 all_reduce of H. Split tokens: forward 1 reduce_scatter, backward 1 all_gather of H.
    """
    times, payload = job.micro_batches * products, job.hidden_bytes
    if not job.splits_tokens:
        yield job.tp_call(source, "forward", "all_reduce", payload, times)
        return
    yield job.tp_call(source, "forward", "reduce_scatter", payload, times)
    yield job.tp_call(source, "backward", "all_gather", payload, times)


def blocks(job: Job, count: int) -> Iterator[Call]:
    """A block is two column products (queries, keys and values; up) and two row products (out; down). If blocks are
    recomputed, backward repeats what forward sends."""
    calls = [*column(job, "blocks", 2 * count), *row(job, "blocks", 2 * count)]
    yield from calls
    if job.config.recompute.blocks:
        yield from (replace(call, phase="backward") for call in calls if call.phase == "forward")


def head(job: Job) -> Iterator[Call]:
    """The output layer is one column product; its logits [T, vocab / t] stay where they are.

    Its gradients are made in the forward, chunk by chunk, so with split tokens the input is gathered only there:
    forward 1 all_gather, backward 1 reduce_scatter of H. Plain: backward 1 all_reduce of H.
    """
    calls = list(column(job, "head", 1))
    yield from (call for call in calls if (call.phase, call.op) != ("backward", "all_gather"))


def loss(job: Job) -> Iterator[Call]:
    """Per token the largest of the ranks' log-sums, then the sums of two numbers; backward sends nothing.

    Forward, for each chunk of C tokens: 1 all_reduce of C w and 1 of 2 C w; w is 8 in fp64 and else 4. The chunks
    are the fewest of equal size (but for the last) with at most 2^29 logits on a rank.
    """
    c = job.config
    description = GPTDescription(c.model, c.layout.tp, 0, c.layout.sequence_parallel, c.layout.pp)
    rows = chunk_rows(job.tokens, description.head()["output.weight"].local_shape[0])
    full, rest = divmod(job.tokens, rows)
    for tokens, times in ((rows, full), (rest, min(rest, 1))):
        payload = tokens * max(4, job.activation_bytes)
        yield job.tp_call("loss", "forward", "all_reduce", payload, times * job.micro_batches)
        yield job.tp_call("loss", "forward", "all_reduce", 2 * payload, times * job.micro_batches)


def pipeline(job: Job, pp_rank: int, held: Sequence[Stage]) -> Iterator[Call]:
    """Each chunk sends its output on and its input's gradient back, unless the neighbour is on the same rank.

    M sends of H (H / t with split tokens) in either direction for each boundary between virtual stages: over
    all ranks 2 M (p chunks - 1) x world / p sends where p > 1, under every schedule.
    """
    payload = job.hidden_bytes // (job.layout.tp if job.splits_tokens else 1)
    placement = looped(job.layout.pp, job.config.layout.chunks)
    for step, phase in ((1, "forward"), (-1, "backward")):
        others = [stage.index + step for stage in held if 0 <= stage.index + step < len(placement)]
        crossing = sum(placement[other][0] != pp_rank for other in others)
        yield Call("pipeline", phase, "pp", "send", job.layout.pp, payload, crossing * job.micro_batches)


class Held(NamedTuple):
    """A parameter of a rank, the number of its unit, and how often a micro-batch fetches it in ZeRO stage 3."""

    record: ParamRecord
    unit: int
    fetches: int


def parameters(job: Job, held: Sequence[Stage]) -> list[Held]:
    """The parameters of a rank's chunks in the order of forward, both ends of a tie on one rank counted once, with the
    fetches of both. Of all tp ranks alike: their pieces have one size.

    A unit (embedding, block, head) is fetched for forward and for backward. Of N blocks that are computed again
    together, all but the last are fetched once more for that.
    """
    c = job.config
    description = GPTDescription(c.model, c.layout.tp, 0, c.layout.sequence_parallel, c.layout.pp)
    together = c.recompute.blocks
    found: dict[str, Held] = {}
    units: dict[tuple[int, str], int] = {}
    for stage in held:
        records = description.stage(stage)
        if stage.first and stage.last and c.model.tied_embeddings:
            records |= prefixed("head", description.head())
        for key, record in records.items():
            part = key.split(".")[1] if key.startswith("blocks.") else key.split(".")[0]
            unit = units.setdefault((stage.index, part), len(units))
            at = list(stage.layers).index(int(part)) if part.isdigit() else -1
            again = together > 1 and at >= 0 and (at + 1) % together and at + 1 < len(stage.layers)
            name = f"tie {record.tied}" if record.tied else f"{stage.index} {key}"
            before = found.get(name, Held(record, unit, 0))
            found[name] = before._replace(fetches=before.fetches + (3 if again else 2))
    return list(found.values())


class Packed(NamedTuple):
    """A flat buffer: what its parameters share (dtype, data axes, further partial axes), they in the order of backward,
    (start, bucket) of each and (start, stop) of each bucket."""

    shared: tuple[str, str, tuple[str, ...]]
    items: list[tuple[Held, str]]
    places: list[tuple[int, int]]
    buckets: list[tuple[int, int]]


def packed(
    params: Iterable[tuple[Held, str]], layout: Layout, bucket_mib: float, zero: ZeroConfig, grad_dtype: str
) -> Iterator[Packed]:
    """The buffers of parameters (held, dtype), given in the order of forward, as `sharding` builds them."""
    by_unit = divided(layout, zero)[0] == 3
    keyed = backward_order(params, lambda item: (item[1], item[0].record.data_axes, item[0].record.partial))
    for shared, items in keyed.items():
        sizes, units = [held.record.numel for held, _ in items], [held.unit for held, _ in items]
        elements = bucket_elements(bucket_mib * 2**20, grad_bytes(BYTES[shared[0]], BYTES[grad_dtype]))
        placed = place(sizes, layout.size(shared[1]), elements, units if by_unit else None)
        yield Packed(shared, items, *placed)


def gradients(
    params: Iterable[tuple[Held, str]],
    layout: Layout,
    bucket_mib: float,
    zero: ZeroConfig | None = None,
    micro_batches: int = 1,
    grad_dtype: str = "fp32",
) -> Iterator[Call]:
    """Gradients and weights of parameters (held, dtype), given in the order of forward.

    Parameters of one dtype, data axes and further partial axes share a buffer, in the order of backward. A
    parameter takes its size rounded up to 16 elements; the one that brings a bucket to the bucket size closes it,
    and a bucket is rounded up to 16 d elements; in ZeRO stage 3 a unit's parameters make a bucket. With B the padded
    elements of a bucket, g and w the bytes of a gradient and a weight, S the ranks that divide it, M micro-batches:

    stage 0   1 all_reduce of B g over the data axes
    stage 1   1 reduce_scatter of B g and 1 all_gather of B w over the S ranks
    stage 2   M reduce_scatter of B g and 1 all_gather of B w
    stage 3   M reduce_scatter of B g and M f all_gather of B w, where f is how often a micro-batch fetches it: 2

    and 1 all_reduce of a share, B g / S, over the copies of the S ranks, if there are any, and over each further axis
    along which the gradients are partial sums.
    """
    zero = zero or ZeroConfig()
    stage, shards, replicas = divided(layout, zero)
    for buffer in packed(params, layout, bucket_mib, zero, grad_dtype):
        (dtype, data_axes, partial), items, places, buckets = buffer
        grad, weight = grad_bytes(BYTES[dtype], BYTES[grad_dtype]), BYTES[dtype]
        for number, (start, stop) in enumerate(buckets):
            size = stop - start
            if shards is None:
                yield _over(layout, "gradients", "reduce", data_axes, "all_reduce", size * grad)
            else:
                times = micro_batches if stage >= 2 else 1
                yield _over(layout, "gradients", "reduce", shards, "reduce_scatter", size * grad, times)
                inside = (held for (held, _), (_, where) in zip(items, places, strict=True) if where == number)
                times = micro_batches * max(held.fetches for held in inside) if stage == 3 else 1
                yield _over(layout, "weights", "gather", shards, "all_gather", size * weight, times)
                if replicas is not None:
                    yield _over(layout, "copies", "reduce", replicas, "all_reduce", size * grad // layout.size(shards))
            share = size * grad // (layout.size(shards) if shards else 1)
            for axis in partial:
                yield _over(layout, "shared gradients", "reduce", axis, "all_reduce", share)


def _over(layout: Layout, source: str, phase: str, axes: str, op: str, payload: int, times: int = 1) -> Call:
    return Call(source, phase, layout.without_ones(axes), op, layout.size(axes), payload, times)


def sums(job: Job, held: Sequence[Stage]) -> Iterator[Call]:
    """The small vectors, once a step.

    Loss, tokens and squared gradient norm: 1 all_reduce of 3 x 8 over the world. Values to monitor, if there are
    any, and how often each was given: 1 all_reduce of 2 x values x 8 over the data axes, by the last stage's ranks. The
    metrics, which count themselves: 1 all_reduce of (3 x axes of the mesh + 5 phases) x 8 over the world.
    """
    yield job.world_call("sums", "optimizer", sums_bytes())
    if job.monitored and any(stage.last for stage in held):
        name, size = job.layout.without_ones(DATA_AXES), job.layout.size(DATA_AXES)
        yield Call("sums", "optimizer", name, "all_reduce", size, WIDE * 2 * job.monitored)
    yield job.world_call("metrics", "metrics", counts_bytes(len(job.layout.step_groups())))


def stage_calls(job: Job, pp_rank: int) -> list[Call]:
    """All calls in one step of any rank of a pipeline stage: ranks of one stage send alike."""
    held = job.held(pp_rank)
    calls = list(batch(job, held))
    for stage in held:
        calls += embedding(job) if stage.first else ()
        calls += blocks(job, len(stage.layers))
        calls += [*head(job), *loss(job)] if stage.last else ()
    calls += pipeline(job, pp_rank, held)
    c = job.config
    params = [(param, c.train.precision) for param in parameters(job, held)]
    calls += gradients(params, job.layout, c.comm.bucket_mib, c.zero, job.micro_batches, c.train.grad_dtype)
    calls += sums(job, held)
    return [call for call in calls if call.size > 1 and call.times]


def by_line(calls: Iterable[Call]) -> Detail:
    """Calls summed by phase, axis and op."""
    found: Detail = {}
    for call in calls:
        found[call.line] = found.get(call.line, Traffic()).plus(call.traffic)
    return found


def by_axis(detail: Detail) -> dict[str, Traffic]:
    found: dict[str, Traffic] = {}
    for line, traffic in detail.items():
        found[line.axis] = found.get(line.axis, Traffic()).plus(traffic)
    return dict(sorted(found.items()))


def predict_rank(
    config: Config,
    world: int,
    rank: int,
    samples: int | None = None,
    fields: Mapping[str, str] | None = None,
    monitored: int = 0,
) -> Detail:
    """One rank's ledger after one training step, by (phase, axis, op)."""
    job = job_of(config, world, samples, fields, monitored)
    return by_line(stage_calls(job, job.layout.coordinate(rank)["pp"]))


def predict_detail(
    config: Config,
    world: int,
    samples: int | None = None,
    fields: Mapping[str, str] | None = None,
    monitored: int = 0,
) -> Detail:
    """The ledgers of all ranks together after one training step, by (phase, axis, op)."""
    job = job_of(config, world, samples, fields, monitored)
    found: Detail = {}
    for pp_rank in range(job.layout.pp):
        for line, traffic in by_line(stage_calls(job, pp_rank)).items():
            found[line] = found.get(line, Traffic()).plus(traffic, times=world // job.layout.pp)
    return found


def predict_step(
    config: Config,
    world: int,
    samples: int | None = None,
    fields: Mapping[str, str] | None = None,
    monitored: int = 0,
) -> dict[str, Traffic]:
    """What one training step sends over each axis, summed over all ranks: the `comm` of metrics.jsonl.

    `samples` is the step's global batch (default: the config's). `fields` are those of a dataset that is not a
    token file, name -> dtype, one element a token each. `monitored` is how many values `forward_step` returns
    beside the loss.
    """
    return by_axis(predict_detail(config, world, samples, fields, monitored))
