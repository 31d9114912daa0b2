"""AdamW over a flat range in one pass: gradient, both moments and the master weights are read once, and the moments,
the master weights and the low-precision weights are written once.

The master weights may be stored as remainders beside bf16 weights (engine/sharding/remainders.py), which are then read
as well.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # the fastest of the sizes tried on an H200, at 4.2 TB/s


@triton.jit
def _join(weights, remainders):
    """Return the float32 values of bf16 weights and their remainders."""
    high = weights.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return (high + remainders.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _halve(values):
    """Return the bf16 weights of float32 values, and their remainders."""
    bits = values.to(tl.int32, bitcast=True)
    # Adding half of the lowest kept bit rounds to the nearest bf16, so the remainder fits into a signed int16.
    high = (bits + 0x8000) >> 16
    remainders = (bits - (high << 16)).to(tl.int16)
    # The addition could carry a NaN over into another value.
    high = tl.where(values != values, 0x7FC0, high)
    return high.to(tl.int16).to(tl.bfloat16, bitcast=True), remainders


@triton.jit
def _decay_mask(flips, count, begin, at, DECAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a mask of the elements of a block to which weight decay applies.

    `flips` holds `count` sorted positions at which that changes, and then a sentinel beyond all elements.
    """
    # A binary search for the number of positions at or before the first element of the block.
    passed = begin * 0
    most = passed + count
    while passed < most:
        middle = (passed + most) // 2
        before = tl.load(flips + middle) <= begin
        passed = tl.where(before, middle + 1, passed)
        most = tl.where(before, most, middle)
    # The number of positions at or before each element. An even number means that decay is as at the beginning.
    numbers = passed + tl.zeros([BLOCK], tl.int64)
    flip = tl.load(flips + passed)
    while flip < begin + BLOCK:
        numbers += (at >= flip).to(tl.int64)
        passed += 1
        flip = tl.load(flips + passed)
    return ((numbers & 1) == 0) == DECAYS


@triton.jit
def _adamw(
    master, grad, first, second, low, numbers, flips, count, size, lr, beta1, beta2, eps, decay,
    DECAYS: tl.constexpr, HAS_LOW: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Whether to update is decided on the device, so that the host need not wait for it.
    if tl.load(numbers) == 0.0:
        return
    inverse = tl.load(numbers + 1)
    correction1 = tl.load(numbers + 2)
    correction2 = tl.load(numbers + 3)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    inside = at < size
    decayed = _decay_mask(flips, count, begin, at, DECAYS, BLOCK)
    g = tl.load(grad + at, mask=inside).to(tl.float32) * inverse
    m = tl.load(first + at, mask=inside).to(tl.float32)
    v = tl.load(second + at, mask=inside).to(tl.float32)
    p = tl.load(master + at, mask=inside)
    if PAIRED:
        p = _join(tl.load(low + at, mask=inside), p)
    else:
        p = p.to(tl.float32)
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    change = lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    # An explicit fused multiply-add. Left to itself, the compiler would fuse for one kind of master and not for the
    # other, and their results would be rounded differently.
    p = tl.fma(p, tl.where(decayed, 1.0 - lr * decay, 1.0), -change)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    if PAIRED:
        weights, remainders = _halve(p)
        tl.store(low + at, weights, mask=inside)
        tl.store(master + at, remainders, mask=inside)
    else:
        tl.store(master + at, p, mask=inside)
        if HAS_LOW:
            tl.store(low + at, p, mask=inside)


@lru_cache(maxsize=4096)
def _positions(flips: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([*flips, 2**62], dtype=torch.int64, device=device)


def adamw(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, low: Tensor | None, numbers: Tensor, *,
    lr: float, betas: tuple[float, float], eps: float, decay: float, decays: bool = True, flips: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Update `master` and the moments `first` and `second`, and write the low-precision weights `low` if given.

    The arithmetic is in float32; results are rounded to the dtype of each tensor. A `master` of int16 holds the
    remainders of the bf16 weights `low`. `numbers` is a tensor on the device: whether to update at all (0 leaves
    everything as it is), the factor for the gradient, 1 - beta1^t and 1 - beta2^t. `decays` says whether weight decay
    applies to the first elements, and `flips` holds the positions at which that changes.
    """
    size = master.numel()
    grid = (triton.cdiv(size, BLOCK),)
    _adamw[grid](
        master, grad, first, second, master if low is None else low, numbers, _positions(flips, master.device),
        len(flips), size, lr, *betas, eps, decay, DECAYS=decays,
        HAS_LOW=low is not None, PAIRED=master.dtype == torch.int16, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _pairs(values, weights, remainders, size, JOIN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if JOIN:
        joined = _join(tl.load(weights + at, mask=inside), tl.load(remainders + at, mask=inside))
        tl.store(values + at, joined, mask=inside)
    else:
        high, rest = _halve(tl.load(values + at, mask=inside))
        tl.store(weights + at, high, mask=inside)
        tl.store(remainders + at, rest, mask=inside)


def copy_pairs(values: Tensor, weights: Tensor, remainders: Tensor, join: bool) -> None:
    """Set float32 values from bf16 weights and remainders (`join`), or set those two from the values.

    All three are contiguous.
    """
    grid = (triton.cdiv(values.numel(), BLOCK),)
    _pairs[grid](values, weights, remainders, values.numel(), JOIN=join, BLOCK=BLOCK, num_warps=WARPS)
