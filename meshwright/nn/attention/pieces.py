"""Attention of one block of queries to one block of keys, by fused kernels without a mask.

`spec/layout/pieces.py` splits the visible pairs into rectangles and triangles, which kernels can take: cuDNN's or flash
attention on CUDA (with many pieces in one call where documents cause many), torch's kernel on a CPU. If the rows do not
lie in runs, or no kernel takes the dtype, attention is computed in tiles with a mask.

The results of several blocks are merged in float32 (float64 for float64) by the log-sum-exps of their scores, called
log-sums here. The full matrix of scores, [tokens, tokens], never exists, only tiles of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.device import cudnn_attends, kind_of, upload
from meshwright.kernels import kernels_take
from meshwright.spec.layout.pieces import VisibleBlock, pieces, rounds

aten: Any = torch.ops.aten
ALL = slice(None)
# The number of queries, and of keys, in a tile that is computed with a mask.
TILE = 1024
# From this number of pieces in a block on, one call for all of them is faster than one call for each.
GROUPED_CALL_PIECES = 16


class RowPositions(NamedTuple):
    """The position of each row in its sequence, and the number of its document, [batch, rows], on the host."""

    numbers: np.ndarray[Any, np.dtype[np.int64]]
    documents: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def part(self, index: int, count: int) -> RowPositions:
        """Return the rows of one of `count` ranks, or groups of ranks, whose rows are stored one after the other."""
        size = self.numbers.shape[1] // count
        at = (ALL, slice(index * size, (index + 1) * size))
        return RowPositions(self.numbers[at], None if self.documents is None else self.documents[at])

    def natural(self) -> RowPositions:
        """Return the same rows in the order of their sequences."""
        order = self.numbers.argsort(1)
        documents = None if self.documents is None else np.take_along_axis(self.documents, order, 1)
        return RowPositions(np.take_along_axis(self.numbers, order, 1), documents)


class KernelCall(NamedTuple):
    """Pieces that one call of a variable-length kernel computes."""

    # The indices of the tokens to take as queries and keys, piece by piece; None: all tokens in their order.
    queries: Tensor | None
    keys: Tensor | None
    # The start of each piece among these tokens, and then their number.
    query_starts: Tensor
    key_starts: Tensor
    # The largest numbers of queries and of keys in a piece.
    longest: tuple[int, int]
    causal: bool


class Sight:
    """The keys that a block of queries sees: all up to their own positions, or those in a `window`.

    `pieces` lists rectangles and triangles, each with the samples that it applies to. It is None if there would be too
    many of them; then a mask is needed.
    """

    def __init__(self, at: RowPositions, to: RowPositions, device: torch.device, window: int = 0) -> None:
        self.at, self.to, self.device, self.window = at, to, device, window
        by_sample: list[list[VisibleBlock] | None] = []
        # If all samples have the same rows and no documents, the pieces of one sample apply to all of them.
        alike = all(x is None for x in (at.documents, to.documents)) and all(
            bool((x.numbers == x.numbers[:1]).all()) for x in (at, to)
        )
        for i in range(1 if alike else len(at.numbers)):
            of_at, of_to = (None if x.documents is None else x.documents[i] for x in (at, to))
            by_sample.append(pieces(at.numbers[i], to.numbers[i], of_at, of_to, window))
        with_samples = [(ALL if alike else slice(i, i + 1), found) for i, found in enumerate(by_sample)]
        self.pieces: list[tuple[slice, VisibleBlock]] | None = None
        if not any(found is None for found in by_sample):
            self.pieces = [(samples, piece) for samples, found in with_samples for piece in found or ()]
        self.alike = alike

    @cached_property
    def split(self) -> list[tuple[slice, VisibleBlock]]:
        """The pieces, split into rectangles and triangles."""
        return [(samples, part) for samples, piece in self.pieces or () for part in piece.split()]

    @cached_property
    def rounds(self) -> list[KernelCall]:
        """The pieces in rounds, each computed by one call."""
        batch = len(self.at.numbers)
        queries = self.at.numbers.shape[1]
        keys = self.to.numbers.shape[1]
        # The pieces in terms of tokens of the whole micro-batch, where samples follow one another.
        moved = [
            VisibleBlock(p.top + i * queries, p.bottom + i * queries, p.left + i * keys, p.right + i * keys, *p[4:])
            for samples, p in self.pieces or ()
            for i in range(batch)[samples]
        ]
        return [
            self._round(members, batch * queries, batch * keys)
            for members in rounds(moved, batch * queries, batch * keys)
        ]

    def _round(self, members: list[VisibleBlock], queries: int, keys: int) -> KernelCall:
        sides = ([(p.top, p.bottom) for p in members], [(p.left, p.right) for p in members])
        index, starts, longest = [], [], []
        for spans, whole in zip(sides, (queries, keys), strict=True):
            lengths = [end - begin for begin, end in spans]
            tokens = np.concatenate(
                [np.arange(*span)[:: -1 if p.backwards else 1] for span, p in zip(spans, members, strict=True)]
            )
            same = len(tokens) == whole and bool((np.diff(tokens) == 1).all())
            index.append(None if same else upload(torch.from_numpy(tokens), self.device))
            starts.append(upload(torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)), self.device))
            longest.append(max(lengths))
        return KernelCall(index[0], index[1], starts[0], starts[1], (longest[0], longest[1]), members[0].causal)

    @cached_property
    def mask_inputs(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """The positions and documents of queries and keys, on the device, for the masks of tiles."""
        return tuple(
            (upload(torch.from_numpy(x.numbers), self.device), x.documents if x.documents is None else
             upload(torch.from_numpy(x.documents), self.device))
            for x in (self.at, self.to)
        )  # fmt: skip


def no_gradient(q: Tensor) -> Tensor:
    """Return zeros to which the gradient of q is added, [batch, heads, rows, width], with rows before heads in memory.

    That is the layout that kernels want.
    """
    batch, heads, rows, width = q.shape
    return torch.zeros((batch, rows, heads, width), dtype=wide(q.dtype), device=q.device).transpose(1, 2)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class PartialAttention:
    """The result of attention so far: `out` [batch, heads, queries, width], and each query's log-sum of scores, `sums`
    [batch, heads, queries], which is -inf if the query has seen no key."""

    def __init__(self, q: Tensor, width: int) -> None:
        batch, heads, queries, _ = q.shape
        self._out = q.new_empty((batch, queries, heads, width), dtype=wide(q.dtype))
        self._sums = q.new_empty((heads, batch, queries), dtype=wide(q.dtype))
        # True for the queries that already have a result. It is on the host, which must choose what to launch.
        self._written = np.zeros((batch, queries), bool)

    @property
    def out(self) -> Tensor:
        return self._out.transpose(1, 2)

    @property
    def sums(self) -> Tensor:
        return self._sums.transpose(0, 1)

    def add(self, samples: slice, top: int, new: Tensor, sums: Tensor) -> None:
        """Merge in the result `new` of some samples, for the queries from `top` on."""
        if new.is_meta:
            return
        fresh = self._mark_written((samples, slice(top, top + new.shape[2])))
        if kernels_take(new, self._out) and samples == ALL:
            from meshwright.kernels.merge import merge_into

            merge_into(self._out, self._sums, new.transpose(1, 2), sums, top, None, fresh)
            return
        at = (samples, ALL, slice(top, top + new.shape[2]))
        out, total = self.out[at], self.sums[at]
        if fresh:
            out.copy_(new)
            total.copy_(sums)
        else:
            merged, both = merge(out, total, new.to(out.dtype), sums.to(out.dtype))
            out.copy_(merged)
            total.copy_(both)

    def add_tokens(self, index: Tensor | None, new: Tensor, sums: Tensor) -> None:
        """Merge in the result `new` [tokens, heads, width] with log-sums [heads, tokens] of the tokens `index`, or of
        all tokens."""
        fresh = self._mark_written(ALL) if index is None else self._mark_written(ALL, some=True)
        from meshwright.kernels.merge import merge_into

        flat = self._out.flatten(0, 1)[None]
        merge_into(flat, self._sums.flatten(1)[:, None], new[None], sums[None], 0, index, fresh)

    def _mark_written(self, at: Any, some: bool = False) -> bool:
        """Record that a result of these queries (or of `some` of them) is about to be written.

        Return True if it is the first one for all of them, so that there is nothing to merge it with.
        """
        first = not self._written.any()
        fresh = not some and not self._written[at].any()
        # Queries that this first result leaves out must hold zeros and -inf, in case they never get a result.
        if first and (some or self._written[at].size < self._written.size):
            self._out.zero_()
            self._sums.fill_(-torch.inf)
        self._written[at] = True
        return fresh


def merge(a: Tensor, a_sum: Tensor, b: Tensor, b_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Return the merged result, and log-sums, of attention to two sets of keys."""
    total = torch.logaddexp(a_sum, b_sum)
    base = _finite(total)
    return a * (a_sum - base).exp()[..., None] + b * (b_sum - base).exp()[..., None], total


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight, into: PartialAttention) -> None:
    """Merge attention of queries [batch, heads, rows, width] to a block of keys, which may have fewer heads, into a
    result."""
    if sight.pieces is None or not has_fused_kernel(q):
        _tiled_forward(q, k, v, sight, into)
    elif _in_rounds(q, sight):
        tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        for call in sight.rounds:
            results = aten._flash_attention_forward(
                *_chosen(tokens, call), call.query_starts, call.key_starts, *call.longest, 0.0, call.causal, False
            )
            into.add_tokens(call.queries, results[0], results[1])
    else:
        for samples, p in sight.split:
            at, to = (samples, ALL, slice(p.top, p.bottom)), (samples, ALL, slice(p.left, p.right))
            if p.backwards:
                into.add(samples, p.top, *_read_backwards(kernel, (q[at], k[to], v[to]), p.causal))
            else:
                into.add(samples, p.top, *kernel(q[at], k[to], v[to], p.causal))


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, grad: Tensor, out: Tensor, sums: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the gradient of q to `dq` and return the gradients of one block's k and v. `out` and `sums` are those of
    attention to all blocks."""
    if sight.pieces is None or not has_fused_kernel(q):
        return _tiled_backward(q, k, v, sight, grad, out, sums, dq)
    if _in_rounds(q, sight):
        return _backward_in_rounds(q, k, v, sight, grad, out, sums, dq)
    total: tuple[Tensor, Tensor] | None = None
    for samples, p in sight.split:
        at, to = (samples, ALL, slice(p.top, p.bottom)), (samples, ALL, slice(p.left, p.right))
        given = (grad[at], q[at], k[to], v[to], out[at], sums[at])
        if p.backwards:
            q_grad, *kv_grads = _read_backwards(kernel_backward, given, p.causal)
        else:
            q_grad, *kv_grads = kernel_backward(*given, p.causal)
        dq[at].add_(q_grad)
        if len(sight.split) == 1 and kv_grads[0].shape == k.shape:
            return kv_grads[0], kv_grads[1]
        total = total or _zeros(k, v, dq.dtype)
        for whole, more in zip(total, kv_grads, strict=True):
            whole[to].add_(more)
    return total or _zeros(k, v, dq.dtype)


def _read_backwards(function: Callable[..., Any], tensors: tuple[Tensor, ...], causal: bool) -> Any:
    """Return the results of a kernel that reads and writes the rows of [batch, heads, rows, ...] in reverse order.

    In a causal piece, the first query then sees all keys, and each later query one key less.
    """
    return tuple(x.flip(2) for x in function(*(x.flip(2) for x in tensors), causal))


def _zeros(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device)


def _backward_in_rounds(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, grad: Tensor, out: Tensor, sums: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, grad, out = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, grad, out))
    sums = sums.transpose(0, 1).flatten(1)
    dk, dv = _zeros(k, v, dq.dtype)
    # This is a view, since dq is stored as [batch, rows, heads, width].
    whole = dq.transpose(1, 2).flatten(0, 1)
    unused = empty_random_state(q.device, torch.uint64, 2)
    for call in sight.rounds:
        given = [grad, *(q, k, v), out]
        g, *qkv, o = (
            x if at is None else x[at]
            for x, at in zip(given, (call.queries, call.queries, call.keys, call.keys, call.queries), strict=True)
        )
        lse = sums if call.queries is None else sums[:, call.queries]
        grads = aten._flash_attention_backward(
            g, *qkv, o, lse.contiguous(), call.query_starts, call.key_starts, *call.longest, 0.0, call.causal,
            unused, unused,
        )  # fmt: skip
        for total, more, index in zip((whole, dk, dv), grads, (call.queries, call.keys, call.keys), strict=True):
            if index is None:
                total += more
            else:
                # An indexed += is correct because no token occurs twice in a round.
                total[index] += more.to(total.dtype)
    dk, dv = (x.unflatten(0, (len(sight.at.numbers), -1)).transpose(1, 2) for x in (dk, dv))
    return dk, dv


def _chosen(qkv: list[Tensor], call: KernelCall) -> Iterator[Tensor]:
    for x, index in zip(qkv, (call.queries, call.keys, call.keys), strict=True):
        yield x if index is None else x[index]


def has_fused_kernel(q: Tensor) -> bool:
    """Return whether a fused kernel takes queries of this dtype and width."""
    if kind_of(q.device).has_flash_attention:
        return q.element_size() == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return (q.is_cpu or q.is_meta) and q.dtype != torch.float16


def _in_rounds(q: Tensor, sight: Sight) -> bool:
    """Return whether pieces are computed in rounds, by few calls.

    That pays off if there are many pieces. It also does if samples have documents, whose lengths differ in every
    micro-batch, because cuDNN takes long to prepare each new shape.
    """
    return kind_of(q.device).has_flash_attention and (not sight.alike or len(sight.split) >= GROUPED_CALL_PIECES)


def kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention of all queries to all keys (or, if causal, to those up to their own place), and the log-sums."""
    if q.is_cpu:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, sums
    if q.is_meta:
        batch, heads, rows, _ = q.shape
        out = q.new_empty((batch, rows, heads, v.shape[-1])).transpose(1, 2)
        return out, q.new_empty((batch, heads, rows), dtype=wide(q.dtype))
    if cudnn_attends(q):
        out, sums = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)[:2]
        return out, sums.squeeze(-1)
    out, sums = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)[:2]
    return out, sums


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the result and the log-sums of attention to all keys."""
    if q.is_cpu:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, sums, 0.0, causal)
    if q.is_meta:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    none = empty_random_state(q.device, torch.int64)
    sizes = (q.shape[2], k.shape[2], 0.0, causal)
    sums = sums.contiguous()
    if cudnn_attends(q):
        # torch caches cuDNN's plans by the strides of q, k and v alone, and reads the gradient and the result with the
        # strides that they had in the first call. So both always get the layout that attention with this q returns.
        grad, out = _laid_out_like(grad, q), _laid_out_like(out, q)
        backward = aten._scaled_dot_product_cudnn_attention_backward
        return backward(grad, q, k, v, out, sums[..., None], none, none, None, None, None, *sizes)
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, sums, None, None, *sizes, none, none)


def _laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """Return x without gaps in memory, with its dimensions in the same memory order as those of the other tensor."""
    order = sorted(range(x.dim()), key=other.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


@cache
def empty_random_state(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a placeholder for the random state that kernels need for dropout. It is cached, since no call uses it."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _finite(log_sum: Tensor) -> Tensor:
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def _tiles(sight: Sight) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the tiles of queries and keys, each with the mask of visible keys, [batch, 1, 1, queries, keys].

    A query sees the keys up to its own position (within the window) in the same document. On a CPU, tiles without
    visible keys are skipped; on a device, the test would make the host wait.
    """
    (at, at_documents), (to, to_documents) = sight.mask_inputs
    for top in range(0, at.shape[1], TILE):
        for left in range(0, to.shape[1], TILE):
            queries, keys = slice(top, top + TILE), slice(left, left + TILE)
            seen = to[:, None, keys] <= at[:, queries, None]
            if sight.window:
                seen &= to[:, None, keys] > at[:, queries, None] - sight.window
            if at_documents is not None and to_documents is not None:
                seen &= to_documents[:, None, keys] == at_documents[:, queries, None]
            if not seen.is_cpu or bool(seen.any()):
                yield queries, keys, seen[:, None, None]


def _group_heads(x: Tensor, heads: int) -> Tensor:
    """Return x [batch, heads, rows, dim] as [batch, key heads, query heads per key head, rows, dim]."""
    return x.unflatten(1, (heads, -1))


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (1.0 / math.sqrt(q.shape[-1]))
    return scores.masked_fill(~seen, -torch.inf)


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight, into: PartialAttention) -> None:
    dtype = wide(q.dtype)
    q = _group_heads(q.to(dtype), k.shape[1])
    k, v = (x.to(dtype)[:, :, None] for x in (k, v))
    for queries, keys, seen in _tiles(sight):
        scores = _scores(q[..., queries, :], k[..., keys, :], seen)
        sums = scores.logsumexp(-1)
        share = torch.where(seen, (scores - _finite(sums)[..., None]).exp(), 0.0)
        into.add(ALL, queries.start, (share @ v[..., keys, :]).flatten(1, 2), sums.flatten(1, 2))


def _tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, grad: Tensor, out: Tensor, sums: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    heads, dtype = k.shape[1], dq.dtype
    # The backward of flash attention: the sum over all keys of share * its gradient is the dot product of grad and out.
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1)
    q, grad, whole = (_group_heads(x, heads) for x in (q.to(dtype), grad.to(dtype), dq))
    k, v = (x.to(dtype)[:, :, None] for x in (k, v))
    sums, delta = (_group_heads(x[..., None], heads) for x in (_finite(sums), delta))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    scale = 1.0 / math.sqrt(q.shape[-1])
    for queries, keys, seen in _tiles(sight):
        one, other = (..., queries, ALL), (..., keys, ALL)
        share = torch.where(seen, (_scores(q[one], k[other], seen) - sums[one]).exp(), 0.0)
        change = share * (grad[one] @ v[other].transpose(-1, -2) - delta[one]) * scale
        whole[one].add_(change @ k[other])
        dk[other].add_((change.transpose(-1, -2) @ q[one]).sum(2, keepdim=True))
        dv[other].add_((share.transpose(-1, -2) @ grad[one]).sum(2, keepdim=True))
    return dk[:, :, 0], dv[:, :, 0]
