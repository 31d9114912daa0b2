"""Linear layers, written once for every tensor-parallel layout, on activations of shape [tokens, features].

A `column` layer shards its output features over tp, a `row` layer its input features. A `whole` layer, which every tp
rank applies to the tokens it holds, does not communicate. With sequence parallelism a column layer gathers the tokens
of its input, and a row layer scatters those of its output. The gathered input is not saved for backward but gathered
again.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.config.sections import FP8_UNIT
from meshwright.nn import fp8, products
from meshwright.nn.adapters.adapters import NOTHING, AdaptedLayer, InputFunction, RowAdapter, adapted_product
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

# The handle of the weight gradient's sink; the groups over which tensors travel; the precision of the products (see
# nn/products.py); and the least FLOPs for each send if the layer communicates while it multiplies, or None if it does
# not (spec/model/pieces.py).
ProductSettings = tuple[Tensor | None, Sides, str, float | None]


class _Product(torch.autograd.Function):
    """y = x W^T, with the collectives that the `Sides` of the settings name."""

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
    """y = swiglu(x) W^T. Only x is saved; backward recomputes its SwiGLU in the kernel that computes the gradient."""

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
    """Returns x itself and y = rms_norm(x) W^T. Only x is saved; backward recomputes its norm.

    x is returned so that the residual branch uses it from here. The residual's gradient then arrives in this backward
    as `passed`, and one kernel adds it to the norm's gradient. Otherwise autograd would add it in a separate pass.
    """

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
            # The weight gradient is computed while the input gradient travels, so it needs the norm before
            # `rms_norm_backward` could return it.
            normed, _ = rms_norm(x, scale, ctx.eps)
            back, grad_weight = _column_grads(ctx, grad, weight, normed, needs_weight)
            grad_x, _, grad_scale = rms_norm_backward(x, rstd, scale, back, passed)
        else:
            prepared = prepare_grad(ctx, grad, weight)
            back = input_grad(ctx, prepared, weight)
            grad_x, normed, grad_scale = rms_norm_backward(x, rstd, scale, back, passed)
            grad_weight = weight_grad(ctx, prepared, normed) if needs_weight else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[4] else None
        return grad_x, grad_scale.to(scale.dtype), None, grad_weight, grad_bias, *_NONE


# Backward returns no gradient for any of the four settings.
_NONE = (None,) * 4


def product_forward(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the product after its collectives, and the tensors to save for backward: the gathered x if the layer keeps
    it, else None, and the weight. The settings are stored in `ctx`."""
    # The handle of the sink is a number that never changes, so it needs none of save_for_backward's checks.
    ctx.sink, ctx.sides, ctx.kind, least_flops = settings
    sides: Sides = ctx.sides
    values = weight_values(weight, x.dtype)
    ctx.overlaps = least_flops is not None and _overlaps(sides, x.shape[0], values.numel(), least_flops)
    # A column product whose ranks hold all rows has nothing to send in forward, only in backward.
    if ctx.overlaps and (sides.summed[1] > 1 or not sides.all_rows):
        return _overlapped_product(sides, x, values, bias, least_flops), None, weight
    full = gather_input(x, sides)
    if sides.weight is not None:
        values = gather(values, sides.weight)
    y = sum_output(products.forward(full, values, bias, ctx.kind), sides)
    return (y, full, values) if sides.keeps else (y, None, weight)


def _overlaps(sides: Sides, rows: int, weight: int, least_flops: float) -> bool:
    """Return whether a product communicates while it multiplies. `rows` are those of its input on this rank, and
    `weight` counts the elements of the weight."""
    size = sides.x[1] * sides.summed[1]
    return sides.all_rows or (size > 1 and in_chunks(rows * sides.x[1], weight, size, least_flops))


def _overlapped_product(
    sides: Sides, x: Tensor, weight: Tensor, bias: Tensor | None, least_flops: float | None
) -> Tensor:
    """Return the product, communicating while it is multiplied."""
    if sides.x[1] > 1:
        return gather_product(x, weight, bias, False, *sides.x)[0]
    if sides.all_rows:
        return product_sum(x, weight, sides.summed[0], summed_chunks(x.shape[0], weight.numel(), least_flops))
    return product_scatter(x, weight, False, *sides.summed)


def _output_grads(
    ctx: Any, grad: Tensor, weight: Tensor, needs_x: bool = True, needs_weight: bool = True
) -> tuple[products.Prepared, Tensor | None]:
    """Return the prepared gradient of the output, and the gradient of the input if it is needed."""
    if ctx.overlaps and ctx.sides.summed[1] > 1 and not ctx.sides.all_rows:
        grad_x, full = gather_product(grad, weight, None, True, *ctx.sides.summed)
        return (full, None), grad_x
    prepared = prepare_grad(ctx, grad, weight, needs_x, needs_weight)
    return prepared, input_grad(ctx, prepared, weight) if needs_x else None


def _column_grads(
    ctx: Any, grad: Tensor, weight: Tensor, x: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a column product's input and weight. The former travels while the latter is computed."""
    group, size = ctx.sides.x
    if needs_weight and ctx.sink is not None:
        return column_backward(grad, weight, x, ctx.sink, group, not ctx.sides.all_rows), None
    if ctx.sides.all_rows:
        grad_x = scatter_input_grad(grad @ weight, ctx.sides)
        full = x
    else:
        grad_x = product_scatter(grad.contiguous(), weight, True, group, size)
        full = gather_in_chunks(x, group, size) if needs_weight else x
    return grad_x, grad.t() @ full if needs_weight else None


def prepare_grad(ctx: Any, grad: Tensor, weight: Tensor, *needs: bool) -> products.Prepared:
    """Prepare the output's gradient, gathered where the forward scattered the output."""
    return products.prepare_grad(gather_output_grad(grad, ctx.sides), weight, ctx.kind, *needs)


def input_grad(ctx: Any, grad: products.Prepared, weight: Tensor) -> Tensor:
    """Return this rank's block of the input's gradient."""
    sides: Sides = ctx.sides
    if sides.weight is not None and not sides.keeps:
        weight = gather(weight, sides.weight, again=True)
    if sides.joins:
        return scatter(products.product_in_blocks(grad[0], weight, sides.x[1]), sides.x)
    return scatter_input_grad(products.input_grad(grad, weight, ctx.kind), sides)


def weight_grad(ctx: Any, grad: products.Prepared, x: Tensor, full: Tensor | None = None) -> Tensor | None:
    """Add the weight gradient to the sink and return None, or return it for autograd if there is no sink.

    It is computed from this rank's x, which is gathered again, or from `full`, the gathered x, if that was saved.
    """
    sides: Sides = ctx.sides
    if sides.weight is None:
        return products.weight_grad(grad, gather_input(x, sides, again=True), ctx.sink, ctx.kind)
    if full is None and sides.joins:
        gradient = products.weight_grad_of_blocks(grad[0], gather(x, sides.x, again=True), sides.x[1])
    else:
        gradient = grad[0].t() @ (gather_input(x, sides, again=True) if full is None else full)
    return give_grad(scatter(gradient, sides.weight), ctx.sink)


class Linear(AdaptedLayer):
    """A linear layer. A row layer's bias is added after the sum over ranks, by every rank to the tokens it holds."""

    def __init__(
        self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None,
        cut: Literal["column", "row", "whole"] | Sides,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = parallel.parameter(weight)
        self.bias = parallel.parameter(bias) if bias is not None else None
        self.sinks: dict[str, Tensor] = {}
        self.sides = cut if isinstance(cut, Sides) else Sides.over_tp(parallel, cut)
        # True if the product itself adds the bias. Where outputs are summed over ranks, the bias is added after the
        # sum, so that it is added once. On a grid each rank then adds its block of the bias.
        self.adds_bias = self.sides.summed[1] == 1 and self.sides.weight is None
        self.kind, self.fuses, self.piece_flops = parallel.products, parallel.fused, parallel.piece_flops
        self.add_adapters(parallel, weight)
        # The dropout of the adapters' input must agree across tp ranks that multiply the same input.
        inputs_differ = self.sides.summed[1] > 1 or (parallel.splits_tokens and self.sides.x[1] == 1)
        self.stream = parallel.streams.own if inputs_differ else parallel.streams.same
        if self.kind and not fp8.sizes_fit_fp8(*weight.values.local_shape):
            message = f"sizes that are not multiples of {FP8_UNIT} are multiplied in bf16, not in fp8"
            warnings.warn(message, stacklevel=2)

    @property
    def settings(self) -> ProductSettings:
        return (self.sinks.get("weight"), self.sides, self.kind, self.piece_flops)

    def alone(self, x: Tensor, after_swiglu: bool = False) -> Tensor:
        """Return this rank's product of x, or of its SwiGLU, without collectives and without a bias that is added after
        the sum over ranks."""
        if self.adapters:
            return self.product_with_adapters(swiglu(x) if after_swiglu else x, PLAIN)[1]
        settings = (self.sinks.get("weight"), PLAIN, self.kind, None)
        if after_swiglu and self.fuses and self._inside is None:
            return _SwigluProduct.apply(x, self.weight, *settings)
        return _Product.apply(swiglu(x) if after_swiglu else x, self.weight, self._inside, *settings)

    def product_with_adapters(self, x: Tensor, sides: Sides, before: InputFunction = NOTHING) -> tuple[Tensor, Tensor]:
        """Return x, and the product including the output of the adapters."""
        changes = [RowAdapter(adapter.start, adapter.stop, adapter) for adapter in self.adapters]
        stream = self.stream if self.training else None
        return adapted_product(x, self.weight, self._inside, changes, (sides, self.kind), stream, before)

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters:
            return self.add_bias(self.product_with_adapters(x, self.sides)[1])
        return self.add_bias(_Product.apply(x, self.weight, self._inside, *self.settings))

    def after_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x and the product of norm(x). All further uses of x must take the returned one, so that their gradient
        is added in this layer's backward."""
        if self.adapters and norm.fuses:
            x, y = self.product_with_adapters(x, self.sides, InputFunction(norm.weight, norm.eps))
        elif self.adapters:
            return x, self(norm(x))
        else:
            x, y = norm_product(x, norm, self.weight, self._inside, self.settings)
        return x, self.add_bias(y)

    def after_swiglu(self, x: Tensor) -> Tensor:
        if not self.fuses or self._inside is not None:
            return self(swiglu(x))
        if self.adapters:
            return self.add_bias(self.product_with_adapters(x, self.sides, InputFunction(swiglu=True))[1])
        return self.add_bias(_SwigluProduct.apply(x, self.weight, *self.settings))

    @property
    def _inside(self) -> Tensor | None:
        """The bias if the product itself adds it, or None if `add_bias` adds it after the sum."""
        return self.bias if self.adds_bias else None

    def add_bias(self, y: Tensor) -> Tensor:
        """Return the output, summed over ranks, plus the bias unless the product has added it."""
        return y if self.bias is None or self.adds_bias else y + self.bias


def product(x: Tensor, weight: Tensor, bias: Tensor | None, sides: Sides, kind: str) -> Tensor:
    """Return x W^T + b. The gradients go to autograd, not to sinks. `kind` is the precision of the products."""
    y: Tensor = _Product.apply(x, weight, bias, None, sides, kind, None)
    return y


def norm_product(
    x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor]:
    """Return x and the product of norm(x), as `Linear.after_norm` does."""
    if not norm.fuses:
        return x, _Product.apply(norm(x), weight, bias, *settings)
    return _NormProduct.apply(x, norm.weight, norm.eps, weight, bias, *settings)
