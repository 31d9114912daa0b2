"""Frozen weights in 4 bits: the NF4 format of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E).

Each block of 64 values is divided by its largest magnitude, and each value becomes the number of the nearest of 16
levels, which are quantiles of a normal distribution. `spec/layout/packed.py` describes the layout of codes and scales.
The scales are bfloat16, so they are exact if the weights are bfloat16. They take 0.25 bits per value. QLoRA quantises
its float32 scales a second time; doing that here would save another 0.12 bits.
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
# The number of values that are packed or unpacked at once, so that intermediate results stay small.
ROWS_AT_ONCE = 1 << 22


@torch.no_grad()
def pack(values: Tensor) -> Tensor:
    """Return values [rows, in] packed into bytes [rows, row_bytes]."""
    packed = torch.empty((len(values), row_bytes(values.shape[1])), dtype=torch.uint8, device=values.device)
    levels = torch.tensor(LEVELS, device=values.device)
    middles = (levels[1:] + levels[:-1]) / 2
    for rows in _chunks(values):
        blocks = values[rows].float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2).bfloat16()
        divided = blocks / torch.where(scales == 0, 1.0, scales.float())[:, :, None]
        codes = torch.bucketize(divided, middles, out_int32=True).flatten(1)
        both = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        packed[rows] = torch.cat((both, scales.view(torch.uint8)), 1)
    return packed


@pure_operator("meshwright::unpack_nf4")
def _unpack(packed: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    if kernels_take(packed) and dtype.itemsize < 8:
        from meshwright.kernels.nf4 import unpack as kernel

        return kernel(packed.contiguous(), _width(packed), dtype, LEVELS, BLOCK)
    values = packed.new_empty((len(packed), _width(packed)), dtype=dtype)
    for rows in _chunks(values):
        values[rows] = _unpack_values(packed[rows], dtype)
    return values


@shapes_of(_unpack)
def _(packed: Tensor, dtype: torch.dtype, again: bool) -> Tensor:
    return packed.new_empty((len(packed), _width(packed)), dtype=dtype)


def unpack(packed: Tensor, dtype: torch.dtype, again: bool = False) -> Tensor:
    """Return the values of packed bytes.

    Backward passes `again`. Otherwise a compiler would see that forward has computed the same, and save the result.
    """
    values: Tensor = _unpack(packed, dtype, again)
    return values


def _width(packed: Tensor) -> int:
    """Return the number of values in a row of bytes."""
    return packed.shape[1] * 2 * BLOCK // row_bytes(2 * BLOCK)


def _unpack_values(packed: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = packed.split([_width(packed) // 2, packed.shape[1] - _width(packed) // 2], 1)
    levels = torch.tensor(LEVELS, device=packed.device, dtype=torch.promote_types(dtype, torch.float32))
    values = levels[torch.stack((codes >> 4, codes & 15), 2).flatten(1).int()].unflatten(1, (-1, BLOCK))
    return (values * scales.contiguous().view(torch.bfloat16).to(levels.dtype)[:, :, None]).flatten(1).to(dtype)


def _chunks(x: Tensor) -> list[slice]:
    step = max(1, ROWS_AT_ONCE // x.shape[1])
    return [slice(at, at + step) for at in range(0, len(x), step)]


def weight_values(weight: Tensor, dtype: torch.dtype, again: bool = False) -> Tensor:
    """Return a weight's values; packed bytes are unpacked to this dtype."""
    return unpack(weight, dtype, again) if weight.dtype == torch.uint8 else weight


@torch.no_grad()
def round_by_packing(values: Tensor) -> Tensor:
    """Return values [rows, in] after the rounding that packing causes."""
    return unpack(pack(values), values.dtype)
