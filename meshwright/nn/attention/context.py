"""Attention over sequences whose tokens are divided over ranks (context parallelism), in four ways with one result:

- gather: every rank gathers all keys and values, and its queries attend to them.
- ring: keys and values travel from rank to rank, and the results of the blocks are merged by their log-sums. Backward
  begins with the block that arrived last and runs in the opposite direction, so that the gradients of keys and values
  end on the rank that they belong to.
- ulysses: ranks exchange heads for tokens, so that each attends to whole sequences with a part of the heads.
- hybrid: an exchange of heads inside groups of `inner` ranks, and a ring (or a gather) between the groups.

A table of rows says which tokens a rank holds. Any table gives the same result, since visibility depends on the
positions and documents of rows alone. The full matrix of scores, [tokens, tokens], never exists, only tiles of it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.group import Group, group_named
from meshwright.comm.ops import all_gather, all_to_all, reduce_scatter
from meshwright.device import upload
from meshwright.nn.attention.pieces import PartialAttention, RowPositions, Sight, attend, attend_backward, no_gradient
from meshwright.nn.parallel import ContextGroups
from meshwright.spec.layout.pieces import usual_step


class ContextRows:
    """The rows of a micro-batch (their positions and documents) in the order of the ranks that hold them.

    It caches which rows see which, so that all layers share that.
    """

    def __init__(self, rows: RowPositions, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self._sights: dict[tuple[int, int, int, int], Sight] = {}

    def sight(self, at: int, to: int, count: int, window: int = 0) -> Sight:
        """Return which rows of rank `to` the rows of rank `at` see, of `count` ranks or groups of ranks."""
        key = (at, to, count, window)
        if key not in self._sights:
            self._sights[key] = Sight(self.rows.part(at, count), self.rows.part(to, count), self.device, window)
        return self._sights[key]

    def sight_of(self, at: int, count: int, window: int = 0) -> Sight:
        """Return which of all rows the rows of rank `at` see. The rows are put in natural order if that makes fewer
        pieces."""
        key = (at, -1, count, window)
        if key not in self._sights:
            one = self.rows.part(at, count)
            all_rows = self.rows
            # Pieces need keys in runs with the step of the queries. If that step is more than 1, natural order would
            # break these runs up.
            keys = all_rows if usual_step(one.numbers[0]) > 1 else all_rows.natural()
            sight = Sight(one, keys, self.device, window)
            self._sights[key] = sight if sight.pieces is not None else Sight(one, all_rows, self.device, window)
        return self._sights[key]

    @cached_property
    def natural(self) -> ContextRows:
        return ContextRows(self.rows.natural(), self.device)

    @cached_property
    def orders(self) -> tuple[Tensor, Tensor]:
        """The row at each place of the natural order, and the inverse, on the device: [batch, rows], or [1, rows] if
        all samples have the same order."""
        numbers = self.rows.numbers
        if (numbers == numbers[:1]).all():
            numbers = numbers[:1]
        return upload(torch.from_numpy(numbers.argsort(1)), self.device), upload(torch.from_numpy(numbers), self.device)


class _Gathered(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all ranks, which are gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: ContextRows, name: str, window: int) -> Tensor:
        group = group_named(name)
        sight = given.sight_of(group.index, group.size, window)
        merged = PartialAttention(q, v.shape[-1])
        keys, values = _in_sight_order(_gather(k, v, name), given, sight)
        attend(q, keys, values, sight, merged)
        out = merged.out.to(q.dtype)
        ctx.given, ctx.group, ctx.window = given, name, window
        ctx.save_for_backward(q, k, v, out, merged.sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        given, group = ctx.given, group_named(ctx.group)
        sight = given.sight_of(group.index, group.size, ctx.window)
        dq = no_gradient(q)
        keys, values = _in_sight_order(_gather(k, v, ctx.group, again=True), given, sight)
        both = torch.stack(attend_backward(q, keys, values, sight, grad, out, sums, dq)).to(k.dtype)
        # [all rows, 2, batch, heads, width]: reduce-scatter divides the first dimension.
        both = both.movedim(3, 0)
        both = both.contiguous() if sight.to is given.rows else _reorder_rows(both, given.orders[1], 0, 2)
        mine = reduce_scatter(both, ctx.group, group.size).movedim(0, 3)
        return dq.to(q.dtype), mine[0], mine[1], None, None, None


def _gather(k: Tensor, v: Tensor, group: str, again: bool = False) -> Tensor:
    # [rows, 2, batch, heads, width]: all-gather joins the first dimension.
    both = torch.stack([k, v]).movedim(3, 0).contiguous()
    gathered: Tensor = all_gather(both, group, group_named(group).size, again)
    return gathered


def _in_sight_order(both: Tensor, given: ContextRows, sight: Sight) -> tuple[Tensor, ...]:
    """Return gathered keys and values in the order that `sight` expects."""
    if sight.to is not given.rows:
        both = _reorder_rows(both, given.orders[0], 0, 2)
    return both.movedim(0, 3).unbind(0)


def _reorder_rows(x: Tensor, order: Tensor, rows: int, samples: int) -> Tensor:
    """Return x with the rows of dimension `rows` in another order.

    The order is [1, rows] if it is the same for all entries of dimension `samples`, or [samples, rows].
    """
    # torch.gather would read an index for every element.
    if len(order) == 1:
        return x.index_select(rows, order[0])
    by_sample = zip(x.split(1, samples), order, strict=True)
    return torch.cat([part.index_select(rows, one) for part, one in by_sample], samples)


class _Ring(torch.autograd.Function):
    """Attention of a rank's queries to keys and values that travel round a ring of ranks. In step i, rank r has the
    block of rank r - i. While a block is computed, the next one travels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: ContextRows, name: str, window: int) -> Tensor:
        group = group_named(name)
        merged = PartialAttention(q, v.shape[-1])
        me = max(0, group.index)
        n = group.size
        block = torch.stack([k, v])
        for step in range(n):
            coming = group.shift(block, 1) if step + 1 < n else None
            attend(q, block[0], block[1], given.sight(me, (me - step) % n, n, window), merged)
            block = block if coming is None else coming.receive()
        out = merged.out.to(q.dtype)
        ctx.given, ctx.group, ctx.window = given, name, window
        # The last block is saved, since backward begins with it.
        ctx.save_for_backward(q, block, out, merged.sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v.

        Rank r begins with the block of rank r + 1, which arrived last in forward, and passes blocks to rank r - 1, so
        that its own block comes last. The gradients of a block's keys and values travel one step behind it, together
        with the next block. So they arrive at their own rank with the last message. There are n messages: the first
        carries no gradients, the last no block.
        """
        q, block, out, sums = ctx.saved_tensors
        group, given = group_named(ctx.group), ctx.given
        me, n = max(0, group.index), group.size
        coming = group.shift(block, -1) if n > 1 else None
        dq, change = no_gradient(q), torch.empty(0)
        for step in range(n):
            sight = given.sight(me, (me + 1 + step) % n, n, ctx.window)
            change = torch.stack(attend_backward(q, block[0], block[1], sight, grad, out, sums, dq)).to(block.dtype)
            if coming is None:
                break
            arrived = coming.receive()
            if step > 0:
                change = change + arrived[-2:]
            block = arrived[:2]
            if step + 1 < n:
                coming = group.shift(torch.cat([block, change]) if step + 2 < n else change, -1)
        return dq.to(q.dtype), change[0], change[1], None, None, None


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, given: ContextRows, groups: ContextGroups, window: int = 0
) -> Tensor:
    """Return causal attention of this rank's queries [batch, heads, rows, dim] to the keys and values of all ranks.

    With a `window`, a query sees that many keys. Keys and values may have fewer heads.
    """
    n, heads = groups.inner.size, q.shape[1]
    if n > 1:
        # If there are fewer key heads than ranks, each of the ranks that share a head gets a copy of it.
        repeats = max(1, n // k.shape[1])
        parts = [x.repeat_interleave(repeats, 1) for x in (k, v)] if repeats > 1 else [k, v]
        q, k, v = _heads_for_rows(torch.cat([_by_rank(x, n) for x in (q, *parts)], 2), groups.inner).split(
            [heads // n, *(x.shape[1] // n for x in parts)], 1
        )
    if groups.outer.alone:
        y = _whole_sequences(q, k, v, given, groups.outer.name, window)
    else:
        way = _Gathered if groups.plan.gathers else _Ring
        y = way.apply(q, k, v, given, groups.outer.name, window)
    return y if n == 1 else _rows_for_heads(y, groups.inner)


def _by_rank(x: Tensor, n: int) -> Tensor:
    """Return [batch, heads, rows, dim] as [n, batch, heads / n, rows, dim]."""
    return x.unflatten(1, (n, -1)).movedim(1, 0)


def _heads_for_rows(x: Tensor, group: Group) -> Tensor:
    """Send each rank its heads [n, batch, heads, rows, dim], and return this rank's heads of all rows, [batch, heads,
    n * rows, dim]."""
    ones = [1] * group.size
    arrived: Tensor = all_to_all(x.contiguous(), group.name, ones, ones)
    return arrived.movedim(0, 2).flatten(2, 3)


def _rows_for_heads(x: Tensor, group: Group) -> Tensor:
    """Send each rank its rows of [batch, heads, n * rows, dim], and return this rank's rows of all heads."""
    ones = [1] * group.size
    sent = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()
    arrived: Tensor = all_to_all(sent, group.name, ones, ones)
    return arrived.movedim(0, 1).flatten(1, 2)


def _whole_sequences(q: Tensor, k: Tensor, v: Tensor, given: ContextRows, alone: str, window: int) -> Tensor:
    """Return attention for a rank that holds all rows, which are put in natural order for the fused kernels.

    `alone` names a group of this rank only.
    """
    order, back = given.orders
    q, k, v = (_Reordered.apply(x, order, back) for x in (q, k, v))
    if given.rows.documents is None and not window:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    else:
        y = _Ring.apply(q, k, v, given.natural, alone, window)
    return _Reordered.apply(y, back, order)


class _Reordered(torch.autograd.Function):
    """Puts the rows of [batch, heads, rows, dim] in another order; `back` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _reorder_rows(x, order, 2, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _reorder_rows(grad, back, 2, 0), None, None
