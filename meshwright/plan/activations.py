"""What a rank keeps for backward: the sizes that its parts declare, added up along the rank's schedule. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.plan.job import Job, kept_together, remembered
from meshwright.spec.model.description import field_elements, fields_read
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.part import BlockUnit, Coordinate, Kernels, MicroBatch, Unit
from meshwright.spec.schedule.kinds import KINDS, computes
from meshwright.spec.schedule.table import ACTIVATIONS, FACTORS, Op, held


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of one unit and one micro-batch."""

    lasting: float  # kept for backward
    again: float  # added by recomputation in backward, less what is already kept as a recomputed block's input
    working: float  # temporary workspace of its kernels
    factors: float = 0.0  # kept by a backward that defers weight gradients
    split_working: float = 0.0  # temporary workspace of such a backward


@lru_cache(maxsize=50_000)
def unit_kept(
    unit: Unit, at: Coordinate, batch: MicroBatch, kernels: Kernels, mode: str, selective: tuple[float, bool],
    splits: bool = False,
) -> KeptBytes:  # fmt: skip
    """Returns the bytes of a unit under a recompute mode. `selective` says what the mode of this name recomputes: the
    share of a block's linear products, and whether it recomputes the attention core. `splits`: weight gradients are
    deferred somewhere."""
    if splits:
        factors, working = unit.factors(at, batch, kernels), unit.split_working(at, batch, kernels)
        plain = unit_kept(unit, at, batch, kernels, mode, selective)
        return replace(plain, factors=factors, split_working=working)
    stated, working = unit.kept(at, batch, kernels), unit.working(at, batch, kernels)
    kept = [each for each in stated if not each.passing]
    everything, passing = sum(each.size for each in kept), sum(each.size for each in stated if each.passing)
    if not isinstance(unit, BlockUnit) or mode == "none":
        return KeptBytes(everything, passing, working)
    stream = unit.rows.of(batch).rows(at) * unit.hidden * batch.element
    share, core = selective
    if mode == "selective" and core:
        dropped = sum(each.size for each in kept if each.core)
        return KeptBytes(everything - dropped, passing + (dropped if not kernels.fused_attention else 0.0), working)
    if mode == "selective" and not share:
        return KeptBytes(everything, passing, working)
    if mode == "selective":
        # The block's input, the attention output and this share of the products' results are kept.
        products = [product for product in unit.work(at, batch, kernels).products if product.linear]
        scattered = unit.rows.of(batch).rows(at) / unit.rows.of(batch).tokens(at)
        results = sum(p.m * p.n * p.count * (scattered if p.scattered else 1.0) for p in products) * batch.element
        output = sum(each.size for each in kept if each.name == "attention output")
        held = stream + output + share * results
        return KeptBytes(held, everything - held, working)
    # The input of the recomputed blocks is kept already, and their first norm saves the same tensor.
    shared = stream if any(each.name == "input" for each in kept) else 0.0
    return KeptBytes(everything, passing - shared, working)


class BackwardUnit(NamedTuple):
    """One unit of a chunk at the time of its backward, or of what it does of one."""

    unit: int  # its number
    kept: float  # bytes beyond what the chunk keeps before (negative once later units are done)
    working: float  # temporary workspace of its kernels


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one chunk and one micro-batch."""

    kept: float  # after its forward
    loss: float  # temporary workspace of the loss
    backward: dict[Op, tuple[BackwardUnit, ...]]  # where the peak can occur, by compute: at the first and last few
    factors: float = 0.0  # after a backward that defers weight gradients
    offloaded: float = 0.0  # in host memory after its forward


def chunk_bytes(job: Job, stage: Stage, fields: int) -> ChunkBytes:
    """Returns the bytes of one chunk; `fields` is the number of elements of a micro-batch that the rank reads."""
    together, mode = job.config.recompute.blocks, job.config.recompute.mode
    held, first = [node.unit for node in job.model.nodes_of(stage)], int(stage.first)
    selective = (job.stack.selective, job.stack.selective_core)
    splits = job.splits_backwards
    units = [unit_kept(unit, unit.seen_by(job.at), job.batch, job.kernels, mode, selective, splits) for unit in held]
    streams = [unit.rows.of(job.batch).rows(job.at) * job.model.hidden * job.batch.element for unit in held]
    parts = kept_together(held, together)
    kept, again, away = [], [], _offloaded(job, stage, len(parts) - first - int(stage.last))
    for number, (begin, end) in enumerate(parts, start=-first):
        inside, stream = units[begin:end], streams[begin]
        if together and held[begin].stackable:
            kept.append(0.0 if number in away or job.states.checkpoints_on != "device" else stream)
            again.append(sum(each.lasting for each in inside) + inside[0].again + stream * (number in away))
        else:
            kept.append(inside[0].lasting)
            again.append(inside[0].again)
    done = [0.0, *accumulate(reversed(kept))][::-1][1:]  # bytes kept by the parts after each
    factors = [sum(each.factors for each in units[begin:end]) for begin, end in parts]
    came = [0.0, *accumulate(reversed(factors))][::-1]  # bytes of the factors of each part and those after it
    # The last have most of what is kept, the first most gradients; one after the first also brings an input back. The
    # head's gradients are computed in forward.
    shown = sorted({*range(4), *range(len(parts) - 4, len(parts))} & set(range(len(parts) - int(stage.last))))[::-1]

    def moments(op: Op) -> Iterator[BackwardUnit]:
        for at in shown:
            inside, unit = units[slice(*parts[at])], parts[at][1] - 1
            brought = streams[parts[at][0]] * (at - first - 1 in away)  # the input of the run before, from host memory
            if op is Op.WEIGHT_GRAD:
                yield BackwardUnit(unit, -came[at + 1], 0.0)
            elif op is Op.INPUT_GRAD:
                working = max(each.split_working for each in inside) + brought
                yield BackwardUnit(unit, again[at] - done[at] + came[at + 1], working)
            else:
                yield BackwardUnit(unit, again[at] - done[at], max(each.working for each in inside) + brought)

    ops = (Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD) if splits else (Op.BACKWARD,)
    batch = 8 * fields if stage.first else 0
    loss = units[-1].working if stage.last else 0.0
    beside = sum(math.prod(each.shape(job.at, job.batch)) for each in job.model.read_beside(stage)) * job.batch.element
    backward = {op: tuple(moments(op)) for op in ops}
    return ChunkBytes(sum(kept) + batch + beside, loss, backward, came[0], streams[0] * len(away))


def _offloaded(job: Job, stage: Stage, runs: int) -> range:
    """Returns which of a chunk's runs of recomputed blocks have their input in host memory; a CPU's is its own."""
    return range(0) if job.host else job.config.recompute.offloaded(runs, stage.first, stage.last)


def chunks_of(job: Job, pp_rank: int) -> list[ChunkBytes]:
    """Returns the bytes of each chunk of a pipeline rank."""
    held = job.chunks[pp_rank]
    ends = [stage for stage in held if job.model.fields(stage)]
    read = (name for stage in ends for name in fields_read(stage, job.model, job.layout.cp) & set(job.data_fields))
    fields = sum(field_elements(name, job.model, job.at, job.batch) for name in read)
    return [chunk_bytes(job, stage, fields) for stage in held]


class RankActivations(NamedTuple):
    """The bytes that a rank keeps: of its chunks, and the most of all micro-batches in flight, by chunk: right after a
    forward of that chunk, and before each other compute of it."""

    chunks: list[ChunkBytes]
    after_forward: list[float]
    before: list[dict[Op, float]]
    offloaded: float  # the most of them in host memory


@remembered("recompute")
def rank_activations(job: Job, pp_rank: int) -> RankActivations:
    chunks = chunks_of(job, pp_rank)
    return RankActivations(chunks, *bytes_in_flight(job, pp_rank, chunks))


# By chunk, the micro-batches in flight that hold activations, and those that hold factors.
Flying = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=20_000)
def in_flight(kind: str, pp: int, micro_batches: int, chunks: int, rank: int) -> dict[tuple[Op, int], set[Flying]]:
    """Returns the most that is in flight on a rank, following its schedule, by a compute and its chunk: as a forward
    ends, and as another compute begins."""
    activations, factors = [0] * chunks, [0] * chunks
    seen: dict[tuple[Op, int], set[Flying]] = {}
    for action in computes(kind, pp, micro_batches, chunks, rank):
        here = seen.setdefault((action.op, action.chunk), set())
        if action.op is not Op.FORWARD:
            here.add((tuple(activations), tuple(factors)))
        activations[action.chunk] += held(action.op, ACTIVATIONS)
        factors[action.chunk] += held(action.op, FACTORS)
        if action.op is Op.FORWARD:
            here.add((tuple(activations), tuple(factors)))
    return {place: _most(found, place[1]) for place, found in seen.items()}


def _most(found: set[Flying], at: int) -> set[Flying]:
    """With equal numbers of everything else, only the most activations of the chunk itself count."""
    kept = {((each[:at], each[at + 1 :]), factors): (each, factors) for each, factors in sorted(found)}
    return set(kept.values())


def micro_batches_to_steady_state(job: Job) -> int:
    """Returns the number of micro-batches after which no more are in flight at once: from there on a schedule repeats
    itself until it drains. That is all of them if the schedule does not drain, or has no formula."""
    pp, m, chunks = job.layout.pp, job.micro_batches, job.config.layout.chunks
    few, formula = min(m, 3 * pp + m % pp), KINDS[job.config.pipeline.schedule].in_flight
    drains = formula is not None and formula(pp, m, chunks, 0) == formula(pp, few, chunks, 0)
    return few if drains else m


def bytes_in_flight(
    job: Job, pp_rank: int, chunks: list[ChunkBytes]
) -> tuple[list[float], list[dict[Op, float]], float]:
    """Returns the most bytes of all micro-batches in flight on a rank: by chunk, right after a forward of that chunk,
    and when other computes of it begin; and the most in host memory."""
    c = job.config
    flying = in_flight(c.pipeline.schedule, c.layout.pp, micro_batches_to_steady_state(job), len(chunks), pp_rank)

    def held_by(activations: tuple[int, ...], factors: tuple[int, ...]) -> float:
        return sum(n * one.kept + k * one.factors for n, k, one in zip(activations, factors, chunks, strict=True))

    def away(activations: tuple[int, ...]) -> float:
        return sum(n * one.offloaded for n, one in zip(activations, chunks, strict=True))

    most = {place: max(held_by(*each) for each in found) for place, found in flying.items()}
    numbers = range(len(chunks))
    before: list[dict[Op, float]] = [{} for _ in chunks]
    for (op, chunk), size in most.items():
        if op is not Op.FORWARD:
            before[chunk][op] = size
    forwards = [numbers for (op, _), found in flying.items() if op is Op.FORWARD for numbers, _ in found]
    return [most[Op.FORWARD, chunk] for chunk in numbers], before, max(map(away, forwards))
