"""What ZeRO stages 2 and 3 hold whole for a while: gradients being filled and reduced, and gathered weights. No torch.

The gradients of a micro-batch arrive unit by unit. A bucket is allocated with its first gradient and reduced with its
last, and a few reductions are under way at once. Experts lie in buffers of their own, which may be divided among other
ranks than those of everything else, or among none; so a bucket of each kind may be waiting to be full.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.parts.part import BlockUnit, Coordinate, Unit
from meshwright.plan.communication import unit_records
from meshwright.plan.job import Job
from meshwright.plan.packing import Packing, UnitParameters, division_of, packing_of

IN_FLIGHT = 2  # reductions under way at once: the one just begun, and one before it


class Whole(NamedTuple):
    """Bytes that exist while backward works on one unit."""

    gradients: float = 0.0  # whole gradients
    shares: float = 0.0  # of reduced gradients, to be added to the sum
    weights: float = 0.0  # gathered weights of the unit
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
    zero = job.config.zero
    key = ("whole", zero if zero.stage >= 2 and job.stack.own else None, pp_rank)
    if key not in job.known:
        packing = packing_of(job, pp_rank)
        if key[1] is None:
            job.known[key] = [[Whole()] * len(units) for units in packing.chunks]
        else:
            buckets = _buckets(job, packing)
            open_bytes, found = 0.0, []
            for chunk in reversed(packing.chunks):
                open_bytes, done = _backward(chunk, job.at, buckets, packing.first_units, open_bytes)
                found.append(done)
            job.known[key] = found[::-1]
    answer: list[list[Whole]] = job.known[key]
    return answer


def _buckets(job: Job, packing: Packing) -> list[_Bucket]:
    """Returns the bucket of each parameter."""
    made: list[list[_Bucket]] = []
    for buffer in packing.buffers:
        stage, shards = division_of(buffer, job.layout, job.config.zero)
        gradient = buffer.gradient if buffer.trained and stage >= 2 else 0
        share = gradient / shards if job.micro_batches > 1 else 0.0  # of later micro-batches, to be added
        weight = buffer.weight if stage == 3 else 0
        made.append([_Bucket(size * gradient, size * share, size * weight) for size in buffer.buckets])
    found = [made[buffer][bucket] for buffer, bucket in packing.places]
    for param, times in Counter(param for chunk in packing.chunks for each in chunk for param in each.params).items():
        found[param].left += times
    return found


def _backward(
    chunk: list[UnitParameters], at: Coordinate, buckets: list[_Bucket], first_units: list[int], now: float
) -> tuple[float, list[Whole]]:
    """Follows the backward of a chunk from `now` bytes of buckets that later chunks have begun to fill. Returns what is
    left of those at its end, and the most at each unit, in the order of forward."""
    flying: deque[_Bucket] = deque()
    shares, found = 0.0, []
    for number, unit, params in reversed(chunk):
        most, counted = (now, shares), _counted(unit, at)
        for arrived, param in enumerate(reversed(params), 1):
            bucket = buckets[param]
            now += 0.0 if bucket.allocated else bucket.gradients
            bucket.allocated, bucket.left = True, bucket.left - 1
            if not bucket.left and bucket.gradients:  # others are reduced once, where they are kept
                shares += bucket.share
                flying.append(bucket)
            if arrived <= counted and now + shares > sum(most):
                most = now, shares
            if len(flying) > IN_FLIGHT:
                done = flying.popleft()
                now, shares = now - done.gradients, shares - done.share
        used = {id(buckets[param]): buckets[param] for param in params}.values()
        tied = {id(buckets[n]): buckets[n].gradients for n in params if first_units[n] < number}
        found.append(Whole(*most, sum(bucket.weights for bucket in used), sum(tied.values())))
    return now - sum(bucket.gradients for bucket in flying), found[::-1]


@lru_cache(maxsize=20_000)
def _counted(unit: Unit, at: Coordinate) -> int:
    """Returns how many gradients arrive while a unit's memory is at its peak. Backward begins with a block's last body,
    whose largest weight, the first in forward, gets its gradient then. In other units all count."""
    if not isinstance(unit, BlockUnit):
        return len(unit_records(unit, at))
    sizes = [record.numel for record in reversed(unit.parts[-1].part.records(at, "").values())]
    return len(sizes) - sizes[::-1].index(max(sizes))
