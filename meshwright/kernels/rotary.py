"""Rotary position embedding: rotates queries and keys, and writes them with the values into one tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Per program: the fastest of the sizes tried on an H200.
HEADS, WARPS = 16, 2


@triton.jit
def _of_three(q, k, v, row_q, row_k, row_v, from_q, from_k, from_v, at, inside):
    """Load the elements of each head from q, k or v, whichever holds it."""
    x = tl.load(q + row_q[:, None] + at[None, :], mask=from_q[:, None] & inside[None, :], other=0.0).to(tl.float32)
    x += tl.load(k + row_k[:, None] + at[None, :], mask=from_k[:, None] & inside[None, :], other=0.0).to(tl.float32)
    x += tl.load(v + row_v[:, None] + at[None, :], mask=from_v[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return x


@triton.jit
def _turn(
    q, k, v, out, cos, sin, seq, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, table_b, table_s, sign,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    b, s = (token // seq).to(tl.int64), (token % seq).to(tl.int64)
    total: tl.constexpr = QUERIES + 2 * KEYS
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    at = tl.arange(0, HALF_BLOCK)
    inside = at < HALF
    turns = h < QUERIES + KEYS
    from_q, from_k, from_v = h < QUERIES, (h >= QUERIES) & turns, (h >= QUERIES + KEYS) & (h < total)
    q += b * q_b + s * q_s
    k += b * k_b + s * k_s
    v += b * v_b + s * v_s
    row_q, row_k, row_v = h * q_h, (h - QUERIES) * k_h, (h - QUERIES - KEYS) * v_h
    c = tl.load(cos + b * table_b + s * table_s + at, mask=inside, other=1.0).to(tl.float32)[None, :]
    n = tl.load(sin + b * table_b + s * table_s + at, mask=inside, other=0.0).to(tl.float32)[None, :] * sign
    # Values are copied: they are rotated by an angle of 0.
    c = tl.where(turns[:, None], c, 1.0)
    n = tl.where(turns[:, None], n, 0.0)
    first = _of_three(q, k, v, row_q, row_k, row_v, from_q, from_k, from_v, at, inside)
    second = _of_three(q, k, v, row_q, row_k, row_v, from_q, from_k, from_v, HALF + at, inside)
    here = out + token.to(tl.int64) * total * WIDTH + h[:, None] * WIDTH
    mask = (h < total)[:, None] & inside[None, :]
    tl.store(here + at[None, :], first * c - second * n, mask=mask)
    tl.store(here + HALF + at[None, :], second * c + first * n, mask=mask)
    # Elements beyond the rotary part are copied.
    if WIDTH > 2 * HALF:
        last = 2 * HALF + tl.arange(0, REST_BLOCK)
        there = last < WIDTH
        x = _of_three(q, k, v, row_q, row_k, row_v, from_q, from_k, from_v, last, there)
        tl.store(here + last[None, :], x, mask=(h < total)[:, None] & there[None, :])


def rotate_qkv(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return one tensor [batch, seq, all heads, width] of q, k and v [batch, seq, heads, width], with q and k rotated.

    The tables of cosines and sines are [1 or batch, seq, 1, half]. `inverse` rotates back, for backward.
    """
    batch, seq, queries, width = q.shape
    keys, half = k.shape[2], cos.shape[-1]
    assert all(x.stride(3) == 1 for x in (q, k, v)) and cos.stride() == sin.stride() and cos.stride(3) == 1
    out = torch.empty((batch, seq, queries + 2 * keys, width), dtype=q.dtype, device=q.device)
    grid = (batch * seq, triton.cdiv(queries + 2 * keys, HEADS))
    _turn[grid](
        q, k, v, out, cos, sin, seq, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), -1.0 if inverse else 1.0,
        QUERIES=queries, KEYS=keys, WIDTH=width, HALF=half, HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(max(1, width - 2 * half)), HEADS=HEADS, num_warps=WARPS,
    )  # fmt: skip
    return out
