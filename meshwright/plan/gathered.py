"""What ZeRO stages 2 and 3 hold whole for a while: gradients being filled and reduced, and gathered weights. No torch.

The gradients of a micro-batch arrive unit by unit. A bucket is allocated with its first gradient and reduced with its
last, and a few reductions are under way at once. Experts lie in buffers of their own, which may be divided among other
ranks than those of everything else, or among none; so a bucket of each kind may be waiting to be full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.sections import ZeroConfig
from meshwright.layout import Layout
from meshwright.parts.part import BlockUnit, Coordinate, Unit
from meshwright.plan.communication import HeldParameter, dtype_of, packed, tie_of, unit_records
from meshwright.plan.job import Job
from meshwright.plan.stack import BYTES
from meshwright.sharding.placement import grad_bytes, shard_axes

IN_FLIGHT = 2  # reductions under way at once: the one just begun, and one before it


class Whole(NamedTuple):
    """Bytes that exist while backward works on one unit."""

    gradients: float  # whole gradients, and shares that wait to be added to the sum
    weights: float  # gathered weights of the unit
    tied: float = 0.0  # of the gradients, those of a table that an earlier unit will add to


@dataclass
class _Bucket:
    gradients: float  # bytes of the whole gradient; 0 where it is kept from step to step
    share: float  # of a rank's part of it, where that is added to a sum
    weights: float  # bytes, where they are gathered
    left: int = 0  # gradients that are still to come
    allocated: bool = False


def whole_bytes(job: Job, pp_rank: int) -> list[list[Whole]]:
    """Returns, by chunk of a pipeline rank, what exists while backward works on each unit, in the order of forward."""
    c = job.config
    chunks = tuple(tuple(unit for _, _, unit in job.model.units(stage)) for stage in job.chunks[pp_rank])
    if c.zero.stage < 2 or not job.stack.own:
        return [[Whole(0.0, 0.0)] * len(units) for units in chunks]
    dtypes = (c.train.precision, c.train.grad_dtype)
    adds = job.micro_batches > 1
    return _whole_bytes(chunks, job.at, job.layout, c.comm.bucket_mib, c.zero, dtypes, adds, job.sums.mixes)


@lru_cache(maxsize=20_000)
def _whole_bytes(
    chunks: tuple[tuple[Unit, ...], ...], at: Coordinate, layout: Layout, bucket_mib: float, zero: ZeroConfig,
    dtypes: tuple[str, str], adds: bool, mixes: bool,
) -> list[list[Whole]]:  # fmt: skip
    """`adds`: the reduced gradient of a micro-batch is added to that of those before it."""
    held = _arrivals(chunks, at)
    arriving = [one for chunk in held for unit in chunk for one in unit.params]
    params = [(one, dtype_of(one.record, dtypes[0])) for one in {id(one): one for one in arriving}.values()]
    where: dict[int, _Bucket] = {}
    for shared, items, places, bounds in packed(params, layout, bucket_mib, zero, dtypes[1], mixes):
        dtype, axes, _, trained, _ = shared
        stage, shards, _ = shard_axes(layout, zero, axes, trained)
        grad = grad_bytes(BYTES[dtype], BYTES[dtypes[1]]) if trained and stage >= 2 else 0
        share = grad / layout.size(shards) if shards and adds else 0.0
        weight = BYTES[dtype] if stage == 3 else 0
        sizes = [stop - start for start, stop in bounds]
        buckets = [_Bucket(size * grad, size * share, size * weight) for size in sizes]
        where |= {id(one): buckets[bucket] for (one, _), (_, bucket) in zip(items, places, strict=True)}
    for one in arriving:
        where[id(one)].left += 1
    now, found = 0.0, []
    for chunk in reversed(held):
        now, done = _backward(chunk, at, where, now)
        found.append(done)
    return found[::-1]


class _Arriving(NamedTuple):
    """A unit, its number among those of the rank, and its parameters in the order of forward; a tie is one object."""

    number: int
    unit: Unit
    params: list[HeldParameter]


def _arrivals(chunks: Sequence[Sequence[Unit]], at: Coordinate) -> list[list[_Arriving]]:
    ties: dict[str, HeldParameter] = {}
    found: list[list[_Arriving]] = []
    number = 0
    for units in chunks:
        found.append([])
        for unit in units:
            params = []
            for record in unit_records(unit, at):
                one, tie = HeldParameter(record, number, 0), tie_of(unit, number, record)
                params.append(ties.setdefault(tie, one) if tie else one)
            found[-1].append(_Arriving(number, unit, params))
            number += 1
    return found


def _backward(
    chunk: list[_Arriving], at: Coordinate, where: dict[int, _Bucket], now: float
) -> tuple[float, list[Whole]]:
    """Follows the backward of a chunk from `now` bytes of buckets that later chunks have begun to fill. Returns what is
    left of those at its end, and the most at each unit, in the order of forward."""
    flying: deque[_Bucket] = deque()
    found = []
    for number, unit, params in reversed(chunk):
        most, counted = now, _counted(unit, at)
        for arrived, one in enumerate(reversed(params), 1):
            bucket = where[id(one)]
            now += 0.0 if bucket.allocated else bucket.gradients
            bucket.allocated, bucket.left = True, bucket.left - 1
            if not bucket.left:
                now += bucket.share
                flying.append(bucket)
            most = max(most, now) if arrived <= counted else most
            if len(flying) > IN_FLIGHT:
                done = flying.popleft()
                now -= done.gradients + done.share
        used = {id(bucket): bucket for bucket in (where[id(one)] for one in params)}
        tied = {id(where[id(one)]): where[id(one)].gradients for one in params if one.unit < number}
        weights = sum(bucket.weights for bucket in used.values())
        found.append(Whole(most, weights, sum(tied.values())))
    return now - sum(bucket.gradients + bucket.share for bucket in flying), found[::-1]


def _counted(unit: Unit, at: Coordinate) -> int:
    """Returns how many gradients arrive while a unit's memory is at its peak: backward begins with those of a block's
    last body, and they come until its largest weight's does, which is the first in forward. In other units all do."""
    if not isinstance(unit, BlockUnit):
        return len(unit_records(unit, at))
    sizes = [record.numel for record in reversed(unit.parts[-1].part.records(at, "").values())]
    return len(sizes) - sizes[::-1].index(max(sizes))
