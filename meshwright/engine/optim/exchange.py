"""The exchange around the update of whole matrices: gathers them on their owners and returns the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.comm.redistribute import redistribute
from meshwright.engine.optim.matrices import TOGETHER, BucketPlan, MatrixParameter, plan_rounds
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.spec.layout.params import ParamRecord

Transform = Callable[[Tensor], Tensor]


class Gathered(NamedTuple):
    """What a rank has of a bucket after both hops: its parameters in a flat tensor, and for each matrix of them the
    view of its parameter, and the matrix itself if this rank owns it."""

    flat: Tensor
    held: list[Tensor]
    whole: list[Tensor]

    def of(self, plan: BucketPlan) -> list[Tensor]:
        return [self.whole[number] for number in plan.mine]


def _of_one_shape(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices to transform together: of one shape, and of TOGETHER elements at most unless it is one matrix.
    Experts are many and small."""
    ordered = sorted(matrices, key=lambda matrix: matrix.shape)
    for _, group in groupby(ordered, key=lambda matrix: matrix.shape):
        same = list(group)
        count = max(1, TOGETHER // same[0].numel())
        yield from (same[at : at + count] for at in range(0, len(same), count))


class MatrixExchange:
    """Replaces the gradients of one buffer by a function of each whole matrix of them. `shards` are the ranks that
    shard the buffer and `cutting` those that cut its matrices; `peers` gives the records that these hold in place of
    one of this rank's, itself included."""

    def __init__(
        self, buffer: FlatBuffer, shards: Group, cutting: Group,
        peers: Callable[[ParamRecord], Sequence[ParamRecord]], cost: Callable[[int, int], float],
    ) -> None:  # fmt: skip
        self.buffer, self.shards, self.cutting = buffer, shards, cutting
        buckets = [
            (b.stop - b.start, [MatrixParameter(s.start - b.start, tuple(peers(s.record))) for s in b.slots])
            for b in buffer.buckets
        ]
        rounds = plan_rounds(buckets, (shards.size, shards.index), (cutting.size, cutting.index), cost)
        places = iter(buffer.buckets)
        self.rounds = [[(next(places), plan) for plan in plans] for plans in rounds]

    @torch.no_grad()
    def run(self, transform: Transform) -> None:
        """Replace the gradients, round by round. `transform` takes matrices of one shape [count, rows, columns]."""
        with self.shards.ledger.phase("optimizer"):
            for plans in self.rounds:
                gathered = [self._gather(bucket, plan) for bucket, plan in plans]
                matrices = [matrix for own, (_, plan) in zip(gathered, plans, strict=True) for matrix in own.of(plan)]
                for same in _of_one_shape(matrices):
                    results = transform(torch.stack([matrix.view(matrix.shape[-2:]) for matrix in same]))
                    for matrix, result in zip(same, results, strict=True):
                        matrix.view(result.shape).copy_(result)
                for own, (bucket, plan) in zip(gathered, plans, strict=True):
                    self._return(own, bucket, plan)

    def _gather(self, bucket: Bucket, plan: BucketPlan) -> Gathered:
        """Fill this rank's parameters of a bucket, and its matrices."""
        flat = bucket.own_grads.new_empty(plan.held)
        redistribute([bucket.own_grads], plan.gather, self.shards, [flat])
        held = []
        for matrix, offset in zip(plan.matrices, plan.offsets, strict=True):
            slot = bucket.slots[matrix.parameter]
            held.append(flat[offset : offset + slot.record.numel].view(slot.record.local_shape))
        mine = set(plan.mine)
        whole = [
            flat.new_empty(matrix.shape if number in mine else (0,) * len(matrix.shape))
            for number, matrix in enumerate(plan.matrices)
        ]
        if plan.matrices:
            redistribute(held, plan.assemble, self.cutting, whole)
        return Gathered(flat, held, whole)

    def _return(self, own: Gathered, bucket: Bucket, plan: BucketPlan) -> None:
        if plan.matrices:
            redistribute(own.whole, plan.disperse, self.cutting, own.held)
        redistribute([own.flat], plan.scatter, self.shards, [bucket.own_grads])
