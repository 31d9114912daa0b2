"""The flat buffers of a rank: which parameters lie in which bucket. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.sections import ZeroConfig
from meshwright.plan.held import HeldParameter, dtype_of, packed, tie_of, unit_records
from meshwright.plan.job import Job
from meshwright.plan.stack import BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.model.part import Coordinate, Unit
from meshwright.spec.traffic.placement import grad_bytes, shard_axes


class UnitParameters(NamedTuple):
    """A unit, its number among those of the rank, and the numbers of its parameters in the order of forward; both ends
    of a tie on one rank are one parameter."""

    number: int
    unit: Unit
    params: list[int]


class Buffer(NamedTuple):
    """A flat buffer: the bytes of a weight and of a gradient, the axes its gradients are summed over, and the elements
    of its buckets with their padding, in the order of backward."""

    weight: int
    gradient: int
    data_axes: str
    trained: bool
    buckets: list[int]
    mixed: bool  # a reducer that mixes elements sums its gradients
    outer_mixed: bool  # and what replicas sum of it


class Packing(NamedTuple):
    """The buffers of a rank, and for each parameter its first unit's number, its buffer and its bucket."""

    chunks: list[list[UnitParameters]]
    buffers: list[Buffer]
    first_units: list[int]
    places: list[tuple[int, int]]


class Division(NamedTuple):
    """How a buffer is divided: the stage of ZeRO, and the number of ranks."""

    stage: int
    shards: int


def division_of(buffer: Buffer, layout: Layout, zero: ZeroConfig) -> Division:
    stage, axes, _ = shard_axes(layout, zero, buffer.data_axes, buffer.trained)
    return Division(stage, layout.size(axes) if axes else 1)


def packing_of(job: Job, pp_rank: int) -> Packing:
    """Returns the buffers of a rank. Of ZeRO only stage 3 changes them: it makes a bucket of each unit."""
    c = job.config
    zero = c.zero if c.zero.stage == 3 else replace(c.zero, stage=0)
    key = ("packing", zero.stage, pp_rank)
    if key not in job.known:
        chunks = tuple(tuple(node.unit for node in job.model.nodes_of(stage)) for stage in job.chunks[pp_rank])
        dtypes = (c.train.precision, c.train.grad_dtype)
        job.known[key] = _packing(chunks, job.at, job.layout, c.comm.bucket_mib, zero, dtypes, job.mixing)
    found: Packing = job.known[key]
    return found


@lru_cache(maxsize=20_000)
def _packing(
    chunks: tuple[tuple[Unit, ...], ...], at: Coordinate, layout: Layout, bucket_mib: float, zero: ZeroConfig,
    dtypes: tuple[str, str], align: int,
) -> Packing:  # fmt: skip
    held: list[HeldParameter] = []
    ties: dict[str, int] = {}
    units: list[list[UnitParameters]] = []
    number = 0
    for chunk in chunks:
        units.append([])
        for unit in chunk:
            params = []
            for record in unit_records(unit, at):
                tie = tie_of(unit, number, record)
                if not tie or tie not in ties:
                    held.append(HeldParameter(record, number, len(held)))
                    ties |= {tie: len(held) - 1} if tie else {}
                params.append(ties[tie] if tie else len(held) - 1)
            units[-1].append(UnitParameters(number, unit, params))
            number += 1
    buffers: list[Buffer] = []
    places = [(0, 0)] * len(held)
    typed = [(one, dtype_of(one.record, dtypes[0])) for one in held]
    for shared, items, where, bounds in packed(typed, layout, bucket_mib, zero, dtypes[1], align):
        dtype, axes, partial, trained, mixed = shared
        for (one, _), (_, bucket) in zip(items, where, strict=True):
            places[one.fetches] = (len(buffers), bucket)
        gradient, sizes = grad_bytes(BYTES[dtype], BYTES[dtypes[1]]), [stop - start for start, stop in bounds]
        sums = (mixed and layout.size(axes) > 1, mixed and not partial)
        buffers.append(Buffer(BYTES[dtype], gradient, axes, trained, sizes, *sums))
    return Packing(units, buffers, [one.unit for one in held], places)
