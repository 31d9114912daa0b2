"""Unpacking 4-bit weights in one pass over their bytes (spec/layout/packed.py describes the format)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bytes of codes that one program unpacks, and its warps.
BYTES, WARPS = 1024, 4


@triton.jit
def _values(packed, levels, out, codes, row_bytes, SHARED: tl.constexpr, BYTES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = at < codes
    packed += row * row_bytes
    both = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    scales = packed + codes + 2 * (2 * at // SHARED)
    low = tl.load(scales, mask=inside, other=0).to(tl.int32)
    high = tl.load(scales + 1, mask=inside, other=0).to(tl.int32)
    # A bfloat16 is the upper half of a float32.
    scale = (low << 16 | high << 24).to(tl.float32, bitcast=True)
    first, second = tl.load(levels + (both >> 4)) * scale, tl.load(levels + (both & 15)) * scale
    place = 2 * tl.program_id(1) * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out + 2 * row * codes + place, tl.interleave(first, second), mask=place < 2 * codes)


@lru_cache(maxsize=64)
def _table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


def unpack(packed: Tensor, width: int, dtype: torch.dtype, levels: tuple[float, ...], shared: int) -> Tensor:
    """Return the values [rows, width] of contiguous bytes [rows, row bytes]. Each `shared` values have one scale."""
    out = torch.empty((len(packed), width), dtype=dtype, device=packed.device)
    grid = (len(packed), triton.cdiv(width // 2, BYTES))
    _values[grid](
        packed, _table(levels, packed.device), out, width // 2, packed.shape[1], SHARED=shared, BYTES=BYTES,
        num_warps=WARPS,
    )  # fmt: skip
    return out
