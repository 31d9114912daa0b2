"""Attention over sequences whose tokens lie on several ranks (context parallelism), by four ways that give one result:

- gather: every rank gathers the keys and values of all, and its queries attend to them.
- ring: keys and values travel from rank to rank; results of the blocks are merged by their log-sums. Backward begins
  with the block that arrived last and runs the other way round, so that gradients of keys and values arrive at home.
- ulysses: ranks exchange heads for tokens, so that each attends to whole sequences with a part of the heads.
- hybrid: an exchange of heads inside groups of `inner` ranks, and a ring between the groups.

Which tokens a rank holds is a table of rows: any table gives the same result, since who may see whom is decided by the
rows' numbers and documents alone. Scores exist only in tiles, never as a whole [tokens, tokens].
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
from meshwright.nn.attention.pieces import Merged, Rows, Sight, attend, attend_backward, no_gradient
from meshwright.nn.parallel import ContextGroups
from meshwright.spec.layout.pieces import usual_step


class ContextRows:
    """The numbers in their sequence, and the documents, of all rows of a micro-batch, in the order of the ranks that
    hold them; and what they say about who sees whom, which all layers share."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self._found: dict[tuple[int, int, int, int], Sight] = {}

    def sight(self, at: int, to: int, count: int, window: int = 0) -> Sight:
        """What the rows of one of `count` ranks, or groups of ranks, see of those of another."""
        key = (at, to, count, window)
        if key not in self._found:
            self._found[key] = Sight(self.rows.part(at, count), self.rows.part(to, count), self.device, window)
        return self._found[key]

    def gathered(self, at: int, count: int, window: int = 0) -> Sight:
        """What the rows of one rank see of all rows: in their natural order, where that makes few pieces."""
        key = (at, -1, count, window)
        if key not in self._found:
            one, all_rows = self.rows.part(at, count), self.rows
            found = Sight(one, all_rows if usual_step(one.numbers[0]) > 1 else all_rows.natural(), self.device, window)
            self._found[key] = found if found.pieces is not None else Sight(one, all_rows, self.device, window)
        return self._found[key]

    @cached_property
    def natural(self) -> ContextRows:
        return ContextRows(self.rows.natural(), self.device)

    @cached_property
    def orders(self) -> tuple[Tensor, Tensor]:
        """Which row lies at each place of the natural order, and its inverse, on the device: [batch, rows], or
        [1, rows] where all samples have the same."""
        numbers = self.rows.numbers
        if (numbers == numbers[:1]).all():
            numbers = numbers[:1]
        return upload(torch.from_numpy(numbers.argsort(1)), self.device), upload(torch.from_numpy(numbers), self.device)


class _Gathered(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all, which are gathered again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: ContextRows, name: str, window: int) -> Tensor:
        group = group_named(name)
        sight, found = given.gathered(group.index, group.size, window), Merged(q, v.shape[-1])
        keys, values = _ordered(_gather(k, v, name), given, sight)
        attend(q, keys, values, sight, found)
        out = found.out.to(q.dtype)
        ctx.given, ctx.group, ctx.window = given, name, window
        ctx.save_for_backward(q, k, v, out, found.sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        given, group = ctx.given, group_named(ctx.group)
        sight, dq = given.gathered(group.index, group.size, ctx.window), no_gradient(q)
        keys, values = _ordered(_gather(k, v, ctx.group, again=True), given, sight)
        both = torch.stack(attend_backward(q, keys, values, sight, grad, out, sums, dq)).to(k.dtype)
        both = both.movedim(3, 0)  # [all rows, 2, batch, heads, width]: scatters want rows first
        both = both.contiguous() if sight.to is given.rows else _taken(both, given.orders[1], 0, 2)
        mine = reduce_scatter(both, ctx.group, group.size).movedim(0, 3)
        return dq.to(q.dtype), mine[0], mine[1], None, None, None


def _gather(k: Tensor, v: Tensor, group: str, again: bool = False) -> Tensor:
    both = torch.stack([k, v]).movedim(3, 0).contiguous()  # rows first, as gathers want them
    gathered: Tensor = all_gather(both, group, group_named(group).size, again)
    return gathered


def _ordered(both: Tensor, given: ContextRows, sight: Sight) -> tuple[Tensor, ...]:
    """Return gathered keys and values in the order that `sight` expects."""
    if sight.to is not given.rows:
        both = _taken(both, given.orders[0], 0, 2)
    return both.movedim(0, 3).unbind(0)


def _taken(x: Tensor, order: Tensor, rows: int, samples: int) -> Tensor:
    """Return x with its dimension `rows` in another order: [1, rows] for all of the dimension `samples`, or one for
    each. (A gather would read an index for every element.)"""
    if len(order) == 1:
        return x.index_select(rows, order[0])
    each = zip(x.split(1, samples), order, strict=True)
    return torch.cat([part.index_select(rows, one) for part, one in each], samples)


class _Ring(torch.autograd.Function):
    """Attention of a rank's queries to keys and values that travel round the ring: block i at rank r comes from rank
    r - i. While a block is computed, the next one travels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: ContextRows, name: str, window: int) -> Tensor:
        group, found = group_named(name), Merged(q, v.shape[-1])
        me, n, block = max(0, group.index), group.size, torch.stack([k, v])
        for step in range(n):
            coming = group.shift(block, 1) if step + 1 < n else None
            attend(q, block[0], block[1], given.sight(me, (me - step) % n, n, window), found)
            block = block if coming is None else coming.arrived()
        out = found.out.to(q.dtype)
        ctx.given, ctx.group, ctx.window = given, name, window
        ctx.save_for_backward(q, block, out, found.sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Rank r begins with block r + 1, which arrived last, and passes blocks to rank r - 1: its own comes last.

        The gradients of a block's keys and values travel one step behind it, with the block that follows, so that they
        arrive at home with the last message: n messages, of which the first has no gradients and the last no block.
        """
        q, block, out, sums = ctx.saved_tensors
        group, given = group_named(ctx.group), ctx.given
        me, n = max(0, group.index), group.size
        coming = group.shift(block, -1) if n > 1 else None
        dq, change = no_gradient(q), torch.empty(0)
        for step in range(n):
            sight = given.sight(me, (me + 1 + step) % n, n, ctx.window)
            found = attend_backward(q, block[0], block[1], sight, grad, out, sums, dq)
            change = torch.stack(found).to(block.dtype)
            if coming is None:
                break
            arrived = coming.arrived()
            if step > 0:
                change = change + arrived[-2:]
            block = arrived[:2]
            if step + 1 < n:
                coming = group.shift(torch.cat([block, change]) if step + 2 < n else change, -1)
        return dq.to(q.dtype), change[0], change[1], None, None, None


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, given: ContextRows, groups: ContextGroups, window: int = 0
) -> Tensor:
    """Return causal attention of this rank's queries [batch, heads, rows, dim] to the keys and values of all ranks,
    over a window if there is one. Keys and values may have fewer heads."""
    n, heads = groups.inner.size, q.shape[1]
    if n > 1:
        repeats = max(1, n // k.shape[1])  # each of the ranks that share a head gets a copy of it
        parts = [x.repeat_interleave(repeats, 1) for x in (k, v)] if repeats > 1 else [k, v]
        q, k, v = _heads_for_rows(torch.cat([_by_rank(x, n) for x in (q, *parts)], 2), groups.inner).split(
            [heads // n, *(x.shape[1] // n for x in parts)], 1
        )
    if groups.outer.alone:
        y = _natural(q, k, v, given, groups.outer.name, window)
    else:
        way = _Gathered if groups.plan.gathers else _Ring
        y = way.apply(q, k, v, given, groups.outer.name, window)
    return y if n == 1 else _rows_for_heads(y, groups.inner)


def _by_rank(x: Tensor, n: int) -> Tensor:
    """Return [batch, heads, rows, dim] as [n, batch, heads / n, rows, dim]."""
    return x.unflatten(1, (n, -1)).movedim(1, 0)


def _heads_for_rows(x: Tensor, group: Group) -> Tensor:
    """Send each rank its heads [n, batch, heads, rows, dim] and returns this rank's of all rows."""
    ones = [1] * group.size
    arrived: Tensor = all_to_all(x.contiguous(), group.name, ones, ones)
    return arrived.movedim(0, 2).flatten(2, 3)  # [batch, heads, n x rows, dim]


def _rows_for_heads(x: Tensor, group: Group) -> Tensor:
    """Send each rank its rows of [batch, heads, n x rows, dim] and returns this rank's rows of all heads."""
    ones = [1] * group.size
    sent = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()
    arrived: Tensor = all_to_all(sent, group.name, ones, ones)
    return arrived.movedim(0, 1).flatten(1, 2)


def _natural(q: Tensor, k: Tensor, v: Tensor, given: ContextRows, alone: str, window: int) -> Tensor:
    """Attention to whole sequences, which are brought into their natural order for the fused kernels."""
    order, back = given.orders
    q, k, v = (_Reordered.apply(x, order, back) for x in (q, k, v))
    if given.rows.documents is None and not window:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    else:
        y = _Ring.apply(q, k, v, given.natural, alone, window)
    return _Reordered.apply(y, back, order)


class _Reordered(torch.autograd.Function):
    """Rows [batch, heads, rows, dim] in another order; `back` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _taken(x, order, 2, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _taken(grad, back, 2, 0), None, None
