"""Linear layers, written once for every tensor-parallel layout, on activations of shape [tokens, features].

`column` cuts the output features over tp, `row` the input features; a `whole` layer, which every tp rank applies to the
tokens it holds, communicates nothing. With sequence parallelism a column layer gathers
its input's tokens and a row layer scatters its output's; the gathered input is not kept but gathered again in backward.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.config.sections import FP8_UNIT
from meshwright.nn import fp8, products
from meshwright.nn.adapters.adapters import NOTHING, Adapted, Before, Change, adapted_product
from meshwright.nn.adapters.nf4 import weight_values
from meshwright.nn.fused import norm_of_product, rms_norm, rms_norm_backward, swiglu, swiglu_backward
from meshwright.nn.grid.sides import (
    PLAIN,
    Sides,
    gather,
    gather_input,
    gather_output_grad,
    scatter,
    scatter_input_grad,
    sum_output,
)
from meshwright.nn.norm import Norm
from meshwright.nn.overlap import column_backward, gather_in_chunks, gather_product, product_scatter, product_sum
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import give_grad
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.pieces import in_chunks, summed_chunks

# The handle of the weight gradient's sink, the groups over which things travel, the precision of the products (see
# `products`), and the least FLOPs for each send where they communicate while they multiply (`spec/model/pieces.py`).
ProductSettings = tuple[Tensor | None, Sides, str, float | None]


class _Product(torch.autograd.Function):
    """y = x W^T with its collectives, which the settings' `Sides` say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        y, full, weight = product_forward(ctx, x, weight, bias, settings)
        ctx.save_for_backward(x if full is None and ctx.needs_input_grad[1] else None, full, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, full, weight = ctx.saved_tensors
        weight = weight_values(weight, grad.dtype, again=True)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x: Tensor | None
        if ctx.overlaps and ctx.sides.x[1] > 1:
            grad_x, grad_weight = _column_grads(ctx, grad, weight, x, needs_weight)
        else:
            prepared, grad_x = _output_grads(ctx, grad, weight, needs_x, needs_weight)
            grad_weight = weight_grad(ctx, prepared, x, full) if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, *_NONE


class _SwigluProduct(torch.autograd.Function):
    """y = swiglu(x) W^T. Only x is kept; backward recomputes its SwiGLU in the kernel that computes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        y, full, weight = product_forward(ctx, swiglu(x), weight, None, settings)
        ctx.save_for_backward(x, full, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, full, weight = ctx.saved_tensors
        prepared, back = _output_grads(ctx, grad, weight_values(weight, grad.dtype, again=True))
        assert back is not None
        grad_x, value = swiglu_backward(x, back)
        grad_weight = weight_grad(ctx, prepared, value, full) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, *_NONE


class _NormProduct(torch.autograd.Function):
    """Returns x itself and y = rms_norm(x) W^T. Only x is kept; backward recomputes its norm. x is returned so that the
    residual branch takes it from here: its gradient then arrives in this backward as `passed`, and one kernel adds it
    to the norm's gradient instead of autograd in a pass of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        _, sides, kind, _ = settings
        normed, rstd = norm_of_product(x, scale, eps, sides.x[1] * sides.summed[1] == 1 and not kind)
        ctx.save_for_backward(x, rstd, scale, weight)
        ctx.eps = eps
        return x.view_as(x), product_forward(ctx, normed, weight, bias, settings)[0]

    @staticmethod
    def backward(ctx: Any, passed: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, scale, weight = ctx.saved_tensors
        weight = weight_values(weight, grad.dtype, again=True)
        needs_weight = ctx.needs_input_grad[3]
        if ctx.overlaps and ctx.sides.x[1] > 1:
            normed, _ = rms_norm(x, scale, ctx.eps)  # the weight's gradient needs it before the input's is there
            back, grad_weight = _column_grads(ctx, grad, weight, normed, needs_weight)
            grad_x, _, grad_scale = rms_norm_backward(x, rstd, scale, back, passed)
        else:
            prepared = prepare_grad(ctx, grad, weight)
            back = input_grad(ctx, prepared, weight)
            grad_x, normed, grad_scale = rms_norm_backward(x, rstd, scale, back, passed)
            grad_weight = weight_grad(ctx, prepared, normed) if needs_weight else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[4] else None
        return grad_x, grad_scale.to(scale.dtype), None, grad_weight, grad_bias, *_NONE


_NONE = (None,) * 4  # the gradients of the settings: there are none


def product_forward(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the product with its collectives, the gathered x if that is kept, and what is kept of the weight. Keeps
    the settings for backward."""
    # The handle of the sink is a number that never changes, so it needs none of save_for_backward's checks.
    ctx.sink, ctx.sides, ctx.kind, least = settings
    sides: Sides = ctx.sides
    values = weight_values(weight, x.dtype)
    ctx.overlaps = least is not None and _overlaps(sides, x.shape[0], values.numel(), least)
    if ctx.overlaps and (sides.summed[1] > 1 or not sides.all_rows):
        return _overlapped(sides, x, values, bias, least), None, weight
    full = gather_input(x, sides)
    if sides.weight is not None:
        values = gather(values, sides.weight)
    y = sum_output(products.forward(full, values, bias, ctx.kind), sides)
    return (y, full, values) if sides.keeps else (y, None, weight)


def _overlaps(sides: Sides, rows: int, weight: int, least: float) -> bool:
    """Whether a product communicates while it multiplies. `rows` are those of its input on this rank."""
    size = sides.x[1] * sides.summed[1]
    return sides.all_rows or (size > 1 and in_chunks(rows * sides.x[1], weight, size, least))


def _overlapped(sides: Sides, x: Tensor, weight: Tensor, bias: Tensor | None, least: float | None) -> Tensor:
    """Returns the product, which communicates in forward while it multiplies."""
    if sides.x[1] > 1:
        return gather_product(x, weight, bias, False, *sides.x)[0]
    if sides.all_rows:
        return product_sum(x, weight, sides.summed[0], summed_chunks(x.shape[0], weight.numel(), least))
    return product_scatter(x, weight, False, *sides.summed)


def _output_grads(
    ctx: Any, grad: Tensor, weight: Tensor, needs_x: bool = True, needs_weight: bool = True
) -> tuple[products.Prepared, Tensor | None]:
    """Returns the output's gradient, prepared, and the input's, if it is needed."""
    if ctx.overlaps and ctx.sides.summed[1] > 1 and not ctx.sides.all_rows:
        grad_x, full = gather_product(grad, weight, None, True, *ctx.sides.summed)
        return (full, None), grad_x
    prepared = prepare_grad(ctx, grad, weight, needs_x, needs_weight)
    return prepared, input_grad(ctx, prepared, weight) if needs_x else None


def _column_grads(
    ctx: Any, grad: Tensor, weight: Tensor, x: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of a column product's input and weight, of which the first travels during the second."""
    group, size = ctx.sides.x
    if needs_weight and ctx.sink is not None:
        return column_backward(grad, weight, x, ctx.sink, group, not ctx.sides.all_rows), None
    if ctx.sides.all_rows:
        grad_x, full = scatter_input_grad(grad @ weight, ctx.sides), x
    else:
        grad_x = product_scatter(grad.contiguous(), weight, True, group, size)
        full = gather_in_chunks(x, group, size) if needs_weight else x
    return grad_x, grad.t() @ full if needs_weight else None


def prepare_grad(ctx: Any, grad: Tensor, weight: Tensor, *needs: bool) -> products.Prepared:
    """Prepares the output's gradient, gathered where the forward scattered the output."""
    return products.prepare_grad(gather_output_grad(grad, ctx.sides), weight, ctx.kind, *needs)


def input_grad(ctx: Any, grad: products.Prepared, weight: Tensor) -> Tensor:
    """Returns this rank's block of the input's gradient."""
    sides: Sides = ctx.sides
    if sides.weight is not None and not sides.keeps:
        weight = gather(weight, sides.weight, again=True)
    if sides.joins:
        return scatter(products.product_in_blocks(grad[0], weight, sides.x[1]), sides.x)
    return scatter_input_grad(products.input_grad(grad, weight, ctx.kind), sides)


def weight_grad(ctx: Any, grad: products.Prepared, x: Tensor, full: Tensor | None = None) -> Tensor | None:
    """Adds the weight gradient to the sink and returns None, or returns it for autograd where there is no sink. It is
    computed from this rank's x, or from the gathered one where that was kept."""
    sides: Sides = ctx.sides
    if sides.weight is None:
        return products.weight_grad(grad, gather_input(x, sides, again=True), ctx.sink, ctx.kind)
    if full is None and sides.joins:
        found = products.weight_grad_of_blocks(grad[0], gather(x, sides.x, again=True), sides.x[1])
    else:
        found = grad[0].t() @ (gather_input(x, sides, again=True) if full is None else full)
    return give_grad(scatter(found, sides.weight), ctx.sink)


class Linear(Adapted):
    """A product and its bias. A row layer's bias is added after the sum, by every rank to its own tokens."""

    def __init__(
        self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None,
        cut: Literal["column", "row", "whole"] | Sides,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = parallel.parameter(weight)
        self.bias = parallel.parameter(bias) if bias is not None else None
        self.sinks: dict[str, Tensor] = {}
        self.sides = cut if isinstance(cut, Sides) else Sides.over_tp(parallel, cut)
        # A bias of a sum is added after it, so that it is added once. On a grid each rank has its block of that.
        self.adds_bias = self.sides.summed[1] == 1 and self.sides.weight is None
        self.kind, self.fuses, self.piece_flops = parallel.products, parallel.fused, parallel.piece_flops
        self.add_adapters(parallel, weight)
        # All tp ranks drop the same of an input that all of them use.
        own = self.sides.summed[1] > 1 or (parallel.splits_tokens and self.sides.x[1] == 1)
        self.stream = parallel.streams.own if own else parallel.streams.same
        if self.kind and not fp8.sizes_fit_fp8(*weight.values.local_shape):
            warnings.warn(f"sizes that are no multiples of {FP8_UNIT} are multiplied in bf16, not in fp8", stacklevel=2)

    @property
    def settings(self) -> ProductSettings:
        return (self.sinks.get("weight"), self.sides, self.kind, self.piece_flops)

    def alone(self, x: Tensor, after_swiglu: bool = False) -> Tensor:
        """Returns this rank's own product, of x or of its SwiGLU: without collectives, and without a bias that is added
        after a sum."""
        if self.adapters:
            return self.adapted(swiglu(x) if after_swiglu else x, PLAIN)[1]
        settings = (self.sinks.get("weight"), PLAIN, self.kind, None)
        if after_swiglu and self.fuses and self._inside is None:
            return _SwigluProduct.apply(x, self.weight, *settings)
        return _Product.apply(swiglu(x) if after_swiglu else x, self.weight, self._inside, *settings)

    def adapted(self, x: Tensor, sides: Sides, before: Before = NOTHING) -> tuple[Tensor, Tensor]:
        """Returns x and the product with its adapters' changes."""
        changes = [Change(each.start, each.stop, each) for each in self.adapters]
        stream = self.stream if self.training else None
        return adapted_product(x, self.weight, self._inside, changes, (sides, self.kind), stream, before)

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters:
            return self.biased(self.adapted(x, self.sides)[1])
        return self.biased(_Product.apply(x, self.weight, self._inside, *self.settings))

    def after_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns x and the product of its norm. Whatever else needs x must use the returned one, so that its gradient
        is added in this layer's backward."""
        if self.adapters and norm.fuses:
            x, y = self.adapted(x, self.sides, Before("norm", norm.weight, norm.eps))
        elif self.adapters:
            return x, self(norm(x))
        else:
            x, y = norm_product(x, norm, self.weight, self._inside, self.settings)
        return x, self.biased(y)

    def after_swiglu(self, x: Tensor) -> Tensor:
        if not self.fuses or self._inside is not None:
            return self(swiglu(x))
        if self.adapters:
            return self.biased(self.adapted(x, self.sides, Before("swiglu"))[1])
        return self.biased(_SwigluProduct.apply(x, self.weight, *self.settings))

    @property
    def _inside(self) -> Tensor | None:
        """The bias, where the product itself adds it and not `biased` after the sum."""
        return self.bias if self.adds_bias else None

    def biased(self, y: Tensor) -> Tensor:
        """Returns the sum of all ranks' own products with the bias, unless the product has added it."""
        return y if self.bias is None or self.adds_bias else y + self.bias


def norm_product(
    x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor]:
    """Returns x and the product of its norm, as `Linear.after_norm` does."""
    if not norm.fuses:
        return x, _Product.apply(norm(x), weight, bias, *settings)
    return _NormProduct.apply(x, norm.weight, norm.eps, weight, bias, *settings)
