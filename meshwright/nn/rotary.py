"""Rotary positions: their tables, and the rotation of queries and keys by them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op

from meshwright.config.sections import ModelConfig
from meshwright.kernels import kernels_take
from meshwright.nn.parallel import Parallel

Tables = tuple[Tensor, Tensor]  # cosines and sines


class Rotary(nn.Module):
    """The cosines and sines of rotary positions. A pair that is rotated is an element of the first half of a head's
    rotary part and its partner in the second half."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        exact = torch.float64
        frequency = model.rope_theta ** (-torch.arange(0, model.rotary_dim, 2, dtype=exact) / model.rotary_dim)
        frequency = scaled_frequency(frequency, model.rope_scaling)
        angle = torch.outer(torch.arange(model.seq, dtype=exact), frequency)
        dtype = exact if parallel.dtype == exact else torch.float32
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, table.to(parallel.device, dtype), persistent=False)

    def forward(self, positions: Tensor | None, seq: int) -> Tables:
        """Returns the tables of cosines and sines, [1 or batch, seq, 1, rotary_dim / 2]."""
        if positions is None:
            return self.cos[None, :seq, None], self.sin[None, :seq, None]
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]


def scaled_frequency(frequency: Tensor, scaling: tuple[float, ...]) -> Tensor:
    """Rotary frequencies for sequences longer than those a model was first trained on. One number slows all by that
    factor. Llama 3.1's (factor, low, high, length) slows those that turn fewer than `low` times over `length`
    positions, leaves those that turn more than `high` times, and blends between."""
    if not scaling:
        return frequency
    if len(scaling) == 1:
        return frequency / scaling[0]
    factor, low, high, length = scaling
    turns = length * frequency / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / factor


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotates x [batch, seq, heads, head_dim], in the tables' precision; what is beyond the tables' width stays."""
    cos, sin = tables
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1).to(x.dtype)


@custom_op("meshwright::turn", mutates_args=())
def _rotate_or_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Returns one tensor [batch, seq, all heads, head_dim] of q, k and v, the first two rotated, or rotated back."""
    if kernels_take(q, k, v):
        from meshwright.kernels.rotary import rotate_qkv as kernel

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        return kernel(q, k, v, cos, sin, inverse)
    tables = (cos, -sin) if inverse else (cos, sin)
    return torch.cat((rotate(q, tables), rotate(k, tables), v), dim=2)


@_rotate_or_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    batch, seq, heads, width = q.shape
    return q.new_empty((batch, seq, heads + k.shape[2] + v.shape[2], width))


class _RotateQKV(torch.autograd.Function):
    """Splits a fused projection into rotated queries and keys, and values: views of one tensor, which attention keeps
    anyway, so that the tensor before the rotation need not be kept."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        sizes = (heads, kv_heads, kv_heads)
        return _rotate_or_back(*qkv.split(sizes, dim=2), cos, sin, False).split(sizes, dim=2)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate_or_back(q, k, v, *ctx.saved_tensors, True), None, None, None, None


def rotate_qkv(qkv: Tensor, tables: Tables, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Returns the rotated queries and keys, and the values, of qkv [batch, seq, heads + 2 kv_heads, head_dim]."""
    return _RotateQKV.apply(qkv, *tables, heads, kv_heads)
