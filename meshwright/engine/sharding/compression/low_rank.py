"""PowerSGD: instead of a matrix M, the ranks sum two narrow factors.

One step of a power iteration starts from the factor Q of the previous step, with M = G + residual:

    P = sum of M Q      P = orthonormal basis of P's columns      Q = sum of M^T P      the sum of G is about P Q^T

The new residual of each rank is M - P P^T M, so that the approximated sums and all residuals add up to the sum of all
gradients. Parameters that two factors would not make smaller are sent uncompressed together with the first factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.comm import ReduceConfig
from meshwright.device import generator
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer, Slot
from meshwright.engine.sharding.compression.residual import CompressingReducer, wide
from meshwright.engine.sharding.compression.sizes import Matrices, matrices_of
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.spec.layout.params import Box, ParamRecord, stream_seed

if TYPE_CHECKING:
    from meshwright.engine.sharding.reducers import SideTensors

Value = TypeVar("Value")


class LowRankReducer(CompressingReducer):
    """Sums matrices as products of two factors. Shards are not matrices, so their replicas are summed uncompressed."""

    def __init__(self, config: ReduceConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.factors: dict[int, Tensor] = {}  # Q of each parameter that is sent as a product, by the id of its slot

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        super().prepare(buffers)
        for slot in (slot for buffer in self.buffers for slot in buffer.slots):
            if (form := self.form(slot)).rank:
                shape = (form.count, form.kept, form.rank)
                like = slot.grad
                self.factors[id(slot)] = torch.empty(shape, dtype=wide(like.dtype), device=like.device)
                self.draw(slot)

    def sends_product(self, slot: Slot) -> bool:
        return id(slot) in self.factors

    def form(self, slot: Slot) -> Matrices:
        return matrices_of(slot.record, self.config.rank)

    def draw(self, slot: Slot) -> None:
        """Initialise the factor of a parameter for a new run, equal on all data-parallel ranks."""
        if (factor := self.factors.get(id(slot))) is None:
            return
        numbers = generator(factor.device)
        numbers.manual_seed(stream_seed(self.seed, "powersgd", slot.record.name))
        factor.normal_(generator=numbers)

    def side_states(self) -> Iterator[SideTensors]:
        products = {slot.record.name for buffer in self.buffers for slot in buffer.slots if self.sends_product(slot)}
        for buffer in self.buffers:
            held = {}
            for slot in (slot for slot in buffer.slots if slot.record.name in products):
                # A few copied key-value rows may be sent uncompressed while the query rows of the same tensor are sent
                # as a product. A checkpoint only holds whole tensors, so the former get zeros.
                whole_rows = slot.record.local_shape[-1] == slot.record.shape[-1]
                form = replace(self.form(slot), rank=self.config.rank, transposed=whole_rows)
                record = factor_record(slot.record, form)
                factor = self.factors.get(id(slot))
                zeros = torch.zeros(record.local_shape, dtype=wide(slot.grad.dtype), device=slot.grad.device)
                held[id(slot)] = (zeros if factor is None else factor, record)
            yield "factor", buffer, held, self.draw

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if bucket.stage or self.is_plain(bucket, group):
            return group.all_reduce(grads, wait=False)
        return LowRankSum(self, bucket, grads, grads, 0, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        if self.is_plain(bucket, group):
            return group.reduce_scatter(out, grads, wait=False)
        return LowRankSum(self, bucket, out, grads, bucket.share[0] - bucket.start, group)

    def is_plain(self, bucket: Bucket, group: Group) -> bool:
        return super().is_plain(bucket, group) or not any(map(self.sends_product, bucket.slots))


class LowRankSum:
    """The sum of one bucket's matrices. `out` receives the elements from `offset` on."""

    def __init__(
        self, reducer: LowRankReducer, bucket: Bucket, out: Tensor, grads: Tensor, offset: int, group: Group
    ) -> None:
        self._reducer, self._bucket, self._out, self._offset, self._group = reducer, bucket, out, offset, group
        self._x = reducer.with_residual(bucket, grads)
        self._parts = [self._first(slot) for slot in bucket.slots]
        self._sum = torch.cat([part.reshape(-1) for part in self._parts])
        self._pending = group.all_reduce(self._sum, wait=False)
        reducer.register(self)

    def _matrix(self, slot: Slot) -> Tensor:
        """Return a parameter of the bucket as matrices, transposed if the saved factor belongs to their rows."""
        form = self._reducer.form(slot)
        at = slot.start - self._bucket.start
        matrices = self._x[at : at + form.numel].view(form.count, form.rows, form.columns)
        return matrices.mT if form.transposed else matrices

    def _first(self, slot: Slot) -> Tensor:
        matrix = self._matrix(slot)
        return matrix @ self._reducer.factors[id(slot)] if self._reducer.sends_product(slot) else matrix

    def proceed(self) -> None:
        self._pending.wait()
        reducer, bucket = self._reducer, self._bucket
        summed = self._sum.split([part.numel() for part in self._parts])
        self._sums = [part.view_as(first) for part, first in zip(summed, self._parts, strict=True)]
        bases = (torch.linalg.qr(x).Q if reducer.sends_product(slot) else None for slot, x in self._of(self._sums))
        self._bases = list(bases)
        own = [None if base is None else self._matrix(slot).mT @ base for slot, base in self._of(self._bases)]
        self._second = [factor for factor in own if factor is not None]
        self._sum = torch.cat([factor.reshape(-1) for factor in self._second])
        self._pending = self._group.all_reduce(self._sum, wait=False)
        # Subtract the compressed part from x, so that the residual remains.
        for (slot, base), factor in zip(self._of(self._bases), own, strict=True):
            matrix = self._matrix(slot)
            if base is None or factor is None:
                matrix.zero_()
            else:
                matrix.sub_(base @ factor.mT)
        reducer.keep(bucket, bucket.start, self._x, replaces=True)

    def _of(self, values: Sequence[Value]) -> Iterator[tuple[Slot, Value]]:
        return zip(self._bucket.slots, values, strict=True)

    def wait(self) -> None:
        self._reducer.proceed()
        self._pending.wait()
        arrived = iter(self._sum.split([factor.numel() for factor in self._second]))
        for (slot, base), first in zip(self._of(self._bases), self._sums, strict=True):
            if base is None:
                self._matrix(slot).copy_(first)
                continue
            saved = self._reducer.factors[id(slot)]
            factor = next(arrived).view_as(saved)
            self._matrix(slot).copy_(base @ factor.mT)
            # A column of zeros would stay zero in every later step, and a number that is not finite would spread.
            useful = factor.isfinite().all() & (factor != 0).any(-2, keepdim=True)
            saved.copy_(torch.where(useful, factor, saved))
        self._out.copy_(self._x[self._offset :][: self._out.numel()])


def factor_record(record: ParamRecord, form: Matrices) -> ParamRecord:
    """Return the record of a parameter's saved factor, which is sharded like the parameter along the saved side."""
    side = -2 if form.transposed else -1
    rank = form.rank

    def cut(place: tuple[int, ...], last: int) -> tuple[int, ...]:
        return (*place[:-2], place[side], last)

    boxes = tuple(Box(cut(b.start, 0), cut(b.shape, rank), cut(b.local_start, 0)) for b in record.boxes)
    return replace(record, shape=cut(record.shape, rank), local_shape=cut(record.local_shape, rank), boxes=boxes)
