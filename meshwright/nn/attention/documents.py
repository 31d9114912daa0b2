"""Attention within documents that lie one behind the other in a sequence, for one rank that holds all of it. It is a
registered operator, so that torch.compile can call it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.device import upload
from meshwright.nn.attention.pieces import (
    Merged,
    Rows,
    Sight,
    attend,
    attend_backward,
    fused,
    kernel,
    kernel_backward,
    no_gradient,
    no_seed,
    wide,
)

aten: Any = torch.ops.aten


class Documents(NamedTuple):
    """Where the documents of a micro-batch begin among its tokens, and where the last one ends, on the device and on
    the host; whether a token sees only those before it; and, if some begin with tokens that all of a document sees, how
    many, on the host. A sample's padding is a document too. `whole`: each sample is one document, which only a window
    needs to be told."""

    starts: Tensor
    on_host: Tensor
    causal: bool = True
    prefixes: Tensor | None = None
    whole: bool = False

    @staticmethod
    def of(
        segments: np.ndarray[Any, Any], device: torch.device, causal: bool = True, prefix: bool = False
    ) -> Documents:
        """`segments` [batch, seq] number the documents of each sample; none goes beyond its sample. With `prefix`,
        segment 0 is the part of its sample's first document that all of it sees, and segment 1 the rest."""
        known = np.maximum(segments, 1) if prefix else segments
        begins = np.diff(known, axis=1, prepend=known[:, :1] - 1) != 0
        starts = np.append(np.flatnonzero(begins), segments.size).astype(np.int32)
        counts = np.add.reduceat((segments == 0).ravel(), starts[:-1], dtype=np.int32)
        seen = torch.from_numpy(counts) if prefix else None
        found = Documents(upload(torch.from_numpy(starts), device), torch.from_numpy(starts), causal, seen)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
            for x in (found.starts, found.on_host, *(() if seen is None else (seen,))):
                torch._dynamo.maybe_mark_dynamic(x, 0)  # micro-batches have other numbers of documents
        return found

    @staticmethod
    def samples(batch: int, seq: int, device: torch.device) -> Documents:
        """Samples that are one document each."""
        return Documents.of(np.zeros((batch, seq), np.int64), device)._replace(whole=True)


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int = 0) -> Tensor:
    """Return attention within documents; q is [batch, heads, seq, width], and keys may have fewer heads. With a
    `window`, a token sees as many, itself included."""
    return _DocumentAttention.apply(q, k, v, *documents[:4], window)


@pure_operator("meshwright::document_attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, on_host: Tensor, causal: bool, prefixes: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and the log-sums as [heads, tokens]; those of samples that are one document each stay in
    memory as the kernel leaves them, sample by sample, since only `_backward` reads them."""
    if _one_each(q, on_host, prefixes, window):
        out, sums = kernel(q, k, v, causal)
        return _by_rows(out), sums.contiguous().view(q.shape[1], -1)
    if _in_one_call(q, prefixes):
        longest = int(on_host.diff().max())
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        sizes = (starts, starts, longest, longest, 0.0, causal, False)
        out, sums = aten._flash_attention_forward(*tokens, *sizes, **_reach(window))[:2]
        return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), sums
    sight, found = _sight(q, on_host, causal, prefixes, window), Merged(q, v.shape[-1])
    attend(q, k, v, sight, found)
    return found.out.to(q.dtype), found.sums.transpose(0, 1).flatten(1)


@shapes_of(_attention)
def _(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, on_host: Tensor, causal: bool, prefixes: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, seq, _ = q.shape
    out = q.new_empty((batch, seq, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((heads, batch * seq), dtype=wide(q.dtype))


@pure_operator("meshwright::document_attention_backward")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, on_host: Tensor,
    prefixes: Tensor | None, causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _one_each(q, on_host, prefixes, window):
        found = kernel_backward(grad, q, k, v, out, sums.view(*q.shape[:3]), causal)
        return tuple(_by_rows(x) for x in found)  # type: ignore[return-value]
    if _in_one_call(q, prefixes):
        longest, batch = int(on_host.diff().max()), q.shape[0]
        unused = no_seed(q.device, torch.uint64, 2)
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (grad, q, k, v, out))
        found = aten._flash_attention_backward(
            *tokens, sums, starts, starts, longest, longest, 0.0, causal, unused, unused, **_reach(window)
        )
        dq, dk, dv = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in found)
        return dq, dk, dv
    dq = no_gradient(q)
    total = sums.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
    dk, dv = attend_backward(q, k, v, _sight(q, on_host, causal, prefixes, window), grad, out, total, dq)
    return tuple(_by_rows(x.to(q.dtype)) for x in (dq, dk, dv))  # type: ignore[return-value]


@shapes_of(_backward)
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, on_host: Tensor,
    prefixes: Tensor | None, causal: bool, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return tuple(_by_rows(torch.empty_like(x)) for x in (q, k, v))  # type: ignore[return-value]


def _by_rows(x: Tensor) -> Tensor:
    """Return [batch, heads, seq, width] as it lies in memory as [batch, seq, heads, width]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Tensor:
        starts, on_host, ctx.causal, prefixes, ctx.window = where
        out, sums = _attention(q, k, v, *where)
        ctx.save_for_backward(q, k, v, out, sums, starts, on_host, prefixes)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.window), None, None, None, None, None)


def _reach(window: int) -> dict[str, int]:
    """Return how flash attention is told how far back and ahead a token looks."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _one_each(q: Tensor, on_host: Tensor, prefixes: Tensor | None, window: int) -> bool:
    """Whether every sample is one document, so that the kernel of plain attention does it, which is faster."""
    return fused(q) and prefixes is None and not window and len(on_host) == q.shape[0] + 1


def _in_one_call(q: Tensor, prefixes: Tensor | None) -> bool:
    return q.is_cuda and fused(q) and prefixes is None


def _sight(q: Tensor, on_host: Tensor, causal: bool, prefixes: Tensor | None, window: int) -> Sight:
    """Return what the tokens see. Queries see keys up to their own number, so those with higher numbers than all keys
    see whole documents. Queries of a prefix lie between the keys of the prefix and those after it."""
    batch, seq = q.shape[0], q.shape[2]
    lengths = on_host.diff().numpy()
    documents = np.repeat(np.arange(len(lengths)), lengths).reshape(batch, seq)
    numbers = np.arange(seq, dtype=np.int64)[None].repeat(batch, 0)
    assert not window or (causal and prefixes is None)
    if prefixes is not None:
        starts = on_host[:-1].numpy()
        places = np.arange(batch * seq).reshape(batch, seq) - starts[documents]
        first = places < prefixes.numpy()[documents]
        keys = Rows(np.where(first, numbers, numbers + 2 * seq), documents)
        return Sight(Rows(np.where(first, numbers + seq, numbers + 2 * seq), documents), keys, q.device)
    keys = Rows(numbers, documents)
    return Sight(keys if causal else Rows(numbers + seq, documents), keys, q.device, window)
