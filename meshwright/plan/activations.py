"""Adds up the bytes that a rank saves for backward, from the sizes that parts declare and the schedule. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from meshwright.config.memory import Place, Recomputed
from meshwright.plan.job import Job, remember, saved_together
from meshwright.spec.model.description import field_elements, fields_read
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.part import BlockUnit, Coordinate, Kernels, MicroBatch, Unit
from meshwright.spec.schedule.kinds import KINDS, computes
from meshwright.spec.schedule.table import ACTIVATIONS, FACTORS, Op, held


@dataclass(frozen=True)
class UnitSavedBytes:
    """Bytes of one unit for one micro-batch."""

    lasting: float  # Saved for backward.
    again: float  # Added by recomputation in backward, less the input that recomputed blocks keep anyway.
    working: float  # Workspace of the unit's kernels.
    factors: float = 0.0  # Kept by a backward that defers weight gradients.
    split_working: float = 0.0  # Workspace of such a backward.


@lru_cache(maxsize=50_000)
def saved_by_unit(
    unit: Unit, at: Coordinate, batch: MicroBatch, kernels: Kernels, again: Recomputed, selective: tuple[float, bool],
    splits: bool = False,
) -> UnitSavedBytes:  # fmt: skip
    """Return the bytes of a unit of which backward computes a part again.

    `selective` describes the recompute mode of that name: the share of a block's linear products that it recomputes,
    and whether it recomputes the attention core. `splits` says that the schedule defers weight gradients.
    """
    if splits:
        factors, working = unit.factors(at, batch, kernels), unit.split_workspace(at, batch, kernels)
        plain = saved_by_unit(unit, at, batch, kernels, again, selective)
        return replace(plain, factors=factors, split_working=working)
    declared, working = unit.saved(at, batch, kernels), unit.workspace(at, batch, kernels)
    kept = [each for each in declared if not each.passing]
    everything = sum(each.size for each in kept)
    passing = sum(each.size for each in declared if each.passing)
    if not isinstance(unit, BlockUnit) or again is Recomputed.NOTHING:
        return UnitSavedBytes(everything, passing, working)
    stream = unit.rows.of(batch).rows(at) * unit.hidden * batch.element
    share, core = selective
    if again is Recomputed.CORE and core:
        dropped = sum(each.size for each in kept if each.core)
        return UnitSavedBytes(
            everything - dropped, passing + (dropped if not kernels.fused_attention else 0.0), working
        )
    if again is Recomputed.CORE and not share:
        return UnitSavedBytes(everything, passing, working)
    if again is Recomputed.CORE:
        # The block's input, the attention output and this share of the products' results are kept.
        products = [product for product in unit.work(at, batch, kernels).products if product.linear]
        scattered = unit.rows.of(batch).rows(at) / unit.rows.of(batch).tokens(at)
        results = sum(p.m * p.n * p.count * (scattered if p.scattered else 1.0) for p in products) * batch.element
        output = sum(each.size for each in kept if each.name == "attention output")
        held = stream + output + share * results
        return UnitSavedBytes(held, everything - held, working)
    # The input of the recomputed blocks is kept already, and their first norm saves the same tensor.
    shared = stream if any(each.name == "input" for each in kept) else 0.0
    return UnitSavedBytes(everything, passing - shared, working)


class BackwardUnit(NamedTuple):
    """The bytes of a chunk while one of its units computes its backward, or one half of a split backward."""

    unit: int  # The number of the unit.
    kept: float  # Saved bytes relative to those when the action began (negative once later units have finished).
    working: float  # Workspace of the unit's kernels.


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one chunk for one micro-batch."""

    kept: float  # Saved after the chunk's forward.
    loss: float  # Workspace of the loss.
    backward: dict[Op, tuple[BackwardUnit, ...]]  # By action, the first and last few units: the peak is at one of them.
    factors: float = 0.0  # Kept after a backward that defers weight gradients.
    offloaded: float = 0.0  # In host memory after the chunk's forward.


def chunk_bytes(job: Job, stage: Stage, fields: int) -> ChunkBytes:
    """Return the bytes of one chunk. `fields` is the number of elements of a micro-batch that the rank reads."""
    together, part = job.config.recompute.blocks, job.config.recompute.part
    held, first = [node.unit for node in job.model.nodes_of(stage)], int(stage.first)
    selective = (job.stack.selective, job.stack.selective_core)
    splits = job.splits_backwards
    units = [
        saved_by_unit(unit, unit.seen_by(job.at), job.batch, job.kernels, part, selective, splits) for unit in held
    ]
    streams = [unit.rows.of(job.batch).rows(job.at) * job.model.hidden * job.batch.element for unit in held]

    runs = saved_together(held, together)
    offloaded = _offloaded_runs(job, stage, len(runs) - first - int(stage.last))
    kept, again = [], []
    for number, (begin, end) in enumerate(runs, start=-first):
        inside, stream = units[begin:end], streams[begin]
        if together and held[begin].stackable:
            kept.append(0.0 if number in offloaded or job.states.checkpoints_at is not Place.DEVICE else stream)
            again.append(sum(each.lasting for each in inside) + inside[0].again + stream * (number in offloaded))
        else:
            kept.append(inside[0].lasting)
            again.append(inside[0].again)
    kept_after = [0.0, *accumulate(reversed(kept))][::-1][1:]  # Bytes kept by the runs after each.
    factors = [sum(each.factors for each in units[begin:end]) for begin, end in runs]
    factors_from = [0.0, *accumulate(reversed(factors))][::-1]  # Bytes of the factors of each run and of later ones.

    # The peak is near either end: the last runs hold the most activations, and the first runs the most gradients. The
    # run after the first also brings an input back from host memory. The head computes its gradients in forward.
    shown = sorted({*range(4), *range(len(runs) - 4, len(runs))} & set(range(len(runs) - int(stage.last))))[::-1]

    def moments(op: Op) -> Iterator[BackwardUnit]:
        for at in shown:
            inside = units[slice(*runs[at])]
            unit = runs[at][1] - 1
            # The input of the run before this one is prefetched from host memory.
            prefetched = streams[runs[at][0]] * (at - first - 1 in offloaded)
            if op is Op.WEIGHT_GRAD:
                yield BackwardUnit(unit, -factors_from[at + 1], 0.0)
            elif op is Op.INPUT_GRAD:
                working = max(each.split_working for each in inside) + prefetched
                yield BackwardUnit(unit, again[at] - kept_after[at] + factors_from[at + 1], working)
            else:
                yield BackwardUnit(unit, again[at] - kept_after[at], max(each.working for each in inside) + prefetched)

    ops = (Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD) if splits else (Op.BACKWARD,)
    batch = 8 * fields if stage.first else 0
    loss = units[-1].working if stage.last else 0.0
    beside = sum(math.prod(each.shape(job.at, job.batch)) for each in job.model.read_beside(stage)) * job.batch.element
    backward = {op: tuple(moments(op)) for op in ops}
    return ChunkBytes(sum(kept) + batch + beside, loss, backward, factors_from[0], streams[0] * len(offloaded))


def _offloaded_runs(job: Job, stage: Stage, runs: int) -> range:
    """Return the numbers of a chunk's recomputed runs whose input is in host memory. A CPU offloads nothing."""
    return range(0) if job.host else job.config.recompute.offloaded(runs, stage.first, stage.last)


def chunks_of(job: Job, pp_rank: int) -> list[ChunkBytes]:
    """Return the bytes of each chunk of a pipeline rank."""
    held = job.chunks[pp_rank]
    ends = [stage for stage in held if job.model.fields(stage)]
    read = (name for stage in ends for name in fields_read(stage, job.model, job.layout.cp) & set(job.data_fields))
    fields = sum(field_elements(name, job.model, job.at, job.batch) for name in read)
    return [chunk_bytes(job, stage, fields) for stage in held]


class RankActivations(NamedTuple):
    """The bytes that a rank saves for backward: of each chunk, and the most of all micro-batches in flight."""

    chunks: list[ChunkBytes]
    after_forward: list[float]  # By chunk, right after a forward of it.
    before: list[dict[Op, float]]  # By chunk, before each other action of it.
    offloaded: float  # The most that is in host memory.


@remember("recompute")
def rank_activations(job: Job, pp_rank: int) -> RankActivations:
    """Return the bytes that a rank of a pipeline stage saves for backward."""
    chunks = chunks_of(job, pp_rank)
    return RankActivations(chunks, *bytes_in_flight(job, pp_rank, chunks))


# By chunk, the number of micro-batches in flight that hold activations, and of those that hold factors.
InFlight = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=20_000)
def in_flight(kind: str, pp: int, micro_batches: int, chunks: int, rank: int) -> dict[tuple[Op, int], set[InFlight]]:
    """Return the most that is in flight on a rank by (action, chunk), following its schedule.

    For a forward that is when it ends, for any other action when it begins.
    """
    activations, factors = [0] * chunks, [0] * chunks
    seen: dict[tuple[Op, int], set[InFlight]] = {}
    for action in computes(kind, pp, micro_batches, chunks, rank):
        here = seen.setdefault((action.op, action.chunk), set())
        if action.op is not Op.FORWARD:
            here.add((tuple(activations), tuple(factors)))
        activations[action.chunk] += held(action.op, ACTIVATIONS)
        factors[action.chunk] += held(action.op, FACTORS)
        if action.op is Op.FORWARD:
            here.add((tuple(activations), tuple(factors)))
    return {place: _most(found, place[1]) for place, found in seen.items()}


def _most(found: set[InFlight], at: int) -> set[InFlight]:
    """Drop every entry that differs from another only in fewer activations of the chunk `at`."""
    # Entries are sorted, so the last with the same key has the most activations.
    most = {((each[:at], each[at + 1 :]), factors): (each, factors) for each, factors in sorted(found)}
    return set(most.values())


def micro_batches_to_steady_state(job: Job) -> int:
    """Return the number of micro-batches after which no more are in flight at once.

    From there on a schedule repeats itself until it drains. If the schedule does not drain or has no formula, return
    the number of all micro-batches.
    """
    pp, m, chunks = job.layout.pp, job.micro_batches, job.config.layout.chunks
    few = min(m, 3 * pp + m % pp)
    formula = KINDS[job.config.pipeline.schedule].in_flight
    drains = formula is not None and formula(pp, m, chunks, 0) == formula(pp, few, chunks, 0)
    return few if drains else m


def bytes_in_flight(
    job: Job, pp_rank: int, chunks: list[ChunkBytes]
) -> tuple[list[float], list[dict[Op, float]], float]:
    """Return the most bytes that all micro-batches in flight on a rank hold.

    The result is, by chunk, the bytes right after a forward of the chunk, by chunk and action the bytes when another
    action of it begins, and the most bytes in host memory.
    """
    c = job.config
    counts = in_flight(c.pipeline.schedule, c.layout.pp, micro_batches_to_steady_state(job), len(chunks), pp_rank)

    def held_by(activations: tuple[int, ...], factors: tuple[int, ...]) -> float:
        return sum(n * one.kept + k * one.factors for n, k, one in zip(activations, factors, chunks, strict=True))

    def offloaded_by(activations: tuple[int, ...]) -> float:
        return sum(n * one.offloaded for n, one in zip(activations, chunks, strict=True))

    most = {place: max(held_by(*each) for each in options) for place, options in counts.items()}
    numbers = range(len(chunks))
    before: list[dict[Op, float]] = [{} for _ in chunks]
    for (op, chunk), size in most.items():
        if op is not Op.FORWARD:
            before[chunk][op] = size
    forwards = [numbers for (op, _), options in counts.items() if op is Op.FORWARD for numbers, _ in options]
    return [most[Op.FORWARD, chunk] for chunk in numbers], before, max(map(offloaded_by, forwards))
