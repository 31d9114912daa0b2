"""Lists the parameters of a rank and packs them into flat buffers, whose buckets are gathered and reduced. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.memory import ZeroConfig
from meshwright.config.precision import PRECISIONS
from meshwright.plan.job import Job, remember, saved_together
from meshwright.plan.stack import BYTES, NF4
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.part import Coordinate, Unit
from meshwright.spec.traffic.placement import (
    ALIGN,
    Division,
    UpdateKind,
    backward_order,
    bucket_elements,
    buffer_key,
    grad_bytes,
    place,
    shard_axes,
)

ALL_MIB = 2.0**40


class HeldParameter(NamedTuple):
    """A parameter of a rank, its dtype, and the number of the first unit of the rank that holds it."""

    record: ParamRecord
    dtype: str
    unit: int


class UnitParameters(NamedTuple):
    """A unit, its number among the rank's units, and the numbers of its parameters in the order of forward.

    Tied parameters on one rank are one parameter.
    """

    number: int
    unit: Unit
    params: list[int]


class Buffer(NamedTuple):
    """A flat buffer of parameters with the same properties, and their places in its buckets."""

    dtype: str
    data_axes: str  # The axes over which gradients are summed.
    partial: tuple[str, ...]  # Further axes over which gradients are partial sums.
    trained: bool
    mixed: bool  # True if the gradients are summed by a reducer that mixes elements.
    update: UpdateKind  # The rule that updates them.
    gradient: int  # The bytes of one gradient.
    params: list[int]  # The numbers of its parameters in the order of backward.
    places: list[int]  # The bucket of each parameter.
    starts: list[int]  # The start of each parameter in its bucket.
    buckets: list[int]  # The elements of each bucket, padding included.

    @property
    def weight(self) -> int:
        """The bytes of one element."""
        return BYTES[self.dtype]

    def division(self, layout: Layout, zero: ZeroConfig) -> Division:
        """Return the effective ZeRO stage of the buffer, the axes that shard it, and those that hold copies."""
        return shard_axes(layout, zero, self.data_axes, self.trained)


class Packing(NamedTuple):
    """The units of a rank by chunk, its parameters, and their buffers."""

    chunks: list[list[UnitParameters]]
    params: list[HeldParameter]
    buffers: list[Buffer]


def buffers_of(
    params: Sequence[HeldParameter], layout: Layout, bucket_mib: float, zero: ZeroConfig, grad: int = 4, align: int = 0
) -> Iterator[Buffer]:
    """Pack parameters, given in the order of forward, into buffers as `sharding` builds them.

    `grad` is the bytes of a gradient, unless a weight has more. `align` is the alignment of parameters in buffers whose
    elements a reducer mixes (see `ReducerPlan`), or 0 if there is no such reducer.
    """
    mixed_in = layout if align else None
    keyed = backward_order(range(len(params)), lambda n: (params[n].dtype, *buffer_key(params[n].record, mixed_in)))
    for (dtype, axes, partial, trained, mixed, update), numbers in keyed.items():
        gradient = grad_bytes(BYTES[dtype], grad)
        by_unit = shard_axes(layout, zero, axes, trained).stage == 3
        ranks = layout.size(axes)
        places, buckets = place(
            [params[n].record.numel for n in numbers], ranks, bucket_elements(bucket_mib, gradient, ranks),
            [params[n].unit for n in numbers] if by_unit else None, align if mixed else ALIGN,
        )  # fmt: skip
        yield Buffer(
            dtype, axes, partial, trained, mixed, update, gradient, numbers, [at for _, at in places],
            [start - buckets[at][0] for start, at in places], [stop - start for start, stop in buckets],
        )  # fmt: skip


@remember("zero")
def packing_of(job: Job, pp_rank: int) -> Packing:
    """Return the buffers of a rank of a pipeline stage."""
    c = job.config
    # Among the stages of ZeRO only stage 3 changes the buffers: it makes each unit a bucket.
    zero = c.zero if c.zero.stage == 3 else replace(c.zero, stage=0)
    chunks = tuple(tuple(node.unit for node in job.model.nodes_of(stage)) for stage in job.chunks[pp_rank])
    # The bucket sizes of other programs are not known, so they get a single bucket.
    bucket_mib, grad = (c.comm.bucket_mib, BYTES[c.train.grad_dtype]) if job.stack.own else (ALL_MIB, job.states.grad)
    return _packing(chunks, job.at, job.layout, bucket_mib, zero, c.train.precision, grad, job.mixing_alignment)


@lru_cache(maxsize=20_000)
def _packing(
    chunks: tuple[tuple[Unit, ...], ...], at: Coordinate, layout: Layout, bucket_mib: float, zero: ZeroConfig,
    precision: str, grad: int, align: int,
) -> Packing:  # fmt: skip
    params: list[HeldParameter] = []
    ties: dict[str, int] = {}
    units: list[list[UnitParameters]] = []
    number = 0
    for chunk in chunks:
        units.append([])
        for unit in chunk:
            numbers = []
            for record in unit_records(unit, at):
                tie = tie_of(unit, number, record)
                if tie not in ties:
                    params.append(HeldParameter(record, dtype_of(record, precision), number))
                if tie:
                    ties.setdefault(tie, len(params) - 1)
                numbers.append(ties.get(tie, len(params) - 1))
            units[-1].append(UnitParameters(number, unit, numbers))
            number += 1
    return Packing(units, params, list(buffers_of(params, layout, bucket_mib, zero, grad, align)))


def fetches_of(job: Job, pp_rank: int) -> list[int]:
    """Return the number of times that each micro-batch gathers each parameter of a rank in ZeRO stage 3.

    A unit (embedding, block, head) is gathered for forward and, unless it and everything before it is frozen, for
    backward. Of N blocks that are recomputed together, all but the last are gathered once more for the recomputation.
    In backward, an embedding stays gathered until the backward of its chunk has finished, so a second embedding with
    the same table needs no gather.
    """
    packing = packing_of(job, pp_rank)
    together = job.config.recompute.blocks
    gathers = [0] * len(packing.params)
    for stage, units in zip(job.chunks[pp_rank], packing.chunks, strict=True):
        graded = not stage.first  # A gradient flows back to here. The input that a stage receives always has one.
        stays: set[int] = set()
        runs = saved_together([unit for _, unit, _ in units], together)
        twice = {at for begin, end in runs for at in range(begin, end - 1)}
        for at, (node, (_, unit, params)) in enumerate(zip(job.model.nodes_of(stage), units, strict=True)):
            embeds = not node.inputs
            trained = any(packing.params[n].record.trained for n in params)
            graded |= trained or (together > 0 and unit.stackable)
            for n in params:
                gathers[n] += 1 + graded + (at in twice) + job.config.compares - (embeds and n in stays)
            stays |= set(params) if embeds else set()
    return gathers


def tie_of(unit: Unit, number: int, record: ParamRecord) -> str:
    """Return the name of a record's tie among a rank's units, or an empty name if it has none.

    Ties inside a block get a separate name in each block, since all blocks of one kind share the same records here.
    """
    return f"unit {number}: {record.tied}" if record.tied and unit.stackable else record.tied


def records_once(units: Iterable[tuple[Unit, int]], at: Coordinate) -> Iterator[tuple[ParamRecord, int]]:
    """Yield (record, count) for the parameters of a rank's units. Tied parameters appear once."""
    ties: set[str] = set()
    for number, (unit, count) in enumerate(units):
        for record in unit_records(unit, at):
            tie = tie_of(unit, number, record)
            if tie not in ties:
                yield record, count
            ties |= {tie} if tie else set()


def unit_records(unit: Unit, at: Coordinate) -> tuple[ParamRecord, ...]:
    """Return the parameters of a unit, which are the same at every place in the model."""
    return _unit_records(unit, unit.seen_by(at))


@lru_cache(maxsize=20_000)
def _unit_records(unit: Unit, at: Coordinate) -> tuple[ParamRecord, ...]:
    return tuple(unit.records(at).values())


def dtype_of(record: ParamRecord, precision: str) -> str:
    """Return the dtype of a parameter: the run's precision, unless it must be wider or is packed into bytes."""
    if record.packs is not None:
        return NF4
    return "fp32" if record.wide and not PRECISIONS[precision].is_double else precision
