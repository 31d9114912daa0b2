"""What a rank keeps for backward: the sizes that its parts declare, added up along the rank's schedule. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.plan.job import Job, kept_together
from meshwright.spec.model.description import field_elements, fields_read
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.part import BlockUnit, Coordinate, Kernels, MicroBatch, Unit
from meshwright.spec.schedule.kinds import KINDS, computes
from meshwright.spec.schedule.table import MEANING, held


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of one unit and one micro-batch."""

    lasting: float  # kept for backward
    again: float  # added by recomputation in backward, less what is already kept as a recomputed block's input
    working: float  # temporary workspace of its kernels


@lru_cache(maxsize=50_000)
def unit_kept(
    unit: Unit, at: Coordinate, batch: MicroBatch, kernels: Kernels, mode: str, selective: tuple[float, bool]
) -> KeptBytes:
    """Returns the bytes of a unit under a recompute mode. `selective` says what the mode of this name recomputes: the
    share of a block's linear products, and whether it recomputes the attention core."""
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
    """One unit of a chunk at the time of its backward."""

    unit: int  # its number
    kept: float  # bytes beyond what the chunk keeps after its forward (negative once later units are done)
    working: float  # temporary workspace of its kernels


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one chunk and one micro-batch."""

    kept: float  # after its forward
    loss: float  # temporary workspace of the loss
    backward: tuple[BackwardUnit, ...]  # at whose backward the peak can occur: the first and the last few
    offloaded: float = 0.0  # in host memory after its forward


def chunk_bytes(job: Job, stage: Stage, fields: int) -> ChunkBytes:
    """Returns the bytes of one chunk; `fields` is the number of elements of a micro-batch that the rank reads."""
    together, mode = job.config.recompute.blocks, job.config.recompute.mode
    held, first = [node.unit for node in job.model.nodes_of(stage)], int(stage.first)
    selective = (job.stack.selective, job.stack.selective_core)
    units = [unit_kept(unit, unit.seen_by(job.at), job.batch, job.kernels, mode, selective) for unit in held]
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
    # The last have most of what is kept, the first most gradients; one after the first also brings an input back.
    shown = {*range(4), *range(len(parts) - 4, len(parts))} & set(range(len(parts)))

    def working(at: int) -> float:
        """Of its kernels, and the input of the run before where that is brought back from host memory."""
        own = max(each.working for each in units[slice(*parts[at])])
        return own + streams[parts[at][0]] * (at - first - 1 in away)

    moments = tuple(
        BackwardUnit(parts[at][1] - 1, again[at] - done[at], working(at))
        for at in sorted(shown, reverse=True)
        if at < len(parts) - int(stage.last)  # the head's gradients are computed in forward
    )
    batch = 8 * fields if stage.first else 0
    loss = units[-1].working if stage.last else 0.0
    beside = sum(math.prod(each.shape(job.at, job.batch)) for each in job.model.read_beside(stage)) * job.batch.element
    return ChunkBytes(sum(kept) + batch + beside, loss, moments, streams[0] * len(away))


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
    """What a rank keeps: the bytes of its chunks, and the most of all micro-batches in flight, by chunk: right after a
    forward of that chunk, and when a backward of it begins."""

    chunks: list[ChunkBytes]
    after_forward: list[float]
    before_backward: list[float]
    offloaded: float  # the most of them in host memory


def rank_activations(job: Job, pp_rank: int) -> RankActivations:
    key = ("activations", job.config.recompute, pp_rank)
    if key not in job.known:
        chunks = chunks_of(job, pp_rank)
        job.known[key] = RankActivations(chunks, *bytes_in_flight(job, pp_rank, chunks))
    found: RankActivations = job.known[key]
    return found


Flying = frozenset[tuple[tuple[int, ...], int]]  # (micro-batches of each chunk in flight at once, a chunk)


@lru_cache(maxsize=20_000)
def in_flight(kind: str, pp: int, micro_batches: int, chunks: int, rank: int) -> tuple[Flying, Flying]:
    """Returns the most that is in flight on a rank, following its schedule: with the chunk of each forward as that
    ends, and with the chunk of each backward as that begins."""
    flying = [0] * chunks
    seen: tuple[set[tuple[tuple[int, ...], int]], ...] = (set(), set())
    for action in computes(kind, pp, micro_batches, chunks, rank):
        direction = MEANING[action.op].direction
        if direction < 0:
            seen[1].add((tuple(flying), action.chunk))
        flying[action.chunk] += held(action.op)
        if direction > 0:
            seen[0].add((tuple(flying), action.chunk))
    # With equal numbers of the other chunks, only the most of the chunk itself counts: it comes last and stays.
    most = [{(at, each[:at], each[at + 1 :]): (each, at) for each, at in sorted(found)} for found in seen]
    return frozenset(most[0].values()), frozenset(most[1].values())


def micro_batches_to_steady_state(job: Job) -> int:
    """Returns the number of micro-batches after which no more are in flight at once: from there on a schedule repeats
    itself until it drains. That is all of them if the schedule does not drain, or has no formula."""
    pp, m, chunks = job.layout.pp, job.micro_batches, job.config.layout.chunks
    few, formula = min(m, 3 * pp + m % pp), KINDS[job.config.pipeline.schedule].in_flight
    drains = formula is not None and formula(pp, m, chunks, 0) == formula(pp, few, chunks, 0)
    return few if drains else m


def bytes_in_flight(job: Job, pp_rank: int, chunks: list[ChunkBytes]) -> tuple[list[float], list[float], float]:
    """Returns the most bytes of all micro-batches in flight on a rank, each as its forward left it: by chunk, right
    after a forward of that chunk, and when a backward of it begins; and the most in host memory."""
    c = job.config
    enough = micro_batches_to_steady_state(job)
    forwards, backwards = in_flight(c.pipeline.schedule, c.layout.pp, enough, len(chunks), pp_rank)

    def most(found: Flying, chunk: int) -> float:
        numbers = (flying for flying, at in found if at == chunk)
        return max(sum(n * each.kept for n, each in zip(flying, chunks, strict=True)) for flying in numbers)

    numbers = range(len(chunks))
    away = max(sum(n * each.offloaded for n, each in zip(flying, chunks, strict=True)) for flying, _ in forwards)
    return [most(forwards, chunk) for chunk in numbers], [most(backwards, chunk) for chunk in numbers], away
