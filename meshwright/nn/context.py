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

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.group import Group, group_named
from meshwright.comm.ops import all_gather, all_to_all, reduce_scatter
from meshwright.nn.parallel import ContextGroups
from meshwright.parts.context import CONTEXT_TILE as TILE


class ContextRows(NamedTuple):
    """The numbers in their sequence, and the documents, of all rows of a micro-batch, [batch, seq], in the order of the
    ranks that hold them."""

    rows: Tensor
    documents: Tensor | None = None

    def part(self, index: int, count: int) -> ContextRows:
        """Returns the rows of one of `count` neighbouring ranks, or groups of ranks."""
        size = self.rows.shape[1] // count
        at = slice(index * size, (index + 1) * size)
        return ContextRows(self.rows[:, at], None if self.documents is None else self.documents[:, at])


def _visible(q: ContextRows, k: ContextRows, queries: slice, keys: slice) -> Tensor:
    """Returns which keys of a tile its queries may see, [batch, 1, 1, queries, keys]: those before them, in the same
    document."""
    seen = k.rows[:, None, keys] <= q.rows[:, queries, None]
    if q.documents is not None and k.documents is not None:
        seen &= k.documents[:, None, keys] == q.documents[:, queries, None]
    return seen[:, None, None]


def _tiles(q: ContextRows, k: ContextRows) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields the tiles of queries and keys with what is visible in them; on a CPU without those where nothing is."""
    for top in range(0, q.rows.shape[1], TILE):
        for left in range(0, k.rows.shape[1], TILE):
            queries, keys = slice(top, top + TILE), slice(left, left + TILE)
            seen = _visible(q, k, queries, keys)
            if seen.device.type != "cpu" or bool(seen.any()):
                yield queries, keys, seen


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Returns [batch, heads, rows, dim] as [batch, heads of keys, queries of each, rows, dim]."""
    return x.unflatten(1, (heads, -1))


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (1.0 / math.sqrt(q.shape[-1]))
    return scores.masked_fill(~seen, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, at: ContextRows, to: ContextRows) -> tuple[Tensor, Tensor]:
    """Returns attention of queries at `at` to keys at `to`, in float32 at least, and the log-sum of each query's
    scores, -inf where it sees no key. q is [batch, heads, rows, dim]; keys may have fewer heads."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, (k, v) = _grouped(q.to(wide), k.shape[1]), (x.to(wide)[:, :, None] for x in (k, v))
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=wide, device=q.device)
    total = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
    for queries, keys, seen in _tiles(at, to):
        scores = _scores(q[..., queries, :], k[..., keys, :], seen)
        log_sum = scores.logsumexp(-1)
        share = torch.where(seen, (scores - _finite(log_sum)[..., None]).exp(), 0.0)
        out[..., queries, :], total[..., queries] = merge(
            out[..., queries, :], total[..., queries], share @ v[..., keys, :], log_sum
        )
    return out.flatten(1, 2), total.flatten(1, 2)


def _finite(log_sum: Tensor) -> Tensor:
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def merge(a: Tensor, a_sum: Tensor, b: Tensor, b_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the results of attention to two sets of keys by the log-sums of their scores."""
    total = torch.logaddexp(a_sum, b_sum)
    base = _finite(total)
    return a * (a_sum - base).exp()[..., None] + b * (b_sum - base).exp()[..., None], total


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, at: ContextRows, to: ContextRows, grad: Tensor, log_sum: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v of one block. `log_sum` and `delta`, each query's sum of grad x out, are
    those of attention to all blocks."""
    heads, wide = k.shape[1], log_sum.dtype
    q, grad = _grouped(q.to(wide), heads), _grouped(grad.to(wide), heads)
    k, v = (x.to(wide)[:, :, None] for x in (k, v))
    log_sum, delta = (_grouped(x[..., None], heads) for x in (_finite(log_sum), delta))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = 1.0 / math.sqrt(q.shape[-1])
    for queries, keys, seen in _tiles(at, to):
        one, other = (..., queries, slice(None)), (..., keys, slice(None))
        share = torch.where(seen, (_scores(q[one], k[other], seen) - log_sum[one]).exp(), 0.0)
        change = share * (grad[one] @ v[other].transpose(-1, -2) - delta[one]) * scale
        dq[one] += change @ k[other]
        dk[other] += (change.transpose(-1, -2) @ q[one]).sum(2, keepdim=True)
        dv[other] += (share.transpose(-1, -2) @ grad[one]).sum(2, keepdim=True)
    return dq.flatten(1, 2), dk[:, :, 0], dv[:, :, 0]


def _delta(grad: Tensor, out: Tensor, wide: torch.dtype) -> Tensor:
    return (grad.to(wide) * out.to(wide)).sum(-1)


class _Gathered(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all, which are gathered again in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, documents: Tensor | None, group: str
    ) -> Tensor:
        ctx.group, given = group, ContextRows(rows, documents)
        keys, values = _gather(k, v, group)
        place = group_named(group)
        out, log_sum = attend(q, keys, values, given.part(place.index, place.size), given)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, rows, documents, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, rows, documents, out, log_sum = ctx.saved_tensors
        given, group = ContextRows(rows, documents), group_named(ctx.group)
        keys, values = _gather(k, v, ctx.group, again=True)
        at, delta = given.part(group.index, group.size), _delta(grad, out, log_sum.dtype)
        dq, dk, dv = attend_backward(q, keys, values, at, given, grad, log_sum, delta)
        both = torch.stack([dk, dv]).to(k.dtype)  # [2, batch, heads, all rows, dim]
        mine = reduce_scatter(both.movedim(3, 0).contiguous(), ctx.group, group.size).movedim(0, 3)
        return dq.to(q.dtype), mine[0], mine[1], None, None, None


def _gather(k: Tensor, v: Tensor, group: str, again: bool = False) -> tuple[Tensor, Tensor]:
    both = torch.stack([k, v]).movedim(3, 0).contiguous()  # rows first, as gathers want them
    keys, values = all_gather(both, group, group_named(group).size, again).movedim(0, 3).unbind(0)
    return keys, values


class _Ring(torch.autograd.Function):
    """Attention of a rank's queries to keys and values that travel round the ring: block i at rank r comes from rank
    r - i. While a block is computed, the next one travels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, documents: Tensor | None, name: str) -> Tensor:
        group, given = group_named(name), ContextRows(rows, documents)
        at, block = given.part(group.index, group.size), torch.stack([k, v])
        out: Tensor | None = None
        log_sum: Tensor | None = None
        for step in range(group.size):
            coming = group.shift(block, 1) if step + 1 < group.size else None
            source = given.part((group.index - step) % group.size, group.size)
            found, sums = attend(q, block[0], block[1], at, source)
            out, log_sum = (found, sums) if out is None or log_sum is None else merge(out, log_sum, found, sums)
            block = block if coming is None else coming.arrived()
        assert out is not None and log_sum is not None
        out = out.to(q.dtype)
        ctx.group = name
        ctx.save_for_backward(q, block, rows, documents, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Rank r begins with block r + 1, which arrived last, and passes blocks to rank r - 1: its own comes last.

        The gradients of a block's keys and values travel one step behind it, with the block that follows, so that they
        arrive at home with the last message: n messages, of which the first has no gradients and the last no block.
        """
        q, block, rows, documents, out, log_sum = ctx.saved_tensors
        group, given = group_named(ctx.group), ContextRows(rows, documents)
        n, at, delta = group.size, given.part(group.index, group.size), _delta(grad, out, log_sum.dtype)
        coming = group.shift(block, -1) if n > 1 else None
        total, change = torch.zeros(q.shape, dtype=log_sum.dtype, device=q.device), torch.empty(0)
        for step in range(n):
            source = given.part((group.index + 1 + step) % n, n)
            dq, dk, dv = attend_backward(q, block[0], block[1], at, source, grad, log_sum, delta)
            total, change = total + dq, torch.stack([dk, dv]).to(block.dtype)
            if coming is None:
                break
            arrived = coming.arrived()
            if step > 0:
                change = change + arrived[-2:]
            block = arrived[:2]
            if step + 1 < n:
                coming = group.shift(torch.cat([block, change]) if step + 2 < n else change, -1)
        return total.to(q.dtype), change[0], change[1], None, None, None


def context_attention(q: Tensor, k: Tensor, v: Tensor, given: ContextRows, groups: ContextGroups) -> Tensor:
    """Returns causal attention of this rank's queries [batch, heads, rows, dim] to the keys and values of all ranks.
    Keys and values may have fewer heads."""
    n, heads = groups.inner.size, q.shape[1]
    if n > 1:
        repeats = max(1, n // k.shape[1])  # each of the ranks that share a head gets a copy of it
        parts = [x.repeat_interleave(repeats, 1) for x in (k, v)] if repeats > 1 else [k, v]
        q, k, v = _heads_for_rows(torch.cat([_by_rank(x, n) for x in (q, *parts)], 2), groups.inner).split(
            [heads // n, *(x.shape[1] // n for x in parts)], 1
        )
    if groups.outer.alone and given.documents is None:
        y = _natural(q, k, v, given.rows)
    else:
        way = _Gathered if groups.kind == "gather" else _Ring
        y = way.apply(q, k, v, given.rows, given.documents, groups.outer.name)
    return y if n == 1 else _rows_for_heads(y, groups.inner)


def _by_rank(x: Tensor, n: int) -> Tensor:
    """Returns [batch, heads, rows, dim] as [n, batch, heads / n, rows, dim]."""
    return x.unflatten(1, (n, -1)).movedim(1, 0)


def _heads_for_rows(x: Tensor, group: Group) -> Tensor:
    """Sends each rank its heads [n, batch, heads, rows, dim] and returns this rank's of all rows."""
    ones = [1] * group.size
    arrived: Tensor = all_to_all(x.contiguous(), group.name, ones, ones)
    return arrived.movedim(0, 2).flatten(2, 3)  # [batch, heads, n x rows, dim]


def _rows_for_heads(x: Tensor, group: Group) -> Tensor:
    """Sends each rank its rows of [batch, heads, n x rows, dim] and returns this rank's rows of all heads."""
    ones = [1] * group.size
    sent = x.unflatten(2, (group.size, -1)).movedim(2, 0).contiguous()
    arrived: Tensor = all_to_all(sent, group.name, ones, ones)
    return arrived.movedim(0, 1).flatten(1, 2)


def _natural(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Attention to whole sequences, which are brought into their natural order for the fused kernel."""
    order = rows.argsort(1)  # the row that lies at place i has place rows[i] in the natural order
    q, k, v = (_Reordered.apply(x, order, rows) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return _Reordered.apply(y, rows, order)


class _Reordered(torch.autograd.Function):
    """Rows [batch, heads, rows, dim] in another order; `back` is the inverse of `order`. (Autograd's own gather would
    keep an index for every element.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.take_along_dim(order[:, None, :, None], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad.take_along_dim(back[:, None, :, None], 2), None, None
