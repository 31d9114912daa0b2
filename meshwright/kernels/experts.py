"""The memory-bound passes of a mixture of experts (choosing experts, moving rows to their experts and back, SwiGLU
times a row's weight), and the experts' weight gradients, accumulated in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_AT_ONCE = 4  # rows whose experts one program chooses
BLOCK = 2048  # columns of a row that one program moves


@triton.jit
def _choose(scores, chosen, rows, count, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < count)[None, :]
    left = tl.load(scores + row.to(tl.int64)[:, None] * count + at[None, :], mask=inside, other=float("-inf"))
    # A NaN counts as -inf, so that a row without finite scores still gets the number of an existing expert.
    left = tl.where(left == left, left, float("-inf"))
    for j in range(K):
        best = tl.argmax(left, 1, tie_break_left=True)
        tl.store(chosen + row.to(tl.int64) * K + j, best.to(tl.int64), mask=row < rows)
        left = tl.where(at[None, :] == best[:, None], float("-inf"), left)


def choose(scores: Tensor, k: int) -> Tensor:
    """Return the indices [rows, k] of each row's k largest columns, the largest first. Ties go to the lower index."""
    rows, count = scores.shape
    chosen = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    grid = (triton.cdiv(rows, ROWS_AT_ONCE),)
    _choose[grid](
        scores.contiguous(), chosen, rows, count, K=k, ROWS=ROWS_AT_ONCE, BLOCK=triton.next_power_of_2(count),
        num_warps=4,
    )  # fmt: skip
    return chosen


@triton.jit
def _take_rows(x, index, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    source = tl.load(index + row)
    found = tl.load(x + source * width + at, mask=inside & (source >= 0), other=0.0)
    tl.store(out + row * width + at, found, mask=inside)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]; a negative index gives zeros."""
    x, width = x.contiguous(), x.shape[1]
    out = torch.empty(index.shape[0], width, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _take_rows[(out.shape[0], triton.cdiv(width, block))](x, index, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _sum_rows(x, places, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + row * K + j)
        total += tl.load(x + place * width + at, mask=inside & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out + row * width + at, total, mask=inside)


def sum_rows(x: Tensor, places: Tensor) -> Tensor:
    """Return, for each row of `places`, the sum of the rows of x that it lists, added in its order in float32.

    Negative places are skipped.
    """
    x, width = x.contiguous(), x.shape[1]
    out = torch.empty(places.shape[0], width, dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        grid = (out.shape[0], triton.cdiv(width, block))
        _sum_rows[grid](x, places.contiguous(), out, width, K=places.shape[1], BLOCK=block, num_warps=4)
    return out


@triton.jit
def _weighted_swiglu(x, weights, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row)
    tl.store(out + row * width + at, gate * tl.sigmoid(gate) * up * weight, mask=inside)


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """Return silu(gate) * up * weight for the rows x = [gate, up]; `weights` holds one number per row."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _weighted_swiglu[(rows, triton.cdiv(width, block))](x, weights, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _weighted_swiglu_backward(x, weights, grad, grad_weights, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < width
        gate = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        total += g * silu * up
        g *= weight
        tl.store(grad + row * width + at, silu * up * weight, mask=inside)
        tl.store(x + row * 2 * width + at, g * up * (share + silu * (1.0 - share)), mask=inside)
        tl.store(x + row * 2 * width + width + at, g * silu, mask=inside)
    tl.store(grad_weights + row, tl.sum(total, 0))


def weighted_swiglu_backward_(x: Tensor, weights: Tensor, grad: Tensor) -> Tensor:
    """Overwrite x with its gradient and `grad` with the output of `weighted_swiglu`; return the weights' gradient.

    x and `grad` are the largest tensors of a block, so no others are allocated. Each element is read before it is
    written.
    """
    rows, width = grad.shape
    grad_weights = torch.empty_like(weights)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _weighted_swiglu_backward[(rows,)](x, weights, grad, grad_weights, width, BLOCK=block, num_warps=4)
    return grad_weights


@triton.jit
def _add_grouped(
    grad, x, ends, out, outs, ins, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(ins, N)
    m = (tl.program_id(0) // tiles) * M + tl.arange(0, M)
    n = (tl.program_id(0) % tiles) * N + tl.arange(0, N)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.load(ends + expert).to(tl.int64)
    # The sum runs over the rows of one expert, whose number is not a multiple of K in general.
    total = tl.zeros((M, N), tl.float32)
    for first in range(begin, end, K):
        k = first + tl.arange(0, K)
        inside = k < end
        a = tl.load(grad + k[None, :] * outs + m[:, None], mask=inside[None, :] & (m < outs)[:, None], other=0.0)
        b = tl.load(x + k[:, None] * ins + n[None, :], mask=inside[:, None] & (n < ins)[None, :], other=0.0)
        total = tl.dot(a, b, total)
    here = out + expert * outs * ins + m[:, None].to(tl.int64) * ins + n[None, :]
    inside = (m < outs)[:, None] & (n < ins)[None, :]
    if ADD:
        total += tl.load(here, mask=inside, other=0.0)
    tl.store(here, total, mask=inside)


def add_grouped(out: Tensor, grad: Tensor, x: Tensor, ends: Tensor, add: bool) -> None:
    """Set out_e to g_e^T x_e for the rows of every expert e, or add that to it (`add`), in float32.

    `ends` [experts] holds the row behind each expert's last one.
    """
    outs, ins = grad.shape[1], x.shape[1]
    m, n, k = 128, 256, 64
    grid = (triton.cdiv(outs, m) * triton.cdiv(ins, n), out.shape[0])
    _add_grouped[grid](
        grad.contiguous(), x.contiguous(), ends, out, outs, ins, ADD=add, M=m, N=n, K=k, num_warps=8, num_stages=3
    )
