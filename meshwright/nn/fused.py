"""Norms and activations that are fused with the product after them, so that their output is not saved for backward.

A product's input is often a cheap function of a tensor that is saved anyway: the RMS norm of the residual, or SwiGLU of
the previous layer's output. Backward recomputes that input in the same pass as the gradient, with `kernels` on CUDA and
with the plain definitions here elsewhere. These are registered operators, so that a compiled backward can call them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.device import kind_of
from meshwright.kernels import kernels_take


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it has that."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed rows, and the reciprocal of each row's root mean square."""
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
    """Return `rms_norm` of the input of a product.

    On CUDA the kernel is used if the product is `plain`, that is, if it neither communicates nor quantises its input.
    Otherwise the plain definition is used, which torch's compiler fuses with the sum that produced x. A dry run takes
    the one-pass operator, because a compiled norm has no intermediate results that would count as memory.
    """
    one_pass = x.is_meta or (plain and kind_of(x.device).runs_triton)
    results: tuple[Tensor, Tensor] = (rms_norm_in_one_pass if one_pass else rms_norm)(x, weight, eps)
    return results


@pure_operator("meshwright::rms_norm_backward")
def rms_norm_backward(
    x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of x, the recomputed output of `rms_norm`, and the gradient of the weight.

    `grad` is the gradient of the output. `passed` is the gradient of x from other uses, such as the residual, and is
    added to the gradient of x.
    """
    if kernels_take(x, grad, passed):
        from meshwright.kernels.block import rms_norm_backward as kernel

        return kernel(x.contiguous(), rstd, weight, grad.contiguous(), passed.contiguous())
    y = wide(x) * rstd
    w = wide(weight)
    g = wide(grad)
    scaled = g * w
    dx = rstd * (scaled - y * (scaled * y).mean(-1, keepdim=True)) + wide(passed)
    return dx.to(x.dtype), (y * w).to(x.dtype), (g * y).sum(0)


@shapes_of(rms_norm_backward)
def _(x: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, passed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[1], dtype=wide(weight).dtype)


@pure_operator("meshwright::swiglu_backward")
def swiglu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and the recomputed output of `swiglu`."""
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
