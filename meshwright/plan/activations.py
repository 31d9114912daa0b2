"""What a rank keeps for backward: the statements of its parts, followed along its list of the schedule. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.models.description import fields_read
from meshwright.parts.part import BlockUnit, Coordinate, Kernels, MicroBatch, Stage, Unit
from meshwright.plan.job import Job
from meshwright.schedule.kinds import KINDS, computes
from meshwright.schedule.table import MEANING, held


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of one unit and one micro-batch: what is kept (`lasting`), what its backward makes again beside that (less
    what a recomputed block's input already holds), and what its kernels need for a moment."""

    lasting: float
    again: float
    working: float


@lru_cache(maxsize=50_000)
def unit_kept(
    unit: Unit, at: Coordinate, batch: MicroBatch, kernels: Kernels, mode: str, selective: tuple[float, bool]
) -> KeptBytes:
    """Under a recompute mode. `selective`: the share of a block's linear products, and whether the attention core, that
    the mode of this name runs again."""
    kept, working = unit.kept(at, batch, kernels), unit.working(at, batch, kernels)
    everything = sum(each.size for each in kept)
    if not isinstance(unit, BlockUnit) or mode == "none":
        return KeptBytes(everything, 0.0, working)
    stream = batch.rows(at) * unit.hidden * batch.element
    share, core = selective
    if mode == "selective" and core:
        dropped = sum(each.size for each in kept if each.core)
        return KeptBytes(everything - dropped, dropped if not kernels.fused_attention else 0.0, working)
    if mode == "selective":
        if not share:
            return KeptBytes(everything, 0.0, working)
        # The block's input, the attention's output and this share of the products' results are kept.
        products = [product for product in unit.work(at, batch, kernels).products if product.linear]
        scattered = batch.rows(at) / batch.tokens(at)
        results = sum(p.m * p.n * p.count * (scattered if p.scattered else 1.0) for p in products) * batch.element
        output = sum(each.size for each in kept if each.name == "attention output")
        held = stream + output + share * results
        return KeptBytes(held, everything - held, working)
    # The run's input is kept already, and its first norm keeps the same tensor.
    shared = stream if any(each.name == "input" for each in kept) else 0.0
    return KeptBytes(everything, -shared, working)


class Moment(NamedTuple):
    """A moment of a chunk's backward: the number of the unit it works on, the bytes that are kept beyond what the chunk
    keeps after its forward (fewer, once later units are done), and what kernels need for a moment."""

    unit: int
    kept: float
    working: float


@dataclass(frozen=True)
class ChunkBytes:
    """One chunk and one micro-batch: what is kept after its forward, what the loss needs for a moment, and the moments
    of its backward at which the most can be allocated: the first and the last few units."""

    kept: float
    loss: float
    backward: tuple[Moment, ...]


def chunk_bytes(job: Job, stage: Stage, fields: int) -> ChunkBytes:
    """`fields`: how many fields of the batch the rank reads."""
    together = job.config.recompute.blocks
    stream = job.batch.rows(job.at) * job.model.hidden * job.batch.element
    units = [unit_bytes(job, unit) for _, _, unit in job.model.units(stage)]
    first, last = int(stage.first), len(units) - int(stage.last)
    # What is kept and released together: each unit, or each run of blocks that is recomputed.
    parts = [(at, at + 1) for at in range(len(units))]
    if together:
        runs = [(at, min(at + together, last)) for at in range(first, last, together)]
        parts = [*parts[:first], *runs, *parts[last:]]
    kept, again = [], []
    for begin, end in parts:
        inside = units[begin:end]
        if together and first <= begin < last:
            kept.append(stream if job.states.checkpoints_on == "device" else 0.0)
            again.append(sum(each.lasting for each in inside) + inside[0].again)
        else:
            kept.append(inside[0].lasting)
            again.append(inside[0].again)
    done = [0.0, *accumulate(reversed(kept))][::-1][1:]  # of the parts behind each
    shown = {0, 1, *range(len(parts) - 4, len(parts))} & set(range(len(parts)))
    moments = tuple(
        Moment(parts[at][1] - 1, again[at] - done[at], max(each.working for each in units[slice(*parts[at])]))
        for at in sorted(shown, reverse=True)
        if at < len(parts) - int(stage.last)  # the head's gradients are made in forward
    )
    batch = job.batch.tokens(job.at) * 8 * fields if stage.first else 0
    masked = job.batch.documents and stage.layers and job.host  # a CPU keeps the mask itself, too, one byte each
    mask = job.batch.sequences * job.batch.seq**2 if masked else 0
    loss = units[-1].working if stage.last else 0.0
    return ChunkBytes(sum(kept) + batch + mask, loss, moments)


def unit_bytes(job: Job, unit: Unit) -> KeptBytes:
    stack = job.stack
    selective = (stack.selective, stack.selective_core)
    return unit_kept(unit, job.at, job.batch, job.kernels, job.config.recompute.mode, selective)


def chunks_of(job: Job, pp_rank: int) -> list[ChunkBytes]:
    """The chunks of a pipeline rank."""
    held = job.chunks[pp_rank]
    fields = sum(len(fields_read(stage) & set(job.data_fields)) for stage in held if stage.first or stage.last)
    return [chunk_bytes(job, stage, fields) for stage in held]


@lru_cache(maxsize=20_000)
def in_flight(
    kind: str, pp: int, micro_batches: int, chunks: int, rank: int
) -> tuple[frozenset[tuple[tuple[int, ...], int]], frozenset[tuple[tuple[int, ...], int]]]:
    """The numbers of micro-batches of each chunk that are in flight at once on a rank, following its list of the
    schedule: with the chunk of each forward when that ends, and with the chunk of each backward when that begins."""
    flying = [0] * chunks
    forwards: set[tuple[tuple[int, ...], int]] = set()
    backwards: set[tuple[tuple[int, ...], int]] = set()
    for action in computes(kind, pp, micro_batches, chunks, rank):
        direction = MEANING[action.op].direction
        if direction < 0:
            backwards.add((tuple(flying), action.chunk))
        flying[action.chunk] += held(action.op)
        if direction > 0:
            forwards.add((tuple(flying), action.chunk))
    return frozenset(forwards), frozenset(backwards)


def steady(job: Job) -> int:
    """Micro-batches after which a schedule that drains as it fills has no more in flight: the rest repeats. (All of
    them where the schedule does not drain, or does not say.)"""
    pp, m, chunks = job.layout.pp, job.micro_batches, job.config.layout.chunks
    few, formula = min(m, 3 * pp + m % pp), KINDS[job.config.pipeline.schedule].in_flight
    drains = formula is not None and formula(pp, m, chunks, 0) == formula(pp, few, chunks, 0)
    return few if drains else m


def alive(job: Job, pp_rank: int, chunks: list[ChunkBytes]) -> tuple[list[float], list[float]]:
    """The most bytes of all micro-batches in flight on a rank, each as its forward left it: by chunk, right after a
    forward of that chunk, and when a backward of it begins."""
    c = job.config
    forwards, backwards = in_flight(c.pipeline.schedule, c.layout.pp, steady(job), len(chunks), pp_rank)
    lasting = sum(_alibi(job) for stage in job.chunks[pp_rank] if stage.layers)

    def most(found: frozenset[tuple[tuple[int, ...], int]], chunk: int) -> float:
        numbers = (flying for flying, at in found if at == chunk)
        return lasting + max(sum(n * each.kept for n, each in zip(flying, chunks, strict=True)) for flying in numbers)

    numbers = range(len(chunks))
    return [most(forwards, chunk) for chunk in numbers], [most(backwards, chunk) for chunk in numbers]


def _alibi(job: Job) -> float:
    """What ALiBi adds to the scores of a sequence: one tensor for all layers and micro-batches of a chunk."""
    m = job.config.model
    heads = m.heads // job.layout.tp
    return heads * m.seq**2 * job.batch.element if m.position == "alibi" else 0.0


def activations(job: Job, pp_rank: int) -> float:
    """The most bytes that are kept for backward at once on a rank."""
    chunks = chunks_of(job, pp_rank)
    forwards, backwards = alive(job, pp_rank, chunks)
    during = [total + moment.kept for total, chunk in zip(backwards, chunks, strict=True) for moment in chunk.backward]
    return max(*forwards, *during)
