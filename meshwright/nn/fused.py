"""Norms and activations that are fused with the product after them, so that their output is not kept for backward.

A product's input is often a cheap function of a tensor that is kept anyway: the RMS norm of the residual, or SwiGLU of
the layer before. Backward recomputes that input in the same pass as the gradient (by `kernels` on CUDA, elsewhere by
the plain definitions here). These are registered operators, so that a compiled backward can call them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.kernels import kernels_take


def wide(x: Tensor) -> Tensor:
    """Returns x in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normed rows and 1 / the root of each row's mean square."""
    rstd = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    return (wide(x) * rstd * wide(weight)).to(x.dtype), rstd


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pure_operator("meshwright::rms_norm")
def rms_norm_in_one_pass(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if kernels_take(x):
        from meshwright.kernels.block import rms_norm as kernel

        return kernel(x.contiguous(), weight, eps)
    return rms_norm(x, weight, eps)


@shapes_of(rms_norm_in_one_pass)
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((x.shape[0], 1), dtype=wide(x).dtype)


def norm_of_product(x: Tensor, weight: Tensor, eps: float, plain: bool) -> tuple[Tensor, Tensor]:
    """Returns `rms_norm` for a product; a `plain` one neither communicates nor quantises. Where x is a sum that no
    product takes in, the compiler makes that sum and its norm in one pass. A dry run counts no intermediate results of
    a norm, since no compiled one has any."""
    one_pass = x.is_meta or (x.is_cuda and plain)
    found: tuple[Tensor, Tensor] = (rms_norm_in_one_pass if one_pass else rms_norm)(x, weight, eps)
    return found


@pure_operator("meshwright::rms_norm_backward")
def rms_norm_backward(
    x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of x, the output of `rms_norm` once more and the gradient of the weight. `grad` is the
    output's gradient, and `passed` the gradient that x has from elsewhere, which is added."""
    if kernels_take(x, grad, passed):
        from meshwright.kernels.block import rms_norm_backward as kernel

        return kernel(x.contiguous(), rstd, weight, grad.contiguous(), passed.contiguous())
    y, w, g = wide(x) * rstd, wide(weight), wide(grad)
    scaled = g * w
    dx = rstd * (scaled - y * (scaled * y).mean(-1, keepdim=True)) + wide(passed)
    return dx.to(x.dtype), (y * w).to(x.dtype), (g * y).sum(0)


@shapes_of(rms_norm_backward)
def _(x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, passed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[1], dtype=wide(weight).dtype)


@pure_operator("meshwright::swiglu_backward")
def swiglu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x and the output of `swiglu` once more."""
    if kernels_take(x, grad):
        from meshwright.kernels.block import swiglu_backward as kernel

        return kernel(x.contiguous(), grad.contiguous())
    gate, up = wide(x).chunk(2, dim=-1)
    g, share = wide(grad), torch.sigmoid(gate)
    silu = gate * share
    dx = torch.cat((g * up * (share + silu * (1.0 - share)), g * silu), dim=-1)
    return dx.to(x.dtype), (silu * up).to(x.dtype)


@shapes_of(swiglu_backward)
def _(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(grad)
