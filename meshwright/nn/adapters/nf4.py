"""Frozen weights in 4 bits: the NF4 format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E).

Each block of 64 values is divided by its largest magnitude, and each value becomes the number of the nearest of 16
levels, the quantiles of a normal distribution. `spec/layout/packed.py` says where codes and scales lie. The scales are
bfloat16: they are exact where the weights are, and take 0.25 bits of a value, so that quantising them a second time,
as QLoRA does with scales in float32, would save another 0.12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.kernels import kernels_take
from meshwright.spec.layout.packed import BLOCK, row_bytes

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
ROWS_AT_ONCE = 1 << 22  # values that are packed or unpacked in one go, so that intermediate results stay small


@torch.no_grad()
def pack(values: Tensor) -> Tensor:
    """Return the bytes [rows, row_bytes] of values [rows, in]."""
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


@pure_operator("meshwright::unpack_nf4")
def _unpack(packed: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    if kernels_take(packed) and dtype.itemsize < 8:
        from meshwright.kernels.nf4 import unpack as kernel

        return kernel(packed.contiguous(), _width(packed), dtype, LEVELS, BLOCK)
    found = packed.new_empty((len(packed), _width(packed)), dtype=dtype)
    for rows in _pieces(found):
        found[rows] = _unpacked(packed[rows], dtype)
    return found


@shapes_of(_unpack)
def _(packed: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    return packed.new_empty((len(packed), _width(packed)), dtype=dtype)


def unpack(packed: Tensor, dtype: torch.dtype, again: bool = False) -> Tensor:
    """Return the values that bytes stand for. Backward says `again`, since a compiler would otherwise find that
    forward has computed the same, and keep it."""
    found: Tensor = _unpack(packed, dtype, again)
    return found


def _width(packed: Tensor) -> int:
    """Return how many values a row of bytes stands for."""
    return packed.shape[1] * 2 * BLOCK // row_bytes(2 * BLOCK)


def _unpacked(packed: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = packed.split([_width(packed) // 2, packed.shape[1] - _width(packed) // 2], 1)
    levels = torch.tensor(LEVELS, device=packed.device, dtype=torch.promote_types(dtype, torch.float32))
    values = levels[torch.stack((codes >> 4, codes & 15), 2).flatten(1).int()].unflatten(1, (-1, BLOCK))
    return (values * scales.contiguous().view(torch.bfloat16).to(levels.dtype)[:, :, None]).flatten(1).to(dtype)


def _pieces(x: Tensor) -> list[slice]:
    step = max(1, ROWS_AT_ONCE // x.shape[1])
    return [slice(at, at + step) for at in range(0, len(x), step)]


def weight_values(weight: Tensor, dtype: torch.dtype, again: bool = False) -> Tensor:
    """Return a weight's values: of packed ones those that the bytes stand for, in this dtype, by `unpack`."""
    return unpack(weight, dtype, again) if weight.dtype == torch.uint8 else weight


@torch.no_grad()
def rounded(values: Tensor) -> Tensor:
    """Return the values [rows, in] as they are after packing."""
    return unpack(pack(values), values.dtype)
