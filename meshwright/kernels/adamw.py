"""One pass of AdamW over a flat range: gradient, both moments and the master are read once and written once, and the
low-precision weights are written in the same pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4  # the fastest of the sizes tried on an H200, at 4.2 TB/s


@triton.jit
def _adamw(
    master, grad, first, second, low, numbers, size, lr, beta1, beta2, eps, decay,
    HAS_LOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(numbers) == 0.0:
        return
    inverse = tl.load(numbers + 1)
    correction1 = tl.load(numbers + 2)
    correction2 = tl.load(numbers + 3)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(grad + at, mask=inside).to(tl.float32) * inverse
    m = tl.load(first + at, mask=inside)
    v = tl.load(second + at, mask=inside)
    p = tl.load(master + at, mask=inside)
    m += (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    p *= 1.0 - lr * decay
    p -= lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    if HAS_LOW:
        tl.store(low + at, p, mask=inside)


def adamw(
    master: Tensor, grad: Tensor, first: Tensor, second: Tensor, low: Tensor | None, numbers: Tensor, *,
    lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """Updates `master` and the moments (float32) and writes `low`, if given. `numbers` holds, on the device: whether to
    update at all (0: leave everything), what to multiply the gradient by, 1 - beta1^t and 1 - beta2^t."""
    size = master.numel()
    grid = (triton.cdiv(size, BLOCK),)
    _adamw[grid](
        master, grad, first, second, master if low is None else low, numbers, size, lr, *betas, eps, decay,
        HAS_LOW=low is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
