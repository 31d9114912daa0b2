"""Merging attention to some of the keys into the result so far, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # queries of one head per program


@triton.jit
def _merge(
    out, total, new, sums, index, queries, tokens, seq, top, new_b, new_n, new_h, sums_b, sums_h, sums_n,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, INDEXED: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    there = row < queries
    if INDEXED:
        token = tl.load(index + row, mask=there, other=0).to(tl.int64)
    else:
        token = sample * seq + top + row
    row = row.to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = there[:, None] & (col < WIDTH)[None, :]
    b = tl.load(sums + sample * sums_b + head * sums_h + row * sums_n, mask=there, other=0.0)
    y = tl.load(new + sample * new_b + row[:, None] * new_n + head * new_h + col[None, :], mask=inside, other=0.0)
    y = y.to(tl.float32)
    at = out + (token * HEADS + head)[:, None] * WIDTH + col[None, :]
    sum_at = total + head.to(tl.int64) * tokens + token
    if FRESH:
        merged, both = y, b
    else:
        a = tl.load(sum_at, mask=there, other=0.0)
        # The bound keeps `most` finite where neither result has seen a key: -inf - -inf would be NaN.
        most = tl.maximum(tl.maximum(a, b), -1e30)
        old, now = tl.exp(a - most), tl.exp(b - most)
        weight = old + now
        both = most + tl.log(weight)
        x = tl.load(at, mask=inside, other=0.0)
        # The weight is 0 if neither result has seen a key.
        merged = (x * old[:, None] + y * now[:, None]) / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(at, merged, mask=inside)
    tl.store(sum_at, both, mask=there)


def merge_into(
    out: Tensor, total: Tensor, new: Tensor, sums: Tensor, top: int, index: Tensor | None, fresh: bool
) -> None:
    """Merge a result of attention into the result so far, weighted by their log-sum-exps.

    `new` [batch, queries, heads, width] with log-sums `sums` [batch, heads, queries] goes into `out` [batch, seq,
    heads, width] with log-sums `total` [heads, batch, seq]. `out` and `total` are float32 and contiguous. The queries
    are those from `top` on, or the tokens that `index` names (then `new` has a batch of one). With `fresh`, the old
    contents are ignored and overwritten.
    """
    (batch, queries, heads, width), seq = new.shape, out.shape[1]
    grid = (triton.cdiv(queries, ROWS), heads, batch)
    _merge[grid](
        out, total, new, sums, total if index is None else index, queries, out.shape[0] * seq, seq, top,
        new.stride(0), new.stride(1), new.stride(2), *sums.stride(),
        HEADS=heads, WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=ROWS, INDEXED=index is not None,
        FRESH=fresh,
    )  # fmt: skip
