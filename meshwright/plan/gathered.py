"""Predicts the memory of tensors that are whole for a while: gradients until they are reduced, and gathered weights.

The gradients of a micro-batch arrive unit by unit. In ZeRO stages 2 and 3 a bucket is allocated with its first gradient
and reduced after its last, and a few reductions are in flight at once. In stages 0 and 1 gradients are allocated all
the time or, if a step has one micro-batch, from a bucket's first gradient to the update.

Experts have separate buffers, which may be sharded over other ranks than everything else, or not at all. So one bucket
of each kind may be partly filled at the same time. The gradients that another program's module gets may depend on the
data. In stage 2 its buckets are therefore reduced at the end of a chunk's backward, and exist until then. No torch.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.plan.held import Packing, UnitParameters, packing_of, unit_records
from meshwright.plan.job import Job, remember
from meshwright.spec.model.part import Coordinate, Unit, innermost
from meshwright.spec.model.wrapped.parts import PlannedModel

IN_FLIGHT = 2  # Reductions in flight at once: the one just started, and the one before it.


class UnitBytes(NamedTuple):
    """Bytes that exist while backward works on one unit."""

    gradients: float = 0.0  # Whole gradients that have not been reduced yet.
    lasting: float = 0.0  # Whole gradients that stay allocated until the update.
    shares: float = 0.0  # This rank's shards of reduced gradients that are still to be added to the sum.
    weights: float = 0.0  # Gathered weights of the unit.
    tied: float = 0.0  # The part of `gradients` that belongs to a table to which an earlier unit will add.


@dataclass
class _Bucket:
    """The state of one bucket while backward fills it. Sizes are in bytes."""

    gradients: float  # The whole gradient; 0 if it stays allocated from step to step.
    lasts: bool  # True if the gradient stays allocated until the update.
    share: float  # This rank's shard of the gradient, if it is added to a sum over micro-batches.
    weights: float  # The gathered weights, if they are gathered.
    late: bool = False  # True if the bucket is reduced at the end of a chunk's backward.
    left: int = 0  # The number of gradients that have not arrived yet.
    allocated: bool = False


@remember("zero")
def whole_bytes(job: Job, pp_rank: int) -> list[list[UnitBytes]]:
    """Return, for each chunk of a pipeline rank, the bytes during each unit's backward, in the order of forward."""
    packing = packing_of(job, pp_rank)
    if not (job.config.zero.stage >= 2 and job.stack.own) and not job.releases_gradients:
        return [[UnitBytes()] * len(units) for units in packing.chunks]
    buckets = _buckets(job, packing)
    first_units = [param.unit for param in packing.params]
    state, by_chunk = (0.0, 0.0), []
    for chunk in reversed(packing.chunks):
        state, by_unit = _backward(chunk, job, buckets, first_units, *state)
        by_chunk.append(by_unit)
    return by_chunk[::-1]


def _buckets(job: Job, packing: Packing) -> list[_Bucket]:
    """Return the bucket of each parameter."""
    held: dict[int, _Bucket] = {}
    for buffer in packing.buffers:
        stage, axes, _ = buffer.division(job.layout, job.config.zero)
        shards = job.layout.size(axes) if axes else 1
        gradient = buffer.gradient if buffer.trained and (stage >= 2 or job.releases_gradients) else 0
        # With several micro-batches, each reduced shard is added to a sum and then freed.
        share = gradient / shards if job.micro_batches > 1 else 0.0
        weight = buffer.weight if stage == 3 else 0
        late = stage == 2 and isinstance(job.model, PlannedModel)
        sizes = [(size * gradient, stage < 2, size * share, size * weight, late) for size in buffer.buckets]
        made = [_Bucket(*each) for each in sizes]
        held |= {number: made[at] for number, at in zip(buffer.params, buffer.places, strict=True)}
    by_parameter = [held[number] for number in range(len(packing.params))]
    for param, times in Counter(param for chunk in packing.chunks for each in chunk for param in each.params).items():
        by_parameter[param].left += times
    return by_parameter


def _backward(
    chunk: list[UnitParameters], job: Job, buckets: list[_Bucket], first_units: list[int],
    now: float, lasting: float,
) -> tuple[tuple[float, float], list[UnitBytes]]:  # fmt: skip
    """Follow the backward of a chunk.

    At its start, buckets that later chunks have begun to fill hold `now` bytes, and gradients that stay until the
    update hold `lasting` bytes. Return both numbers at its end, and the most bytes at each unit, in the order of
    forward.
    """
    in_flight: deque[_Bucket] = deque()
    late: list[_Bucket] = []
    shares, by_unit = 0.0, []
    for number, unit, params in reversed(chunk):
        most = (now, lasting, shares)
        counted = _counted(unit, job.at, job.kernels.fused)
        for arrived, param in enumerate(reversed(params), 1):
            bucket = buckets[param]
            more = 0.0 if bucket.allocated else bucket.gradients
            now, lasting = (now, lasting + more) if bucket.lasts else (now + more, lasting)
            bucket.allocated = True
            bucket.left = bucket.left - 1
            if not bucket.left and bucket.late:
                late.append(bucket)
            # Buckets that last until the update are reduced in place, once.
            elif not bucket.left and bucket.gradients and not bucket.lasts:
                shares += bucket.share
                in_flight.append(bucket)
            if arrived <= counted and now + lasting + shares > sum(most):
                most = now, lasting, shares
            if len(in_flight) > IN_FLIGHT:
                done = in_flight.popleft()
                now, shares = now - done.gradients, shares - done.share
        used = {id(buckets[param]): buckets[param] for param in params}.values()
        tied = {id(buckets[n]): buckets[n].gradients for n in params if first_units[n] < number}
        by_unit.append(UnitBytes(*most, sum(bucket.weights for bucket in used), sum(tied.values())))
    return (now - sum(bucket.gradients for bucket in (*in_flight, *late)), lasting), by_unit[::-1]


@lru_cache(maxsize=20_000)
def _counted(unit: Unit, at: Coordinate, fused: bool) -> int:
    """Return the number of gradients that arrive until a unit's memory is at its peak.

    The backward of a block begins with its last body. If it is compiled, the peak is where that body's largest weight,
    the first in forward, gets its gradient. Otherwise a gated activation has its peak before that, in its own backward.
    In other units all gradients count.
    """
    if not unit.stackable:
        return len(unit_records(unit, at))
    part = unit.parts[-1].part
    sizes = [record.numel for record in reversed(part.records(at, "").values())]
    until = len(sizes) - sizes[::-1].index(max(sizes))
    return until if fused or not getattr(innermost(part), "gated", False) else until - 1
