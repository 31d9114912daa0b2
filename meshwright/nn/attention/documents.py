"""Attention within documents that are packed into sequences, for a rank that holds whole sequences. It is a registered
operator, so that torch.compile can call it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.device import kind_of, upload
from meshwright.nn.attention.pieces import (
    PartialAttention,
    RowPositions,
    Sight,
    attend,
    attend_backward,
    empty_random_state,
    has_fused_kernel,
    kernel,
    kernel_backward,
    no_gradient,
    wide,
)

aten: Any = torch.ops.aten


class Documents(NamedTuple):
    """The documents of a micro-batch. A sample's padding is a document too."""

    # The token at which each document begins, and then the end of the last one: on the device, and again on the host.
    starts: Tensor
    on_host: Tensor
    # True if a token sees only the tokens before it, in its document.
    causal: bool = True
    # The number of tokens at the start of each document that all of the document sees, on the host.
    prefixes: Tensor | None = None
    # True if each sample is one document. Only attention with a window then needs the documents.
    whole: bool = False

    @staticmethod
    def of(
        segments: np.ndarray[Any, Any], device: torch.device, causal: bool = True, prefix: bool = False
    ) -> Documents:
        """Return the documents of samples, given the number [batch, seq] of each token's document in its sample.

        No document extends beyond its sample. With `prefix`, segment 0 is the part of a sample's first document that
        all of the document sees, and segment 1 is the rest of that document.
        """
        numbers = np.maximum(segments, 1) if prefix else segments
        begins = np.diff(numbers, axis=1, prepend=numbers[:, :1] - 1) != 0
        starts = np.append(np.flatnonzero(begins), segments.size).astype(np.int32)
        counts = np.add.reduceat((segments == 0).ravel(), starts[:-1], dtype=np.int32)
        prefixes = torch.from_numpy(counts) if prefix else None
        documents = Documents(upload(torch.from_numpy(starts), device), torch.from_numpy(starts), causal, prefixes)
        # If torch._dynamo is not imported, nothing is compiled. Importing it would take a second.
        if "torch._dynamo" in sys.modules:
            for x in (documents.starts, documents.on_host, *(() if prefixes is None else (prefixes,))):
                # Micro-batches differ in their number of documents.
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return documents

    @staticmethod
    def samples(batch: int, seq: int, device: torch.device) -> Documents:
        """Return the documents of samples that are one document each."""
        return Documents.of(np.zeros((batch, seq), np.int64), device)._replace(whole=True)


def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int = 0) -> Tensor:
    """Return attention within documents; q is [batch, heads, seq, width], and keys may have fewer heads. With a
    `window`, a token sees that many tokens, itself included."""
    return _DocumentAttention.apply(q, k, v, *documents[:4], window)


@pure_operator("meshwright::document_attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, on_host: Tensor, causal: bool, prefixes: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result, and the log-sums of the scores in the shape [heads, tokens].

    If each sample is one document, the log-sums keep the memory layout of the kernel, sample by sample. Only
    `_backward` reads them, and it expects that layout.
    """
    if _one_per_sample(q, on_host, prefixes, window):
        out, sums = kernel(q, k, v, causal)
        return _by_rows(out), sums.contiguous().view(q.shape[1], -1)
    if _in_one_call(q, prefixes):
        longest = int(on_host.diff().max())
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        sizes = (starts, starts, longest, longest, 0.0, causal, False)
        out, sums = aten._flash_attention_forward(*tokens, *sizes, **_reach(window))[:2]
        return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), sums
    sight = _sight(q, on_host, causal, prefixes, window)
    merged = PartialAttention(q, v.shape[-1])
    attend(q, k, v, sight, merged)
    return merged.out.to(q.dtype), merged.sums.transpose(0, 1).flatten(1)


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
    if _one_per_sample(q, on_host, prefixes, window):
        grads = kernel_backward(grad, q, k, v, out, sums.view(*q.shape[:3]), causal)
        return tuple(_by_rows(x) for x in grads)  # type: ignore[return-value]
    if _in_one_call(q, prefixes):
        longest = int(on_host.diff().max())
        batch = q.shape[0]
        unused = empty_random_state(q.device, torch.uint64, 2)
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (grad, q, k, v, out))
        grads = aten._flash_attention_backward(
            *tokens, sums, starts, starts, longest, longest, 0.0, causal, unused, unused, **_reach(window)
        )
        dq, dk, dv = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in grads)
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
    """Return x [batch, heads, seq, width] with the memory layout of a contiguous [batch, seq, heads, width]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *where: Any) -> Tensor:
        starts, on_host, ctx.causal, prefixes, ctx.window = where
        out, sums = _attention(q, k, v, *where)
        ctx.save_for_backward(q, k, v, out, sums, starts, on_host, prefixes)
        y: Tensor = out
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.window), None, None, None, None, None)


def _reach(window: int) -> dict[str, int]:
    """Return flash attention's arguments for the number of tokens that a token sees before and after itself."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _one_per_sample(q: Tensor, on_host: Tensor, prefixes: Tensor | None, window: int) -> bool:
    """Return whether every sample is one document, so that the kernel of plain attention applies, which is faster."""
    return has_fused_kernel(q) and prefixes is None and not window and len(on_host) == q.shape[0] + 1


def _in_one_call(q: Tensor, prefixes: Tensor | None) -> bool:
    return kind_of(q.device).has_flash_attention and has_fused_kernel(q) and prefixes is None


def _sight(q: Tensor, on_host: Tensor, causal: bool, prefixes: Tensor | None, window: int) -> Sight:
    """Return which keys the tokens see, by row numbers: a query sees the keys of its document up to its own number.

    Without causality, queries get higher numbers than all keys, and so see whole documents. The numbers of a prefix's
    queries are between those of the prefix's keys and those of all later keys.
    """
    batch, seq = q.shape[0], q.shape[2]
    lengths = on_host.diff().numpy()
    documents = np.repeat(np.arange(len(lengths)), lengths).reshape(batch, seq)
    numbers = np.arange(seq, dtype=np.int64)[None].repeat(batch, 0)
    assert not window or (causal and prefixes is None)
    if prefixes is not None:
        starts = on_host[:-1].numpy()
        places = np.arange(batch * seq).reshape(batch, seq) - starts[documents]
        first = places < prefixes.numpy()[documents]
        keys = RowPositions(np.where(first, numbers, numbers + 2 * seq), documents)
        return Sight(RowPositions(np.where(first, numbers + seq, numbers + 2 * seq), documents), keys, q.device)
    keys = RowPositions(numbers, documents)
    return Sight(keys if causal else RowPositions(numbers + seq, documents), keys, q.device, window)
