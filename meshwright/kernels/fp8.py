"""Scaled casts to fp8: one pass finds the largest magnitude, a second one writes the cast, its transpose, or both.

An fp8 product wants both factors contiguous along the dimension that is summed. A gradient takes part in two products,
which sum over different dimensions, so it is needed in both orders. The transpose is written from the same read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_R, TILE_C, TILE_WARPS = 128, 128, 4  # the fastest of the tiles tried on an H200
LARGEST_BLOCK, LARGEST_LOOP = 4096, 8
# The least magnitude to scale by, so that a tensor of zeros is not divided by zero.
TINY = tl.constexpr(1e-12)


@triton.jit
def _largest(x, out, size, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * LOOP)
    top = tl.zeros((BLOCK,), tl.float32)
    for i in range(LOOP):
        at = begin + i * BLOCK + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.abs(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)))
    tl.atomic_max(out, tl.max(top, 0))


@triton.jit
def _largest_of_lines(
    x, of_rows, of_columns, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    here = r.to(tl.int64)[:, None] * columns + c[None, :]
    y = tl.abs(tl.load(x + here, mask=inside, other=0.0).to(tl.float32))
    if ROWS:
        tl.atomic_max(of_rows + r, tl.max(y, 1), mask=r < rows)
    if COLUMNS:
        tl.atomic_max(of_columns + c, tl.max(y, 0), mask=c < columns)


@triton.jit
def _within(z, limit):
    """Return z clamped to +-limit. A NaN stays, so that it reaches the gradient norm and the step is skipped."""
    low = tl.maximum(z, -limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _cast(
    x, of_rows, of_columns, out, across, scale, across_scale, rows, columns, limit,
    LINES: tl.constexpr, OUT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    here = r.to(tl.int64)[:, None] * columns + c[None, :]
    y = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if OUT:
        if LINES:
            top = tl.maximum(tl.load(of_rows + r, mask=r < rows, other=1.0), TINY)
            # All programs of these rows compute the same scale, and the first one stores it.
            tl.store(scale + r, top / limit, mask=(r < rows) & (tl.program_id(1) == 0))
            z = y * (limit / top)[:, None]
        else:
            top = tl.maximum(tl.load(of_rows), TINY)
            tl.store(scale, top / limit)
            z = y * (limit / top)
        tl.store(out + here, _within(z, limit).to(out.dtype.element_ty), mask=inside)
    if ACROSS:
        if LINES:
            top = tl.maximum(tl.load(of_columns + c, mask=c < columns, other=1.0), TINY)
            tl.store(across_scale + c, top / limit, mask=(c < columns) & (tl.program_id(0) == 0))
            z = y * (limit / top)[None, :]
        else:
            top = tl.maximum(tl.load(of_columns), TINY)
            tl.store(across_scale, top / limit)
            z = y * (limit / top)
        z = _within(z, limit).to(across.dtype.element_ty)
        there = c.to(tl.int64)[:, None] * rows + r[None, :]
        tl.store(across + there, tl.trans(z), mask=(c < columns)[:, None] & (r < rows)[None, :])


def largest_magnitudes(x: Tensor, lines: bool, rows_wanted: bool, columns_wanted: bool) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes of the rows and of the columns, or without `lines` the whole tensor's, twice."""
    rows, columns = x.shape
    if not lines:
        out = torch.zeros((), dtype=torch.float32, device=x.device)
        blocks = triton.cdiv(x.numel(), LARGEST_BLOCK * LARGEST_LOOP)
        _largest[(blocks,)](x, out, x.numel(), BLOCK=LARGEST_BLOCK, LOOP=LARGEST_LOOP, num_warps=8)
        return out, out
    of_rows, of_columns = (torch.zeros(n, dtype=torch.float32, device=x.device) for n in (rows, columns))
    grid = (triton.cdiv(rows, 64), triton.cdiv(columns, 256))
    _largest_of_lines[grid](
        x, of_rows, of_columns, rows, columns, ROWS=rows_wanted, COLUMNS=columns_wanted, BLOCK_R=64, BLOCK_C=256,
        num_warps=8,
    )  # fmt: skip
    return of_rows, of_columns


def cast(
    x: Tensor, of_rows: Tensor, of_columns: Tensor, out: Tensor, across: Tensor, limit: float, lines: bool
) -> tuple[Tensor, Tensor]:
    """Write x, scaled so that its largest magnitude becomes `limit`, to `out`, and the transpose to `across`.

    An empty `out` or `across` is skipped. Return the two factors that scale `out` and `across` back to x.
    """
    rows, columns = x.shape
    scale, across_scale = torch.empty_like(of_rows), torch.empty_like(of_columns)
    grid = (triton.cdiv(rows, TILE_R), triton.cdiv(columns, TILE_C))
    _cast[grid](
        x, of_rows, of_columns, out, across, scale, across_scale, rows, columns, limit, LINES=lines,
        OUT=out.numel() > 0, ACROSS=across.numel() > 0, BLOCK_R=TILE_R, BLOCK_C=TILE_C, num_warps=TILE_WARPS,
    )  # fmt: skip
    return scale, across_scale
