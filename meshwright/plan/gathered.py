"""What is held whole for a while: gradients being filled and reduced, and gathered weights. No torch.

The gradients of a micro-batch arrive unit by unit. In ZeRO stages 2 and 3 a bucket is allocated with its first gradient
and reduced with its last, and a few reductions are under way at once. In stages 0 and 1 gradients have memory all the
time or, where a step has one micro-batch, from a bucket's first one to the update. Experts lie in buffers of their own,
which may be divided among other ranks than those of everything else, or among none; so a bucket of each kind may be
waiting to be full. Which gradients a module that is not ours gets may depend on the data, so in stage 2 its buckets are
reduced when the backward of a chunk ends, and exist until then.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.plan.held import Packing, UnitParameters, packing_of, unit_records
from meshwright.plan.job import Job, remembered
from meshwright.spec.model.part import Coordinate, Unit
from meshwright.spec.model.wrapped.parts import PlannedModel

IN_FLIGHT = 2  # reductions under way at once: the one just begun, and one before it


class Whole(NamedTuple):
    """Bytes that exist while backward works on one unit."""

    gradients: float = 0.0  # whole gradients, until they are reduced
    lasting: float = 0.0  # gradients that have come, where the update will need them as they are
    shares: float = 0.0  # of reduced gradients, to be added to the sum
    weights: float = 0.0  # gathered weights of the unit
    tied: float = 0.0  # of the gradients, those of a table that an earlier unit will add to


@dataclass
class _Bucket:
    gradients: float  # bytes of the whole gradient; 0 where it is kept from step to step
    lasts: bool  # until the update
    share: float  # of a rank's part of it, where that is added to a sum
    weights: float  # bytes, where they are gathered
    late: bool = False  # it is reduced at the end of a chunk's backward
    left: int = 0  # gradients that are still to come
    allocated: bool = False


@remembered("zero")
def whole_bytes(job: Job, pp_rank: int) -> list[list[Whole]]:
    """Returns, by chunk of a pipeline rank, what exists while backward works on each unit, in the order of forward."""
    packing = packing_of(job, pp_rank)
    if not (job.config.zero.stage >= 2 and job.stack.own) and not job.releases_gradients:
        return [[Whole()] * len(units) for units in packing.chunks]
    buckets, first_units = _buckets(job, packing), [param.unit for param in packing.params]
    state, found = (0.0, 0.0), []
    for chunk in reversed(packing.chunks):
        state, done = _backward(chunk, job.at, buckets, first_units, *state)
        found.append(done)
    return found[::-1]


def _buckets(job: Job, packing: Packing) -> list[_Bucket]:
    """Returns the bucket of each parameter."""
    held: dict[int, _Bucket] = {}
    for buffer in packing.buffers:
        stage, axes, _ = buffer.division(job.layout, job.config.zero)
        shards = job.layout.size(axes) if axes else 1
        gradient = buffer.gradient if buffer.trained and (stage >= 2 or job.releases_gradients) else 0
        share = gradient / shards if job.micro_batches > 1 else 0.0  # of later micro-batches, to be added
        weight = buffer.weight if stage == 3 else 0
        late = stage == 2 and isinstance(job.model, PlannedModel)
        sizes = [(size * gradient, stage < 2, size * share, size * weight, late) for size in buffer.buckets]
        made = [_Bucket(*each) for each in sizes]
        held |= {number: made[at] for number, at in zip(buffer.params, buffer.places, strict=True)}
    found = [held[number] for number in range(len(packing.params))]
    for param, times in Counter(param for chunk in packing.chunks for each in chunk for param in each.params).items():
        found[param].left += times
    return found


def _backward(
    chunk: list[UnitParameters], at: Coordinate, buckets: list[_Bucket], first_units: list[int],
    now: float, lasting: float,
) -> tuple[tuple[float, float], list[Whole]]:  # fmt: skip
    """Follows the backward of a chunk from `now` bytes of buckets that later chunks have begun to fill, and `lasting`
    ones of gradients that the update needs. Returns both at its end, and the most at each unit, in the order of
    forward."""
    flying: deque[_Bucket] = deque()
    late: list[_Bucket] = []
    shares, found = 0.0, []
    for number, unit, params in reversed(chunk):
        most, counted = (now, lasting, shares), _counted(unit, at)
        for arrived, param in enumerate(reversed(params), 1):
            bucket = buckets[param]
            more = 0.0 if bucket.allocated else bucket.gradients
            now, lasting = (now, lasting + more) if bucket.lasts else (now + more, lasting)
            bucket.allocated, bucket.left = True, bucket.left - 1
            if not bucket.left and bucket.late:
                late.append(bucket)
            elif not bucket.left and bucket.gradients and not bucket.lasts:  # others are reduced once, where they are
                shares += bucket.share
                flying.append(bucket)
            if arrived <= counted and now + lasting + shares > sum(most):
                most = now, lasting, shares
            if len(flying) > IN_FLIGHT:
                done = flying.popleft()
                now, shares = now - done.gradients, shares - done.share
        used = {id(buckets[param]): buckets[param] for param in params}.values()
        tied = {id(buckets[n]): buckets[n].gradients for n in params if first_units[n] < number}
        found.append(Whole(*most, sum(bucket.weights for bucket in used), sum(tied.values())))
    return (now - sum(bucket.gradients for bucket in (*flying, *late)), lasting), found[::-1]


@lru_cache(maxsize=20_000)
def _counted(unit: Unit, at: Coordinate) -> int:
    """Returns how many gradients arrive while a unit's memory is at its peak. Backward begins with a block's last body,
    whose largest weight, the first in forward, gets its gradient then. In other units all count."""
    if not unit.stackable:
        return len(unit_records(unit, at))
    sizes = [record.numel for record in reversed(unit.parts[-1].part.records(at, "").values())]
    return len(sizes) - sizes[::-1].index(max(sizes))
