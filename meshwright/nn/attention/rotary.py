"""Rotary position embedding: its tables, and the rotation of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.config.blocks import RopeScalingConfig
from meshwright.config.sections import ModelConfig
from meshwright.kernels import kernels_take
from meshwright.nn.parallel import Parallel

# Cosines and sines.
Tables = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """The cosines and sines of rotary positions. An element in the first half of a head's rotary part is rotated with
    its counterpart in the second half."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        exact = torch.float64
        frequency, factor = rotary_frequencies(model)
        angle = torch.outer(torch.arange(model.seq, dtype=exact), frequency)
        dtype = exact if parallel.dtype == exact else torch.float32
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            self.register_buffer(name, (factor * table).to(parallel.device, dtype), persistent=False)

    def forward(self, positions: Tensor | None, seq: int) -> Tables:
        """Return the tables of cosines and sines, [1 or batch, seq, 1, rotary_dim / 2]."""
        if positions is None:
            return self.cos[None, :seq, None], self.sin[None, :seq, None]
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]


def rotary_frequencies(model: ModelConfig) -> tuple[Tensor, float]:
    """Return the angle by which each pair turns per position, and the factor for cosines and sines."""
    scaling, width, theta = model.rope_scaling, model.rotary_dim, model.rope_theta
    if scaling.raises_theta and model.seq > scaling.original:
        longer = scaling.factor * model.seq / scaling.original - (scaling.factor - 1)
        theta *= longer ** (width / (width - 2))
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    kept_share = KEPT_SHARES[scaling.kind]
    if kept_share is not None:
        keep = kept_share(scaling, frequency, width, theta)
        frequency = keep * frequency + (1 - keep) * frequency / scaling.factor
    return frequency, scaling.attention_factors(latent=False)[0]


def _llama3(scaling: RopeScalingConfig, frequency: Tensor, width: int, theta: float) -> Tensor:
    """Return the share of each frequency that is kept: linear in the number of turns within the original length."""
    turns = scaling.original * frequency / (2 * math.pi)
    return ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)


def _yarn(scaling: RopeScalingConfig, frequency: Tensor, width: int, theta: float) -> Tensor:
    """Return the share of each frequency that is kept: linear in the pair's number, between the pairs that turn
    `beta_fast` and `beta_slow` times within the original length."""

    def pair(turns: float) -> float:
        return width * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # This avoids a division by zero, with the same constant as other implementations.
    last += 0.001 if first == last else 0.0
    return 1 - ((torch.arange(width // 2, dtype=torch.float64) - first) / (last - first)).clamp(0.0, 1.0)


# For each `model.rope_scaling.kind`, the share of each frequency that is kept; the rest is divided by the factor. None:
# all of it is kept; dynamic scaling changes theta instead.
KEPT_SHARES: dict[str, Callable[[RopeScalingConfig, Tensor, int, float], Tensor] | None] = {
    "none": None,
    "dynamic": None,
    "linear": lambda scaling, frequency, width, theta: torch.zeros_like(frequency),
    "llama3": _llama3,
    "yarn": _yarn,
}


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotate x [batch, seq, heads, head_dim] in the precision of the tables. Elements beyond the rotary part stay."""
    cos, sin = tables
    half = cos.shape[-1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat((*rotated, rest) if rest.shape[-1] else rotated, dim=-1).to(x.dtype)


@pure_operator("meshwright::turn")
def _rotate_or_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return one tensor [batch, seq, all heads, head_dim] of q, k and v, with q and k rotated (or rotated back)."""
    if kernels_take(q, k, v):
        from meshwright.kernels.rotary import rotate_qkv as kernel

        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        return kernel(q, k, v, cos, sin, inverse)
    tables = (cos, -sin) if inverse else (cos, sin)
    return torch.cat((rotate(q, tables), rotate(k, tables), v), dim=2)


@shapes_of(_rotate_or_back)
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    batch, seq, heads, width = q.shape
    return q.new_empty((batch, seq, heads + k.shape[2] + v.shape[2], width))


class _RotateQKV(torch.autograd.Function):
    """Splits a fused projection into rotated queries and keys, and values. They are views of one tensor, which
    attention saves anyway, so the tensor before the rotation need not be saved."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        sizes = (heads, kv_heads, kv_heads)
        return _rotate_or_back(*qkv.split(sizes, dim=2), cos, sin, False).split(sizes, dim=2)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate_or_back(q, k, v, *ctx.saved_tensors, True), None, None, None, None


def rotate_qkv(qkv: Tensor, tables: Tables, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Return the rotated queries and keys, and the values, of qkv [batch, seq, heads + 2 kv_heads, head_dim]."""
    return _RotateQKV.apply(qkv, *tables, heads, kv_heads)
