"""Softmax cross entropy over rows of logits; the gradient overwrites the logits.

A row is read twice and written once. The second read comes from the cache, so the pass costs about one read and one
write of the logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 8  # the fastest of the sizes tried on an H200


@triton.jit
def _rows(
    logits, labels, mask, norms, targets, width, columns, first, scale,
    STATS: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    at = tl.arange(0, BLOCK)
    label = tl.load(labels + row) - first
    inside = (label >= 0) & (label < columns)
    if STATS:
        # Sums are kept relative to the largest logit so far, so that no exponential overflows.
        top = -float("inf")
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            x = tl.load(logits + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
            top = higher
        norm = top + tl.log(tl.sum(sums, 0))
        target = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32)
        tl.store(norms + row, norm)
        tl.store(targets + row, target)
    else:
        norm = tl.load(norms + row)
    if GRAD:
        if STATS:
            # Every lane must have read the label's logit before any lane overwrites it.
            tl.debug_barrier()
        weight = tl.load(mask + row).to(tl.float32) * scale
        # Columns of padding are read as -inf, so their gradient is 0.
        for start in range(0, width, BLOCK):
            here = start + at
            x = tl.load(logits + here, mask=here < columns, other=-float("inf")).to(tl.float32)
            y = tl.exp(x - norm) * weight
            y = tl.where(inside & (here == label), y - weight, y)
            tl.store(logits + here, y, mask=here < width)


def loss_rows(
    logits: Tensor, labels: Tensor, mask: Tensor, first: int, columns: int, norms: Tensor, targets: Tensor,
    scale: float, *, stats: bool, grad: bool,
) -> None:  # fmt: skip
    """Compute statistics of each row, its gradient, or both.

    `stats` writes the log of each row's sum of exponentials to `norms`, and the label's logit to `targets` (0 if
    another rank has that column). `grad` overwrites the logits with mask * scale * (softmax - one_hot), and reads
    `norms` if `stats` is not given.
    """
    assert logits.is_contiguous() and columns > 0
    rows, width = logits.shape
    _rows[(rows,)](
        logits, labels, mask, norms, targets, width, columns, first, scale,
        STATS=stats, GRAD=grad, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
