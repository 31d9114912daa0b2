"""The parameters of a rank, and the flat buffers that they are packed into: what is gathered and summed at once. No
torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.sections import ZeroConfig
from meshwright.plan.job import Job, kept_together, remembered
from meshwright.plan.stack import BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.part import Coordinate, Unit
from meshwright.spec.traffic.placement import (
    ALIGN,
    Division,
    backward_order,
    bucket_elements,
    buffer_key,
    grad_bytes,
    place,
    shard_axes,
)

ALL_MIB = 2.0**40


class HeldParameter(NamedTuple):
    """A parameter of a rank, its dtype, and the number of the first of the rank's units that has it."""

    record: ParamRecord
    dtype: str
    unit: int


class UnitParameters(NamedTuple):
    """A unit, its number among those of the rank, and the numbers of its parameters in the order of forward; both ends
    of a tie on one rank are one parameter."""

    number: int
    unit: Unit
    params: list[int]


class Buffer(NamedTuple):
    """A flat buffer: what its parameters have in common, their numbers in the order of backward, the bucket of each,
    and the elements of the buckets with their padding."""

    dtype: str
    data_axes: str  # over which gradients are summed
    partial: tuple[str, ...]  # further axes of sums
    trained: bool
    mixed: bool  # a reducer that mixes elements sums it
    matrices: bool  # the optimizer updates its matrices as wholes
    gradient: int  # bytes of one
    params: list[int]
    places: list[int]
    starts: list[int]  # of each parameter in its bucket
    buckets: list[int]

    @property
    def weight(self) -> int:
        """The bytes of one element."""
        return BYTES[self.dtype]

    def division(self, layout: Layout, zero: ZeroConfig) -> Division:
        return shard_axes(layout, zero, self.data_axes, self.trained)


class Packing(NamedTuple):
    """The units of a rank by chunk, its parameters, and their buffers."""

    chunks: list[list[UnitParameters]]
    params: list[HeldParameter]
    buffers: list[Buffer]


def buffers_of(
    params: Sequence[HeldParameter], layout: Layout, bucket_mib: float, zero: ZeroConfig, grad: int = 4, align: int = 0
) -> Iterator[Buffer]:
    """Packs parameters, given in the order of forward, into buffers as `sharding` builds them. `grad`: the bytes of a
    gradient, unless a weight has more; `align`: where parameters begin in buffers that a reducer mixes, see
    `ReducerPlan`; 0 if none does."""
    mixed_in = layout if align else None
    keyed = backward_order(range(len(params)), lambda n: (params[n].dtype, *buffer_key(params[n].record, mixed_in)))
    for (dtype, axes, partial, trained, mixed, matrices), numbers in keyed.items():
        gradient = grad_bytes(BYTES[dtype], grad)
        by_unit = shard_axes(layout, zero, axes, trained).stage == 3
        ranks = layout.size(axes)
        places, buckets = place(
            [params[n].record.numel for n in numbers], ranks, bucket_elements(bucket_mib, gradient, ranks),
            [params[n].unit for n in numbers] if by_unit else None, align if mixed else ALIGN,
        )  # fmt: skip
        yield Buffer(
            dtype, axes, partial, trained, mixed, matrices, gradient, numbers, [at for _, at in places],
            [start - buckets[at][0] for start, at in places], [stop - start for start, stop in buckets],
        )  # fmt: skip


@remembered("zero")
def packing_of(job: Job, pp_rank: int) -> Packing:
    """Returns the buffers of a rank. Of ZeRO only stage 3 changes them: it makes a bucket of each unit."""
    c = job.config
    zero = c.zero if c.zero.stage == 3 else replace(c.zero, stage=0)
    chunks = tuple(tuple(node.unit for node in job.model.nodes_of(stage)) for stage in job.chunks[pp_rank])
    # Other programs have buckets of other sizes, which are not known: one for all.
    bucket_mib, grad = (c.comm.bucket_mib, BYTES[c.train.grad_dtype]) if job.stack.own else (ALL_MIB, job.states.grad)
    return _packing(chunks, job.at, job.layout, bucket_mib, zero, c.train.precision, grad, job.mixing)


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
    """Returns how often each micro-batch gathers each parameter of a rank in ZeRO stage 3.

    A unit (embedding, block, head) is gathered for forward and, unless it and everything before it is frozen, for
    backward. Of N blocks that are recomputed together, all but the last are gathered once more for that. In backward an
    embedding stays until the chunk's is done, so that a second one with the same table finds it there.
    """
    packing, together = packing_of(job, pp_rank), job.config.recompute.blocks
    found = [0] * len(packing.params)
    for stage, units in zip(job.chunks[pp_rank], packing.chunks, strict=True):
        graded = not stage.first  # whether a gradient flows back to here: a stage's received input has one
        stays: set[int] = set()
        runs = kept_together([unit for _, unit, _ in units], together)
        twice = {at for begin, end in runs for at in range(begin, end - 1)}
        for at, (node, (_, unit, params)) in enumerate(zip(job.model.nodes_of(stage), units, strict=True)):
            embeds = not node.inputs
            trained = any(packing.params[n].record.trained for n in params)
            graded |= trained or (together > 0 and unit.stackable)
            for n in params:
                found[n] += 1 + graded + (at in twice) + job.config.compares - (embeds and n in stays)
            stays |= set(params) if embeds else set()
    return found


def tie_of(unit: Unit, number: int, record: ParamRecord) -> str:
    """Returns the name of a record's tie among a rank's units, empty without one. Ties inside a block are the block's
    own, since records of all blocks of one kind have the same names here."""
    return f"unit {number}: {record.tied}" if record.tied and unit.stackable else record.tied


def records_once(units: Iterable[tuple[Unit, int]], at: Coordinate) -> Iterator[tuple[ParamRecord, int]]:
    """Yields (record, count) of a rank's units with their counts; tied parameters appear once."""
    ties: set[str] = set()
    for number, (unit, count) in enumerate(units):
        for record in unit_records(unit, at):
            tie = tie_of(unit, number, record)
            if tie not in ties:
                yield record, count
            ties |= {tie} if tie else set()


def unit_records(unit: Unit, at: Coordinate) -> tuple[ParamRecord, ...]:
    """Returns the parameters of a unit, which are the same wherever it stands in the model."""
    return _unit_records(unit, unit.seen_by(at))


@lru_cache(maxsize=20_000)
def _unit_records(unit: Unit, at: Coordinate) -> tuple[ParamRecord, ...]:
    return tuple(unit.records(at).values())


def dtype_of(record: ParamRecord, precision: str) -> str:
    """Returns the dtype of a parameter: the run's precision, unless it must be wider or is packed into bytes."""
    if record.packs is not None:
        return "nf4"
    return "fp32" if record.wide and precision != "fp64" else precision
