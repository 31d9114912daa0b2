"""Linear layers on a grid of tensor-parallel ranks.

The product of `nn/linear.py` serves all kinds of grids, and a single axis as well: it gathers the needed parts of both
factors, multiplies, and sums and scatters the result if the contracted dimension is divided. Unless the config says
otherwise, gathered tensors are not saved for backward but gathered again, so that a rank saves only its block of every
activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.nn.fused import wide
from meshwright.nn.grid.norm import Features, GridNorm, in_backward, norm_grads, normalise, row_statistics
from meshwright.nn.grid.sides import Sides
from meshwright.nn.linear import Linear, input_grad, prepare_grad, product_forward, weight_grad
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.grid import Roles
from meshwright.spec.layout.params import ParamRecord


class _NormProduct(torch.autograd.Function):
    """y = rms_norm(x) W^T, for rows whose features are divided over ranks. Only x and each row's factor are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: Tensor, features: Features, weight: Tensor, *settings: Any
    ) -> Tensor:  # fmt: skip
        factors, _ = row_statistics(x, features, centred=False)
        value = (normalise(x, factors, None) * wide(scales)).to(x.dtype)
        y, full, weight = product_forward(ctx, value, weight, None, settings)
        ctx.save_for_backward(x, factors, scales, full, weight)
        ctx.features = features
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, factors, scales, full, weight = ctx.saved_tensors
        factors = in_backward(factors, grad)
        prepared = prepare_grad(ctx, grad, weight)
        grad_weight = None
        if ctx.needs_input_grad[3]:
            value = (normalise(x, factors, None) * wide(scales)).to(x.dtype)
            grad_weight = weight_grad(ctx, prepared, value, full)
            # The normed rows are released before the input gradient is computed.
            del value
        back = input_grad(ctx, prepared, weight)
        ones = normalise(x, factors, None)
        grad_x, grad_scales = norm_grads(back, ones, scales, factors, ctx.features, centred=False)
        return grad_x, grad_scales, None, grad_weight, None, None, None, None


class GridLinear(Linear):
    """A linear layer on a grid. Every rank adds its block of the bias to its block of y, after the sum."""

    def __init__(
        self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None, roles: Roles, keeps: bool = False
    ) -> None:
        super().__init__(parallel, weight, bias, Sides.of(parallel, roles, keeps))
        self.roles = roles

    def after_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if not norm.fuses:
            return x, self(norm(x))
        assert isinstance(norm, GridNorm)
        y = _NormProduct.apply(x, norm.weight, norm.features, self.weight, *self.settings)
        return x, self.add_bias(y)
