"""PowerSGD: in place of a matrix M, the product of two narrow factors is summed.

One step of a power iteration, from the factor Q that the last one left, with M = G + what was left out before:

    P = sum of M Q      P = orthonormal basis of P's columns      Q = sum of M^T P      the sum of G is about P Q^T

Each rank keeps M - P P^T M, so that what has arrived and what is kept are together the sum of all gradients. Parameters
that two factors would not make smaller are sent as they are, beside the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.comm import ReduceConfig
from meshwright.device import generator
from meshwright.layout.params import stream_seed
from meshwright.sharding.buffers import Bucket, FlatBuffer, Slot
from meshwright.sharding.compression.residual import Compressing, wide
from meshwright.sharding.compression.sizes import Matrices, matrices_of
from meshwright.sharding.reducers import PendingReduction


class LowRankReducer(Compressing):
    """Sums matrices as products of two factors. A share is no matrix: replicas sum theirs as they are."""

    def __init__(self, config: ReduceConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.factors: dict[int, Tensor] = {}  # Q of each parameter that is sent as a product, by the id of its slot

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        super().prepare(buffers)
        for slot in (slot for buffer in self.buffers for slot in buffer.slots):
            if (form := self.form(slot)).rank:
                self.factors[id(slot)] = self._drawn(slot, form)

    def form(self, slot: Slot) -> Matrices:
        return matrices_of(slot.record, self.config.rank)

    def _drawn(self, slot: Slot, form: Matrices) -> Tensor:
        numbers = generator(slot.grad.device)
        numbers.manual_seed(stream_seed(self.seed, "powersgd", slot.record.name))
        shape, dtype = (form.count, form.kept, form.rank), wide(slot.grad.dtype)
        return torch.empty(shape, dtype=dtype, device=slot.grad.device).normal_(generator=numbers)

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if bucket.stage or self.is_plain(bucket, group):
            return group.all_reduce(grads, wait=False)
        return LowRankSum(self, bucket, grads, grads, 0, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        if self.is_plain(bucket, group):
            return group.reduce_scatter(out, grads, wait=False)
        return LowRankSum(self, bucket, out, grads, bucket.share[0] - bucket.start, group)

    def is_plain(self, bucket: Bucket, group: Group) -> bool:
        return super().is_plain(bucket, group) or all(id(slot) not in self.factors for slot in bucket.slots)


class LowRankSum:
    """The sum of one bucket's matrices. `out` gets what begins at `offset` of it."""

    def __init__(
        self, reducer: LowRankReducer, bucket: Bucket, out: Tensor, grads: Tensor, offset: int, group: Group
    ) -> None:
        self._reducer, self._bucket, self._out, self._offset, self._group = reducer, bucket, out, offset, group
        self._x = reducer.with_residual(bucket, grads)
        self._parts = [self._first(slot) for slot in bucket.slots]
        self._sum = torch.cat([part.reshape(-1) for part in self._parts])
        self._pending = group.all_reduce(self._sum, wait=False)

    def _matrix(self, slot: Slot) -> Tensor:
        """Returns a parameter of the bucket as matrices, whose columns are on the side of the factor that is kept."""
        form, at = self._reducer.form(slot), slot.start - self._bucket.start
        found = self._x[at : at + form.numel].view(form.count, form.rows, form.columns)
        return found.mT if form.transposed else found

    def _first(self, slot: Slot) -> Tensor:
        factor = self._reducer.factors.get(id(slot))
        return self._matrix(slot) if factor is None else self._matrix(slot) @ factor

    def wait(self) -> None:
        self._pending.wait()
        reducer, bucket = self._reducer, self._bucket
        found = self._sum.split([part.numel() for part in self._parts])
        sums = {
            id(slot): part.view_as(first) for slot, part, first in zip(bucket.slots, found, self._parts, strict=True)
        }
        products = [slot for slot in bucket.slots if id(slot) in reducer.factors]
        bases = {id(slot): torch.linalg.qr(sums[id(slot)]).Q for slot in products}
        own = [self._matrix(slot).mT @ bases[id(slot)] for slot in products]
        second = torch.cat([factor.reshape(-1) for factor in own])
        pending = self._group.all_reduce(second, wait=False)
        for slot, factor in zip(products, own, strict=True):  # what is left of x is what is left out
            self._matrix(slot).sub_(bases[id(slot)] @ factor.mT)
        for slot in bucket.slots:
            if id(slot) not in reducer.factors:
                self._matrix(slot).zero_()
        reducer.keep(bucket, bucket.start, self._x, anew=True)
        pending.wait()
        for slot, part, factor in zip(products, second.split([factor.numel() for factor in own]), own, strict=True):
            arrived, kept = part.view_as(factor), reducer.factors[id(slot)]
            self._matrix(slot).copy_(bases[id(slot)] @ arrived.mT)
            kept.copy_(torch.where(arrived.isfinite().all(), arrived, kept))
        for slot in bucket.slots:
            if id(slot) not in reducer.factors:
                self._matrix(slot).copy_(sums[id(slot)])
        self._out.copy_(self._x[self._offset :][: self._out.numel()])
