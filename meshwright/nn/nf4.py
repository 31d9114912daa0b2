"""Frozen weights in 4 bits: the NF4 format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E).

Each block of 64 values is divided by its largest magnitude, and each value becomes the number of the nearest of 16
levels, the quantiles of a normal distribution. `layout/packed.py` says where codes and scales lie. The scales are
bfloat16: they are exact where the weights are, and take 0.25 bits of a value, so that quantising them a second time,
as QLoRA does with scales in float32, would save another 0.12.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout.packed import BLOCK, row_bytes

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
ROWS_AT_ONCE = 1 << 22  # values that are packed or unpacked in one go, so that intermediate results stay small


@torch.no_grad()
def pack(values: Tensor) -> Tensor:
    """Returns the bytes [rows, row_bytes] of values [rows, in]."""
    found = torch.empty((len(values), row_bytes(values.shape[1])), dtype=torch.uint8, device=values.device)
    levels = torch.tensor(LEVELS, device=values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    for rows in _pieces(values):
        blocks = values[rows].float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2).bfloat16()
        divided = blocks / torch.where(scales == 0, 1.0, scales.float())[:, :, None]
        codes = torch.bucketize(divided, middles, out_int32=True).flatten(1)
        both = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        found[rows] = torch.cat((both, scales.view(torch.uint8)), 1)
    return found


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values that bytes stand for. A compiler makes one kernel of it; otherwise it works on a few rows at a
    time. A dry run counts the result alone, as of a compiled one."""
    width = packed.shape[1] * 2 * BLOCK // row_bytes(2 * BLOCK)
    if packed.is_meta:
        return torch.empty((len(packed), width), dtype=dtype, device=packed.device)
    if torch.compiler.is_compiling():
        return _unpacked(packed, width, dtype, selected)
    found = torch.empty((len(packed), width), dtype=dtype, device=packed.device)
    for rows in _pieces(found):
        found[rows] = _unpacked(packed[rows], width, dtype, looked_up if packed.device.type == "cpu" else selected)
    return found


def _unpacked(packed: Tensor, width: int, dtype: torch.dtype, level: Callable[[Tensor], Tensor]) -> Tensor:
    """Only elementwise operations, without constants that would have to be copied to a device."""
    shifts = 4 - 4 * torch.arange(2, device=packed.device)
    codes = packed[:, : width // 2, None].int() >> shifts & 15
    halves = packed[:, width // 2 :].unflatten(1, (-1, 2)).int()
    scales = (halves[:, :, 0] << 16 | halves[:, :, 1] << 24).view(torch.float32)  # bfloat16 is the upper half of it
    wide = torch.promote_types(dtype, torch.float32)
    values = level(codes).to(wide).view(len(packed), -1, BLOCK) * scales.to(wide)[:, :, None]
    return values.to(dtype).view(len(packed), width)


def looked_up(codes: Tensor) -> Tensor:
    """Returns the levels of codes, from a table; copying that to an accelerator would make the host wait."""
    return torch.tensor(LEVELS, device=codes.device)[codes]


def selected(codes: Tensor) -> Tensor:
    """Returns the same, selected bit by bit: a compiler makes it a part of the kernel, which needs no table."""

    def of(bit: int, levels: tuple[float, ...]) -> Tensor | float:
        if len(levels) == 1:
            return levels[0]
        half = len(levels) // 2
        return torch.where((codes & bit) > 0, of(bit // 2, levels[half:]), of(bit // 2, levels[:half]))

    found = of(8, LEVELS)
    assert isinstance(found, Tensor)
    return found


def _pieces(x: Tensor) -> list[slice]:
    step = max(1, ROWS_AT_ONCE // x.shape[1])
    return [slice(at, at + step) for at in range(0, len(x), step)]


def weight_values(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a weight's values: of packed ones those that the bytes stand for, in this dtype."""
    return unpack(weight, dtype) if weight.dtype == torch.uint8 else weight


@torch.no_grad()
def rounded(values: Tensor) -> Tensor:
    """Returns the values [rows, in] as they are after packing."""
    return unpack(pack(values), values.dtype)
