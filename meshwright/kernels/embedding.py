"""The gradient of an embedding: rows of equal ids are added up by one program, in the order of the tokens, so that the
sum has the same bits every time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rows(out, grad, ids, order, tokens, width, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(ids + place)
    if (row < 0) | (tl.load(ids + place - 1, mask=place > 0, other=-1) == row):
        return  # the first token of an id adds them all
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    sums = tl.zeros((BLOCK,), tl.float32)
    same = row
    while same == row:
        token = tl.load(order + place).to(tl.int64)
        sums += tl.load(grad + token * width + at, mask=inside, other=0.0).to(tl.float32)
        place += 1
        same = tl.load(ids + place, mask=place < tokens, other=-1)
    here = out + row.to(tl.int64) * width + at
    tl.store(here, tl.load(here, mask=inside, other=0.0) + sums, mask=inside)


def add_rows(out: Tensor, grad: Tensor, rows: Tensor) -> None:
    """out[rows] += grad, for `out` [vocabulary, hidden] in float32 and rows [tokens]: they may repeat; negative ones
    are left out."""
    ids, order = torch.sort(rows, stable=True)
    tokens, width = grad.shape
    block = min(1024, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, block))
    _add_rows[grid](out, grad, ids, order, tokens, width, BLOCK=block, num_warps=4)
