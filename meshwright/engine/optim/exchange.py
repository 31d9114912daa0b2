"""The communication around the update of whole matrices: gather them on their owners, and return the results."""

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
    """The tensors of a bucket on one rank after both hops.

    `flat` has the whole parameters of this rank. For each of their matrices, `held` is the view of its parameter in
    `flat`, and `whole` the matrix itself if this rank owns it, else an empty tensor.
    """

    flat: Tensor
    held: list[Tensor]
    whole: list[Tensor]

    def of(self, plan: BucketPlan) -> list[Tensor]:
        return [self.whole[number] for number in plan.mine]


def _of_one_shape(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of matrices to transform together: of one shape, with at most TOGETHER elements or one matrix.

    Without batches, the many small matrices of experts would each need their own launches.
    """
    ordered = sorted(matrices, key=lambda matrix: matrix.shape)
    for _, group in groupby(ordered, key=lambda matrix: matrix.shape):
        matrices_of_shape = list(group)
        count = max(1, TOGETHER // matrices_of_shape[0].numel())
        yield from (matrices_of_shape[at : at + count] for at in range(0, len(matrices_of_shape), count))


class MatrixExchange:
    """Replaces each whole gradient matrix of one buffer by a function of it.

    `shards` are the ranks that shard the buffer (ZeRO), and `cutting` the ranks that shard its matrices (tp or etp).
    `peers` returns, for a record of this rank, the records of the same parameter on all ranks of `cutting`.
    """

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
        remaining = iter(buffer.buckets)
        self.rounds = [[(next(remaining), plan) for plan in plans] for plans in rounds]

    @torch.no_grad()
    def run(self, transform: Transform) -> None:
        """Replace the gradients round by round. `transform` takes a batch of matrices [count, rows, columns]."""
        with self.shards.ledger.phase("optimizer"):
            for plans in self.rounds:
                gathered = [self._gather(bucket, plan) for bucket, plan in plans]
                matrices = [matrix for own, (_, plan) in zip(gathered, plans, strict=True) for matrix in own.of(plan)]
                for batch in _of_one_shape(matrices):
                    results = transform(torch.stack([matrix.view(matrix.shape[-2:]) for matrix in batch]))
                    for matrix, result in zip(batch, results, strict=True):
                        matrix.view(result.shape).copy_(result)
                for own, (bucket, plan) in zip(gathered, plans, strict=True):
                    self._return(own, bucket, plan)

    def _gather(self, bucket: Bucket, plan: BucketPlan) -> Gathered:
        """Gather this rank's whole parameters of a bucket, then the matrices of them that it owns."""
        flat = bucket.own_grads.new_empty(plan.held)
        redistribute([bucket.own_grads], plan.gather, self.shards, [flat])
        held = []
        for matrix, offset in zip(plan.matrices, plan.offsets, strict=True):
            slot = bucket.slots[matrix.parameter]
            held.append(flat[offset : offset + slot.record.numel].view(slot.record.local_shape))
        # `redistribute` expects a tensor for every matrix, so matrices of other owners get empty ones.
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
