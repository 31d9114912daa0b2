"""Adding a product of short vectors to a matrix, in one pass over the matrix. cuBLAS does the same at about half of the
memory's rate, since products are not made for sums as short as these."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 64, 256, 8


@triton.jit
def _add(
    y, short, up, rows, columns, rank, y_row, short_row, short_at, up_row, up_at, scale,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, RANK)
    here = row.to(tl.int64)[:, None] * y_row + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    known = tl.load(y + here, mask=inside, other=0.0)
    a = tl.load(
        short + row.to(tl.int64)[:, None] * short_row + at[None, :] * short_at,
        mask=(row < rows)[:, None] & (at < rank)[None, :], other=0.0,
    )  # fmt: skip
    b = tl.load(
        up + column.to(tl.int64)[None, :] * up_row + at[:, None] * up_at,
        mask=(column < columns)[None, :] & (at < rank)[:, None], other=0.0,
    )  # fmt: skip
    tl.store(y + here, known.to(tl.float32) + scale * tl.dot(a, b), mask=inside)


def add_low_rank(y: Tensor, short: Tensor, up: Tensor, scale: float) -> None:
    """Adds scale * short up^T to y [rows, columns], whose columns are adjacent in memory."""
    (rows, columns), rank = y.shape, short.shape[1]
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
    _add[grid](
        y, short, up, rows, columns, rank, y.stride(0), *short.stride(), *up.stride(), scale,
        RANK=max(16, triton.next_power_of_2(rank)), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
