"""The backward of a block's memory-bound parts, each in one pass: RMS norm with the residual's gradient, and SwiGLU.

Both also write the value that forward gave to the next product once more, so that it need not be kept: that product's
weight gradient needs it, and one more write is cheaper than keeping it for all layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # two for each multiprocessor of a large Hopper chip; each adds up its own rows' weight gradient
FORWARD_PROGRAMS = 528  # four, of the numbers tried the fastest for widths of 2048 and 3072
AHEAD = 3  # rows that are being read at once, where they are short enough to wait in shared memory
SWIGLU_BLOCK = 1024


@triton.jit
def _rms_norm(x, weight, out, rstd, rows, width, eps, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=AHEAD):
        here = row.to(tl.int64) * width + at
        v = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
        tl.store(out + here, v * scale * w, mask=inside)
        tl.store(rstd + row, scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normed rows and 1 / the root of each row's mean square, [rows, 1] in float32."""
    rows, width = x.shape
    out, rstd = torch.empty_like(x), torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    short = block <= 4096
    _rms_norm[(min(rows, FORWARD_PROGRAMS),)](
        x, weight, out, rstd, rows, width, eps, BLOCK=block, AHEAD=AHEAD if short else 1, num_warps=4 if short else 16
    )
    return out, rstd


@triton.jit
def _rms_norm_backward(
    x, rstd, weight, grad, passed, out, normed, partial, rows, width,
    HAS_PASSED: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=AHEAD):
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
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + at, sums, mask=inside)


def rms_norm_backward(
    x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, passed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of x (plus `passed`), the normed x and the weight's gradient in float32."""
    rows, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    short = block <= 4096
    programs = min(rows, PROGRAMS if short else 4 * PROGRAMS)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        x, rstd, weight, grad, grad if passed is None else passed, out, normed, partial, rows, width,
        HAS_PASSED=passed is not None, BLOCK=block, AHEAD=AHEAD if short else 1, num_warps=4 if short else 16,
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
    tl.store(value + row * width + at, silu * up, mask=inside)
    tl.store(out + row * 2 * width + at, g * up * (share + silu * (1.0 - share)), mask=inside)
    tl.store(out + row * 2 * width + width + at, g * silu, mask=inside)


def swiglu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x = [gate, up], and silu(gate) * up once more."""
    rows, width = grad.shape
    out, value = torch.empty_like(x), torch.empty_like(grad)
    grid = (rows, triton.cdiv(width, SWIGLU_BLOCK))
    _swiglu_backward[grid](x, grad, out, value, width, BLOCK=SWIGLU_BLOCK, num_warps=4)
    return out, value
