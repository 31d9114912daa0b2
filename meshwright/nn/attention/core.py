"""The core of attention (the scores and the mix of the values), for a rank that holds whole sequences. The full matrix
of scores, [tokens, tokens], never exists, only tiles of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.nn.attention.documents import Documents, document_attention
from meshwright.spec.model.gpt import TILE_ROWS


def attention_core(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Documents | None, causal: bool, dropout: float,
    scale: float | None = None, window: int = 0,
) -> Tensor:  # fmt: skip
    """Return the softmax of the scores times the values, all [batch, heads, seq, width]; keys may have fewer heads.

    `mask` says where documents begin, or is added to the scores. Without it, a query sees all keys or, with `causal`,
    those up to its own position. With a `window`, a query sees that many keys, its own included, and `mask` must say
    where documents begin. `scale` multiplies the scores; the default is 1 / sqrt(width).
    """
    if isinstance(mask, Documents) and mask.whole and not window:
        mask = None
    assert scale is None or not isinstance(mask, Documents)
    if dropout and (mask is None or isinstance(mask, Documents)) and (q.is_cpu or (causal and mask is not None)):
        return _with_dropout(q, k, v, mask, causal, dropout, scale, window)
    if isinstance(mask, Documents):
        if not dropout:
            return document_attention(q, k, v, mask, window)
        # Without causality, a sample is one document followed by padding, so the keys of the first token's document
        # are visible to all queries that matter.
        numbers = _document_numbers(mask.starts, q)
        mask = (numbers == numbers[:, :1])[:, None, None]
    # This is a branch, not an expression, because a compiler may know the two sizes only as symbols.
    if q.shape[2] != k.shape[2]:
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1], scale=scale,
    )  # fmt: skip


def run_core(core: Callable[..., Tensor], recomputes: bool, dropout: float, q: Tensor, *given: Any) -> Tensor:
    """Return core(q, *given). If it `recomputes`, nothing is saved for backward, which computes the core again."""
    # In a compiled graph on a CPU, torch 2.13 would save the random state as well, behind the tensors that backward
    # writes to. It then counts tensors from the end, and complains that one of these has changed. On a CPU the core
    # saves little anyway.
    unsupported = torch.compiler.is_compiling() and q.is_cpu
    if not recomputes or unsupported or not torch.is_grad_enabled():
        return core(q, *given)
    y: Tensor = checkpoint(core, q, *given, use_reentrant=False, preserve_rng_state=dropout > 0)
    return y


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, causal: bool, dropout: float,
    scale: float | None = None, window: int = 0,
) -> Tensor:  # fmt: skip
    """Compute attention with dropout for kernels that have no dropout: those of a CPU, and those for documents.

    One tile of queries is computed at a time, and its scores are computed again in backward.
    """
    numbers = None if documents is None else _document_numbers(documents.starts, q)
    tiles = []
    for low in range(0, q.shape[2], TILE_ROWS):
        high = min(low + TILE_ROWS, q.shape[2])
        seen = slice(0, high if causal else k.shape[2])
        some = (q[:, :, low:high], k[:, :, seen], v[:, :, seen])
        tiles.append(checkpoint(_tile, *some, numbers, low, causal, dropout, scale, window, use_reentrant=False))
    return torch.cat(tiles, 2)


def _tile(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, low: int, causal: bool, dropout: float,
    scale: float | None, window: int = 0,
) -> Tensor:  # fmt: skip
    """Return attention of some queries, the first of which is at position `low`, to the given keys from position 0."""
    rows, keys = q.shape[2], k.shape[2]
    allowed = None
    if documents is not None:
        allowed = documents[:, None, low : low + rows, None] == documents[:, None, None, :keys]
    if causal:
        before = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(low)
        if window:
            before = before.triu(low - window + 1)
        allowed = before if allowed is None else allowed & before
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1], scale=scale
    )


def _document_numbers(starts: Tensor, q: Tensor) -> Tensor:
    """Return the number of each token's document, [batch, seq]."""
    batch, _, seq, _ = q.shape
    tokens = torch.arange(batch * seq, dtype=starts.dtype, device=starts.device)
    return torch.bucketize(tokens, starts, right=True).view(batch, seq)
