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
from meshwright.engine.optim.owned import MatrixState, own_matrices
from meshwright.engine.optim.rule import MatrixRule
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.spec.layout.params import ParamRecord

# Takes a batch of matrices [count, rows, columns] and their states, changes the states, and returns the results.
Transform = Callable[[Tensor, Sequence[Tensor]], Tensor]


class MatrixWork(NamedTuple):
    """A matrix that this rank owns, and its states."""

    matrix: Tensor
    states: Sequence[Tensor]


class Gathered(NamedTuple):
    """The tensors of a bucket on one rank after both hops.

    `flat` has the whole parameters of this rank. For each of their matrices, `held` is the view of its parameter in
    `flat`, and `whole` the matrix itself if this rank owns it, else an empty tensor.
    """

    flat: Tensor
    held: list[Tensor]
    whole: list[Tensor]

    def of(self, plan: BucketPlan) -> list[tuple[int, Tensor]]:
        """Return the number and the tensor of each matrix that this rank owns."""
        return [(number, self.whole[number]) for number in plan.mine]


def _of_one_shape(works: Sequence[MatrixWork]) -> Iterator[list[MatrixWork]]:
    """Yield batches of matrices to transform together: of one shape, with at most TOGETHER elements or one matrix.

    Without batches, the many small matrices of experts would each need their own launches.
    """
    ordered = sorted(works, key=lambda work: work.matrix.shape)
    for _, group in groupby(ordered, key=lambda work: work.matrix.shape):
        of_shape = list(group)
        count = max(1, TOGETHER // of_shape[0].matrix.numel())
        yield from (of_shape[at : at + count] for at in range(0, len(of_shape), count))


def _transform(batch: Sequence[MatrixWork], transform: Transform) -> None:
    """Replace matrices of one shape by their results, and update their states."""
    stacked = [torch.stack(each) for each in zip(*(work.states for work in batch), strict=True)]
    results = transform(torch.stack([work.matrix.view(work.matrix.shape[-2:]) for work in batch]), stacked)
    for number, work in enumerate(batch):
        work.matrix.view(results[number].shape).copy_(results[number])
        for state, updated in zip(work.states, stacked, strict=True):
            state.copy_(updated[number])


class MatrixExchange:
    """Replaces each whole gradient matrix of one buffer by a function of it.

    `shards` are the ranks that shard the buffer (ZeRO), and `cutting` the ranks that shard its matrices (tp or etp).
    `peers` returns, for a record of this rank, the records of the same parameter on all ranks of `cutting`.
    """

    def __init__(
        self, buffer: FlatBuffer, shards: Group, cutting: Group,
        peers: Callable[[ParamRecord], Sequence[ParamRecord]], rule: MatrixRule,
    ) -> None:  # fmt: skip
        self.buffer, self.shards, self.cutting = buffer, shards, cutting
        buckets = [
            (b.stop - b.start, [MatrixParameter(s.start - b.start, tuple(peers(s.record))) for s in b.slots])
            for b in buffer.buckets
        ]
        rounds = plan_rounds(buckets, (shards.size, shards.index), (cutting.size, cutting.index), rule.matrix_flops)
        remaining = iter(buffer.buckets)
        self.rounds = [[(next(remaining), plan) for plan in plans] for plans in rounds]
        self.states = [MatrixState(name, buffer, {}) for name in rule.matrix_states(1, 1)]
        # By bucket and number of the matrix: the states of each matrix that this rank owns.
        self._states: dict[tuple[int, int], list[Tensor]] = {}
        for state in self.states:
            self._allocate(state, rule)

    def _allocate(self, state: MatrixState, rule: MatrixRule) -> None:
        """Allocate a state of all matrices that this rank owns."""
        dtype = torch.promote_types(self.buffer.grads.dtype, torch.float32)

        def shape(rows: int, columns: int) -> tuple[int, ...]:
            return rule.matrix_states(rows, columns)[state.name]

        for bucket, plan in (pair for plans in self.rounds for pair in plans):
            for parameter, group in groupby(plan.mine, key=lambda number: plan.matrices[number].parameter):
                numbers, slot = list(group), bucket.slots[parameter]
                firsts = [plan.first_owner(number) == self.cutting.index for number in numbers]
                matrices = [plan.matrices[number] for number in numbers]
                owned, views = own_matrices(slot, zip(matrices, firsts, strict=True), shape, dtype)
                if owned.tensor.numel():
                    state.held[id(slot)] = owned
                for number, view in zip(numbers, views, strict=True):
                    self._states.setdefault((bucket.index, number), []).append(view)

    @torch.no_grad()
    def run(self, transform: Transform) -> None:
        """Replace the gradients round by round."""
        with self.shards.ledger.phase("optimizer"):
            for plans in self.rounds:
                gathered = [self._gather(bucket, plan) for bucket, plan in plans]
                works = [
                    MatrixWork(matrix, self._states.get((bucket.index, number), ()))
                    for own, (bucket, plan) in zip(gathered, plans, strict=True)
                    for number, matrix in own.of(plan)
                ]
                for batch in _of_one_shape(works):
                    _transform(batch, transform)
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
