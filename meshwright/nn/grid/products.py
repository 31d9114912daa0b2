"""The products of a grid of tensor-parallel ranks. One serves all kinds of grids: gather what is needed of both
factors, multiply, sum and scatter where the contraction is cut.

What was gathered is not kept but gathered again in backward, unless the config says otherwise, so that a rank keeps its
own block of every activation and nothing more. As along one axis (`nn/fused.py`), an RMS norm or a SwiGLU may be a part
of the product after it, and is then computed again in backward instead of kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.nn.fused import swiglu, swiglu_backward, wide
from meshwright.nn.grid.norm import Features, GridNorm, in_backward, norm_grads, normed, row_statistics
from meshwright.nn.grid.sides import Sides, bring, gather, scatter
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import add_grad
from meshwright.spec.layout.grid import Roles
from meshwright.spec.layout.params import ParamRecord


def give(grad: Tensor, sink: Tensor | None) -> Tensor | None:
    """Adds a weight gradient to the sink and returns None, or returns it for autograd where there is no sink."""
    if sink is None:
        return grad
    add_grad(sink, grad)
    return None


@pure_operator("meshwright::product_in_blocks")
def product_in_blocks(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Returns x @ weight as blocks of its columns below each other, as they are scattered: [parts * rows, columns of a
    block]."""
    width = weight.shape[1] // parts
    out = x.new_empty((parts * len(x), width))
    for rows, block in zip(out.chunk(parts), weight.chunk(parts, 1), strict=True):
        torch.mm(x, block, out=rows)
    return out


@shapes_of(product_in_blocks)
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty((parts * x.shape[0], weight.shape[1] // parts))


@pure_operator("meshwright::weight_grad_of_blocks")
def weight_grad_of_blocks(grad: Tensor, blocks: Tensor, parts: int) -> Tensor:
    """Returns grad^T x, where blocks of x's columns lie below each other, as they were gathered."""
    out = grad.new_empty((grad.shape[1], parts * blocks.shape[1]))
    for columns, block in zip(out.chunk(parts, 1), blocks.chunk(parts), strict=True):
        torch.mm(grad.t(), block, out=columns)
    return out


@shapes_of(weight_grad_of_blocks)
def _(grad: Tensor, blocks: Tensor, parts: int) -> Tensor:
    return grad.new_empty((grad.shape[1], parts * blocks.shape[1]))


def _forward(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor | None, sides: Sides
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns y = x W^T + b, the gathered x where it is kept, and what is kept of the weight. Every rank adds its block
    of the bias to its block of y, once."""
    full, whole = bring(x, sides), gather(weight, sides.weight)
    # The handle of the sink needs none of save_for_backward's checks (see nn/linear.py).
    ctx.sink, ctx.sides = sink, sides
    y = scatter(F.linear(full, whole), sides.summed)
    y = y if bias is None else y.add_(bias)
    return (y, full, whole) if sides.keeps else (y, None, weight)


def _input_grad(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    """Returns this rank's block of the input's gradient; `grad` is that of the gathered output."""
    sides = ctx.sides
    whole = weight if sides.keeps else gather(weight, sides.weight, again=True)
    blocks = sides.blocks
    return scatter(product_in_blocks(grad, whole, blocks) if blocks > 1 else grad @ whole, sides.x)


def _weight_grad(ctx: Any, grad: Tensor, x: Tensor | None, full: Tensor | None) -> Tensor | None:
    """Gives this rank's part of the weight's gradient, from its own block of x or from the gathered one."""
    sides = ctx.sides
    if full is not None:
        found = grad.t() @ full
    else:
        assert x is not None
        gathered, blocks = gather(x, sides.x, again=True), sides.blocks
        found = weight_grad_of_blocks(grad, gathered, blocks) if blocks > 1 else grad.t() @ gathered
    return give(scatter(found, sides.weight), ctx.sink)


class _Product(torch.autograd.Function):
    """y = x W^T + b with its collectives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor | None, sides: Sides) -> Tensor:
        y, full, weight = _forward(ctx, x, weight, bias, sink, sides)
        ctx.save_for_backward(x if full is None else None, full, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, full, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_y = gather(grad, ctx.sides.summed)
        grad_x = _input_grad(ctx, grad_y, weight) if needs_x else None
        grad_weight = _weight_grad(ctx, grad_y, x, full) if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None, None


class _SwigluProduct(torch.autograd.Function):
    """y = swiglu(x) W^T + b. Of its input only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor | None, sides: Sides) -> Tensor:
        y, full, weight = _forward(ctx, swiglu(x), weight, bias, sink, sides)
        ctx.save_for_backward(x, full, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, full, weight = ctx.saved_tensors
        grad_y = gather(grad, ctx.sides.summed)
        grad_x, value = swiglu_backward(x, _input_grad(ctx, grad_y, weight))
        grad_weight = _weight_grad(ctx, grad_y, value, full) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _NormProduct(torch.autograd.Function):
    """y = rms_norm(x) W^T + b. Of its input only x and each row's scale are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: Tensor, features: Features, weight: Tensor, bias: Tensor | None,
        sink: Tensor | None, sides: Sides,
    ) -> Tensor:  # fmt: skip
        each, _ = row_statistics(x, features, centred=False)
        value = (normed(x, each, None) * wide(scales)).to(x.dtype)
        y, full, weight = _forward(ctx, value, weight, bias, sink, sides)
        ctx.save_for_backward(x, each, scales, full, weight)
        ctx.features = features
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, each, scales, full, weight = ctx.saved_tensors
        each = in_backward(each, grad)
        grad_y, grad_weight = gather(grad, ctx.sides.summed), None
        if ctx.needs_input_grad[3]:
            value = (normed(x, each, None) * wide(scales)).to(x.dtype)
            grad_weight = _weight_grad(ctx, grad_y, value, full)
            del value
        back = _input_grad(ctx, grad_y, weight)
        ones = normed(x, each, None)
        grad_x, grad_scales = norm_grads(back, ones, scales, each, ctx.features, centred=False)
        return grad_x, grad_scales, None, grad_weight, grad.sum(0) if ctx.needs_input_grad[4] else None, None, None


class GridLinear(nn.Module):
    """A product and its bias on a grid, with the interface of `Linear` that attention and the MLP use."""

    def __init__(
        self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None, roles: Roles, keeps: bool = False
    ) -> None:
        super().__init__()
        self.weight = parallel.parameter(weight)
        self.bias = parallel.parameter(bias) if bias is not None else None
        self.sinks: dict[str, Tensor] = {}
        self.roles, self.sides, self.fuses = roles, Sides.of(parallel, roles, keeps), parallel.fused

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias, self.sinks.get("weight"), self.sides)

    def after_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        if not norm.fuses:
            return x, self(norm(x))
        assert isinstance(norm, GridNorm)
        sink = self.sinks.get("weight")
        return x, _NormProduct.apply(x, norm.weight, norm.features, self.weight, self.bias, sink, self.sides)

    def after_swiglu(self, x: Tensor) -> Tensor:
        if not self.fuses:
            return self(swiglu(x))
        return _SwigluProduct.apply(x, self.weight, self.bias, self.sinks.get("weight"), self.sides)
