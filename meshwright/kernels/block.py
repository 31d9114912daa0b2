"""RMS norm, and the backward of a block's memory-bound parts, each in one pass: RMS norm with the residual's gradient,
and SwiGLU.

Both backward passes also write the forward output once more, because the weight gradient of the next product needs it.
One more write is cheaper than saving that output for backward in every layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Two programs for each multiprocessor of a large Hopper chip. Each sums the weight gradient of some of the rows.
PROGRAMS = 264
# Four programs for each multiprocessor: the fastest of the numbers tried for widths of 2048 and 3072.
FORWARD_PROGRAMS = 528
# Rows that are being read at once, if they are short enough to wait in shared memory.
PREFETCHED_ROWS = 3
SWIGLU_BLOCK = 1024


@triton.jit
def _rms_norm(x, weight, out, rstd, rows, width, eps, BLOCK: tl.constexpr, PREFETCHED_ROWS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=PREFETCHED_ROWS):
        here = row.to(tl.int64) * width + at
        v = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
        tl.store(out + here, v * scale * w, mask=inside)
        tl.store(rstd + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed rows, and the reciprocal of each row's root mean square, [rows, 1] in float32."""
    rows, width = x.shape
    out, rstd = torch.empty_like(x), torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    short = block <= 4096
    _rms_norm[(min(rows, FORWARD_PROGRAMS),)](
        x,
        weight,
        out,
        rstd,
        rows,
        width,
        eps,
        BLOCK=block,
        PREFETCHED_ROWS=PREFETCHED_ROWS if short else 1,
        num_warps=4 if short else 16,
    )
    return out, rstd


@triton.jit
def _rms_norm_backward(
    x, rstd, weight, grad, passed, out, normed, partial, rows, width,
    HAS_PASSED: tl.constexpr, BLOCK: tl.constexpr, PREFETCHED_ROWS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=PREFETCHED_ROWS):
        here = row.to(tl.int64) * width + at
        scale = tl.load(rstd + row)
        y = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + here, mask=inside, other=0.0).to(tl.float32)
        sums += g * y
        tl.store(normed + here, y * w, mask=inside)
        g *= w
        dx = scale * (g - y * (tl.sum(g * y, 0) / width))
        if HAS_PASSED:
            dx += tl.load(passed + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + here, dx, mask=inside)
    # Each program writes its own sum, and torch adds them up. Atomic additions would have no fixed order.
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + at, sums, mask=inside)


def rms_norm_backward(
    x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, passed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, the forward output, and the weight's gradient in float32.

    `grad` is the gradient of the output, and `passed` a further gradient of x, such as the residual's, to add.
    """
    rows, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    short = block <= 4096
    programs = min(rows, PROGRAMS if short else 4 * PROGRAMS)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        x, rstd, weight, grad, grad if passed is None else passed, out, normed, partial, rows, width,
        HAS_PASSED=passed is not None, BLOCK=block, PREFETCHED_ROWS=PREFETCHED_ROWS if short else 1,
        num_warps=4 if short else 16,
    )  # fmt: skip
    return out, normed, partial.sum(0)


@triton.jit
def _swiglu_backward(x, grad, out, value, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    # The derivative of silu is share + silu * (1 - share).
    tl.store(value + row * width + at, silu * up, mask=inside)
    tl.store(out + row * 2 * width + at, g * up * (share + silu * (1.0 - share)), mask=inside)
    tl.store(out + row * 2 * width + width + at, g * silu, mask=inside)


def swiglu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x = [gate, up], and the forward output silu(gate) * up."""
    rows, width = grad.shape
    out, value = torch.empty_like(x), torch.empty_like(grad)
    grid = (rows, triton.cdiv(width, SWIGLU_BLOCK))
    _swiglu_backward[grid](x, grad, out, value, width, BLOCK=SWIGLU_BLOCK, num_warps=4)
    return out, value
