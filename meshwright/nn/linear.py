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

from meshwright.comm.ops import all_gather, all_reduce_, reduce_scatter
from meshwright.config.sections import FP8_UNIT
from meshwright.nn import fp8, products
from meshwright.nn.adapters.adapters import NOTHING, Adapted, Before, Change, Settings, adapted_product
from meshwright.nn.adapters.nf4 import weight_values
from meshwright.nn.fused import norm_of_product, rms_norm, rms_norm_backward, swiglu, swiglu_backward
from meshwright.nn.norm import Norm
from meshwright.nn.overlap import column_backward, gather_in_pieces, gather_product, product_scatter, product_sum
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.pieces import in_pieces, summed_pieces

# The handle of the weight gradient's sink, the mode (see `_Product`), the name and size of the tp group, the precision
# of the products (see `products`), and the least FLOPs for each send where they communicate while they multiply (see
# `spec/model/pieces.py`).
ProductSettings = tuple[Tensor | None, str, str, int, str, float | None]


class _Product(torch.autograd.Function):
    """y = x W^T with its collectives. `mode` says which collectives it needs:

    plain: none. column: the input gradient is summed. row: the output is summed. gather: the tokens are gathered before
    the product. scatter: the output is summed and its tokens are scattered.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return _forward(ctx, x, weight, bias, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight = weight_values(weight, grad.dtype, again=True)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if ctx.overlaps and ctx.mode in ("gather", "column"):
            both = _column_grads(ctx, grad, weight, x, needs_weight)
            return *both, grad.sum(0) if needs_bias else None, *_NONE
        prepared, grad_x = _output_grads(ctx, grad, weight, needs_x, needs_weight)
        grad_weight = _weight_grad(ctx, prepared, x) if needs_weight else None
        return grad_x, grad_weight, prepared[0].sum(0) if needs_bias else None, *_NONE


class _SwigluProduct(torch.autograd.Function):
    """y = swiglu(x) W^T. Only x is kept; backward recomputes its SwiGLU in the kernel that computes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _forward(ctx, swiglu(x), weight, None, settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        prepared, back = _output_grads(ctx, grad, weight_values(weight, grad.dtype, again=True))
        assert back is not None
        grad_x, value = swiglu_backward(x, back)
        grad_weight = _weight_grad(ctx, prepared, value) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, *_NONE


class _NormProduct(torch.autograd.Function):
    """Returns x itself and y = rms_norm(x) W^T. Only x is kept; backward recomputes its norm. x is returned so that the
    residual branch takes it from here: its gradient then arrives in this backward as `passed`, and one kernel adds it
    to the norm's gradient instead of autograd in a pass of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, eps: float, weight: Tensor, bias: Tensor | None, *settings: Any
    ) -> tuple[Tensor, Tensor]:
        _, mode, _, _, kind, _ = settings
        normed, rstd = norm_of_product(x, scale, eps, mode, kind)
        ctx.save_for_backward(x, rstd, scale, weight)
        ctx.eps = eps
        return x.view_as(x), _forward(ctx, normed, weight, bias, settings)

    @staticmethod
    def backward(ctx: Any, passed: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, scale, weight = ctx.saved_tensors
        weight = weight_values(weight, grad.dtype, again=True)
        needs_weight = ctx.needs_input_grad[3]
        if ctx.overlaps and ctx.mode in ("gather", "column"):
            normed, _ = rms_norm(x, scale, ctx.eps)  # the weight's gradient needs it before the input's is there
            back, grad_weight = _column_grads(ctx, grad, weight, normed, needs_weight)
            grad_x, _, grad_scale = rms_norm_backward(x, rstd, scale, back, passed)
        else:
            prepared = _prepare_grad(ctx, grad, weight)
            back = _input_grad(ctx, prepared, weight)
            grad_x, normed, grad_scale = rms_norm_backward(x, rstd, scale, back, passed)
            grad_weight = _weight_grad(ctx, prepared, normed) if needs_weight else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[4] else None
        return grad_x, grad_scale.to(scale.dtype), None, grad_weight, grad_bias, *_NONE


_NONE = (None,) * 6  # the gradients of the settings: there are none


def _forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ProductSettings) -> Tensor:
    """Returns the product with its collectives, and keeps the settings for backward."""
    # The handle of the sink is a number that never changes, so it needs none of save_for_backward's checks.
    ctx.sink, ctx.mode, ctx.group, ctx.size, ctx.kind, least = settings
    weight = weight_values(weight, x.dtype)
    ctx.overlaps = _overlaps(ctx.mode, ctx.size, x.shape[0], weight.numel(), least)
    if ctx.overlaps and ctx.mode == "gather":
        return gather_product(x, weight, bias, False, ctx.group, ctx.size)[0]
    if ctx.overlaps and ctx.mode == "scatter":
        return product_scatter(x, weight, False, ctx.group, ctx.size)
    if ctx.overlaps and ctx.mode == "row":
        return product_sum(x, weight, ctx.group, summed_pieces(x.shape[0], weight.numel(), least))
    full = all_gather(x, ctx.group, ctx.size) if ctx.mode == "gather" else x
    y = products.forward(full, weight, bias, ctx.kind)
    if ctx.mode == "row":
        all_reduce_(y, ctx.group, "sum")
    elif ctx.mode == "scatter":
        y = reduce_scatter(y, ctx.group, ctx.size)
    return y


def _overlaps(mode: str, size: int, rows: int, weight: int, least: float | None) -> bool:
    """Whether a product communicates while it multiplies. `rows` are those of its input on this rank."""
    if mode in ("gather", "scatter"):
        return in_pieces(rows * size if mode == "gather" else rows, weight, size, least)
    return least is not None


def _output_grads(
    ctx: Any, grad: Tensor, weight: Tensor, needs_x: bool = True, needs_weight: bool = True
) -> tuple[products.Prepared, Tensor | None]:
    """Returns the output's gradient, prepared, and the input's, if it is needed."""
    if ctx.overlaps and ctx.mode == "scatter":
        grad_x, full = gather_product(grad, weight, None, True, ctx.group, ctx.size)
        return (full, None), grad_x
    prepared = _prepare_grad(ctx, grad, weight, needs_x, needs_weight)
    return prepared, _input_grad(ctx, prepared, weight) if needs_x else None


def _column_grads(
    ctx: Any, grad: Tensor, weight: Tensor, x: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of a column product's input and weight, of which the first travels during the second."""
    if needs_weight and ctx.sink is not None:
        return column_backward(grad, weight, x, ctx.sink, ctx.group, ctx.mode == "gather"), None
    if ctx.mode == "gather":
        grad_x = product_scatter(grad.contiguous(), weight, True, ctx.group, ctx.size)
        full = gather_in_pieces(x, ctx.group, ctx.size) if needs_weight else x
    else:
        grad_x, full = sum_input_grad(ctx, grad @ weight), x
    return grad_x, grad.t() @ full if needs_weight else None


def _prepare_grad(ctx: Any, grad: Tensor, weight: Tensor, *needs: bool) -> products.Prepared:
    """Prepares the output's gradient, gathered where the forward scattered the output."""
    full = all_gather(grad, ctx.group, ctx.size) if ctx.mode == "scatter" else grad
    return products.prepare_grad(full, weight, ctx.kind, *needs)


def _input_grad(ctx: Any, grad: products.Prepared, weight: Tensor) -> Tensor:
    return sum_input_grad(ctx, products.input_grad(grad, weight, ctx.kind))


def sum_input_grad(ctx: Any, grad_x: Tensor) -> Tensor:
    """Sums the input's gradient over the ranks that cut the output features, for the tokens that this rank holds."""
    if ctx.mode == "column":
        all_reduce_(grad_x, ctx.group, "sum")
    elif ctx.mode == "gather":
        grad_x = reduce_scatter(grad_x, ctx.group, ctx.size)
    return grad_x


def _weight_grad(ctx: Any, grad: products.Prepared, x: Tensor) -> Tensor | None:
    """Adds the weight gradient to the sink and returns None, or returns it for autograd where there is no sink."""
    full = all_gather(x, ctx.group, ctx.size, again=True) if ctx.mode == "gather" else x
    return products.weight_grad(grad, full, ctx.sink, ctx.kind)


class Linear(Adapted):
    """A product and its bias. A row layer's bias is added after the sum, by every rank to its own tokens."""

    def __init__(
        self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None, cut: Literal["column", "row", "whole"]
    ) -> None:
        super().__init__()
        self.weight = parallel.parameter(weight)
        self.bias = parallel.parameter(bias) if bias is not None else None
        self.sinks: dict[str, Tensor] = {}
        self.mode: str = "plain" if parallel.tp.alone or cut == "whole" else cut
        if parallel.splits_tokens and cut != "whole":
            self.mode = "gather" if cut == "column" else "scatter"
        self.group, self.size = parallel.tp.name, parallel.tp.size
        self.kind, self.fuses, self.piece_flops = parallel.products, parallel.fused, parallel.piece_flops
        self.add_adapters(parallel, weight)
        # All tp ranks drop the same of an input that all of them use.
        own = self.mode == "row" or (parallel.splits_tokens and self.mode != "gather")
        self.stream = parallel.streams.own if own else parallel.streams.same
        if self.kind and not fp8.sizes_fit_fp8(*weight.values.local_shape):
            warnings.warn(f"sizes that are no multiples of {FP8_UNIT} are multiplied in bf16, not in fp8", stacklevel=2)

    @property
    def settings(self) -> ProductSettings:
        return (self.sinks.get("weight"), self.mode, self.group, self.size, self.kind, self.piece_flops)

    def alone(self, x: Tensor, after_swiglu: bool = False) -> Tensor:
        """Returns this rank's own product, of x or of its SwiGLU: without collectives, and without a bias that is added
        after a sum."""
        if self.adapters:
            return self.adapted(swiglu(x) if after_swiglu else x, "plain")[1]
        settings = (self.sinks.get("weight"), "plain", self.group, self.size, self.kind, None)
        if after_swiglu and self.fuses and self._inside is None:
            return _SwigluProduct.apply(x, self.weight, *settings)
        return _Product.apply(swiglu(x) if after_swiglu else x, self.weight, self._inside, *settings)

    def adapted(self, x: Tensor, mode: str, before: Before = NOTHING) -> tuple[Tensor, Tensor]:
        """Returns x and the product with its adapters' changes, in one of the modes of `_Product`."""
        changes = [Change(each.start, each.stop, each) for each in self.adapters]
        settings = Settings(mode, self.group, self.size, self.kind)
        stream = self.stream if self.training else None
        return adapted_product(x, self.weight, self._inside, changes, settings, stream, before)

    def forward(self, x: Tensor) -> Tensor:
        if self.adapters:
            return self.biased(self.adapted(x, self.mode)[1])
        return self.biased(_Product.apply(x, self.weight, self._inside, *self.settings))

    def after_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Returns x and the product of its norm. Whatever else needs x must use the returned one, so that its gradient
        is added in this layer's backward."""
        if self.adapters and norm.fuses:
            x, y = self.adapted(x, self.mode, Before("norm", norm.weight, norm.eps))
        elif self.adapters:
            return x, self(norm(x))
        else:
            x, y = norm_product(x, norm, self.weight, self._inside, self.settings)
        return x, self.biased(y)

    def after_swiglu(self, x: Tensor) -> Tensor:
        if not self.fuses or self._inside is not None:
            return self(swiglu(x))
        if self.adapters:
            return self.biased(self.adapted(x, self.mode, Before("swiglu"))[1])
        return self.biased(_SwigluProduct.apply(x, self.weight, *self.settings))

    @property
    def _inside(self) -> Tensor | None:
        """The bias, where the product itself adds it and not `biased` after the sum."""
        return self.bias if self.mode in ("plain", "column", "gather") else None

    def biased(self, y: Tensor) -> Tensor:
        """Returns the sum of all ranks' own products with the bias, unless the product has added it."""
        return y if self.bias is None or self._inside is not None else y + self.bias


def norm_product(
    x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, settings: ProductSettings
) -> tuple[Tensor, Tensor]:
    """Returns x and the product of its norm, as `Linear.after_norm` does."""
    if not norm.fuses:
        return x, _Product.apply(norm(x), weight, bias, *settings)
    return _NormProduct.apply(x, norm.weight, norm.eps, weight, bias, *settings)
