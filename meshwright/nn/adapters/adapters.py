"""Low-rank adapters of linear layers (LoRA, DoRA), computed inside the layer's product. `spec/model/tuning.py` has the
definitions.

Each rank adds its part of the adapter's output before the layer's sum over ranks, and its part of the input gradient
before the sum of that. So adapters need no further collectives, except for the norms of rows whose inputs are divided
over ranks (DoRA).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.comm.ops import all_reduce_
from meshwright.comm.registered import pure_operator
from meshwright.nn import products
from meshwright.nn.adapters.nf4 import weight_values
from meshwright.nn.fused import norm_of_product, rms_norm_backward, swiglu, swiglu_backward, wide
from meshwright.nn.grid.sides import Sides, gather_input, gather_output_grad, scatter_input_grad, sum_output
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import AdapterRecord, ParamRecord


class Adapter(nn.Module):
    """The trained low-rank change of some rows of a weight."""

    def __init__(self, parallel: Parallel, record: AdapterRecord) -> None:
        super().__init__()
        self.start, self.stop = record.start, record.stop
        self.scale, self.p = record.scale, record.dropout
        self.down, self.up = parallel.parameter(record.down), parallel.parameter(record.up)
        self.norms = None if record.norms is None else parallel.parameter(record.norms)


class AdaptedLayer(nn.Module):
    """A layer whose weight may have adapters."""

    def add_adapters(self, parallel: Parallel, weight: ParamRecord) -> None:
        self._adapters = [Adapter(parallel, record) for record in weight.adapters]
        # False while the model runs without its adapters.
        self.adapts = True
        for adapter, record in zip(self._adapters, weight.adapters, strict=True):
            self.add_module(record.name, adapter)

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters that the product currently uses."""
        return self._adapters if self.adapts else []


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights of the module alone, inside this context."""
    layers = [layer for layer in module.modules() if isinstance(layer, AdaptedLayer)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


class RowAdapter(NamedTuple):
    """An adapter of rows `start` to `stop` of the weight of a product. That weight may be joined from several."""

    start: int
    stop: int
    adapter: Adapter


class InputFunction(NamedTuple):
    """The function that a product applies to its input: none, SwiGLU, or the RMS norm whose weight and epsilon it has.
    Only the input itself is saved, and backward applies the function again."""

    gain: Tensor | None = None
    eps: float = 0.0
    swiglu: bool = False


NOTHING = InputFunction()


def adapted_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, changes: Sequence[RowAdapter], settings: tuple[Sides, str],
    generator: torch.Generator | None = None, before: InputFunction = NOTHING,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x, and the product of x with the changed weight, after the collectives of the product.

    `settings` are the groups over which tensors travel and the precision of the products, as in `nn/linear.py`. If a
    norm comes `before`, all further uses of x must take the returned one, so that their gradient is added in the norm's
    backward. `generator` draws the dropout of the adapters' inputs, in training.
    """
    first = changes[0].adapter
    sides, kind = settings
    ratio = _ratio(weight, changes, sides) if first.norms is not None else None
    keep = None
    if generator is not None and first.p:
        rows = x.shape[0] * (1 if sides.all_rows else sides.x[1])
        keep = torch.empty((rows, first.down.shape[1]), dtype=x.dtype, device=x.device)
        keep = keep.bernoulli_(1.0 - first.p, generator=generator).div_(1.0 - first.p)
    spans = tuple([(change.start, change.stop) for change in changes])
    factors = [part for change in changes for part in (change.adapter.down, change.adapter.up)]
    # All adapters of a weight have the same scale.
    how = (sides, kind, first.scale, spans, before.swiglu, before.eps)
    result = _AdaptedProduct.apply(x, before.gain, weight, bias, ratio, keep, how, *factors)
    return result if before.gain is not None else (x, result)


def _ratio(weight: Tensor, changes: Sequence[RowAdapter], sides: Sides) -> Tensor:
    """Return the factor of each row of the changed weight: its trained norm divided by its current norm.

    As in DoRA, the current norm counts as a constant, so no gradient flows through it.
    """
    with torch.no_grad():
        weight = weight_values(weight, changes[0].adapter.down.dtype)
        old = torch.linalg.vector_norm(weight, dim=1, dtype=wide(weight[:0]).dtype).square()
        new = old.clone()
        # |w + s b A|^2 = |w|^2 + 2 s b (A w + s/2 A A^T b) for a row w of the weight and its row b of B, so the changed
        # weight need not be built.
        for start, stop, adapter in changes:
            down = wide(adapter.down)
            up = wide(adapter.up)
            scale = adapter.scale
            mixed = wide(weight[start:stop] @ adapter.down.t()) + 0.5 * scale * (up @ (down @ down.t()))
            new[start:stop] += 2.0 * scale * (mixed * up).sum(1)
        both = torch.stack((old, new))
        if sides.summed[1] > 1:
            all_reduce_(both, sides.summed[0], "sum")
        old, new = both.clamp_(min=torch.finfo(both.dtype).tiny).sqrt().unbind()
    # Rows without an adapter keep a factor of 1. Trained norms are stored as differences from the weight's own norms.
    parts, at = [], 0
    for start, stop, adapter in changes:
        assert adapter.norms is not None
        parts += [torch.ones_like(old[at:start]), (old[start:stop] + adapter.norms) / new[start:stop]]
        at = stop
    return torch.cat([*parts, torch.ones_like(old[at:])])


@pure_operator("meshwright::add_low_rank", mutates={"y"})
def add_low_rank(y: Tensor, short: Tensor, ups: Sequence[Tensor], spans: Sequence[int], scale: float) -> None:
    """Add scale * part up^T to columns of y for each of `ups`, with the parts of `short` from left to right.

    `spans` lists the first column and the end of each part's columns. The product itself does the addition, so the only
    extra memory traffic is one read and one write of y.
    """
    parts = short.chunk(len(ups), 1)
    for number, (part, up) in enumerate(zip(parts, ups, strict=True)):
        y[:, spans[2 * number] : spans[2 * number + 1]].addmm_(part, up.t(), alpha=scale)


class _AdaptedProduct(torch.autograd.Function):
    """y = ratio (x W^T + scale (x A^T) B^T) + bias, with the collectives of `nn/linear.py`. The weight is frozen.

    A norm or SwiGLU may be applied to x first (`InputFunction`).
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        # The arguments have no names, because torch.compile, without gradients, omits ctx if it counts as many
        # arguments as names.
        x, gain, weight, bias, ratio, keep, how, *factors = given
        ctx.how = sides, kind, scale, spans, after_swiglu, eps = how
        rstd, inner = None, x
        if gain is not None:
            inner, rstd = norm_of_product(x, gain, eps, sides.x[1] * sides.summed[1] == 1 and not kind)
        elif after_swiglu:
            inner = swiglu(x)
        full = gather_input(inner, sides)
        y = products.forward(full, weight_values(weight, x.dtype), None, kind)
        seen = full if keep is None else full * keep
        short = seen @ torch.cat(factors[::2]).t()
        add_low_rank(y, short, factors[1::2], [row for span in spans for row in span], scale)
        ctx.save_for_backward(x, rstd, gain, weight, keep, short, ratio, y if ratio is not None else None, *factors)
        if ratio is not None:
            y = (y * ratio).to(y.dtype)
        if bias is not None:
            y = y + bias
        y = sum_output(y, sides)
        return (x.view_as(x), y) if gain is not None else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, gain, weight, keep, short, ratio, unscaled, *factors = ctx.saved_tensors
        sides, kind, scale, spans, after_swiglu, _ = ctx.how
        grad = gather_output_grad(grads[-1], sides)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        grad_ratio = None
        if ratio is not None:
            grad_ratio = (wide(grad) * unscaled).sum(0)
            grad = (grad * ratio).to(grad.dtype)
        downs = torch.cat(factors[::2])
        ups = factors[1::2]
        parts = short.chunk(len(spans), 1)
        columns = [grad[:, start:stop] for start, stop in spans]
        back = scale * torch.cat([some @ up for some, up in zip(columns, ups, strict=True)], 1)
        grad_ups = [scale * (some.t() @ part) for some, part in zip(columns, parts, strict=True)]
        grad_x = grad_gain = None
        if ctx.needs_input_grad[0] or gain is not None or after_swiglu:
            weight = weight_values(weight, grad.dtype, again=True)
            prepared = products.prepare_grad(grad, weight, kind, for_weight=False)
            grad_x = products.input_grad(prepared, weight, kind)
            if keep is None:
                add_low_rank(grad_x, back, [downs.t()], [0, downs.shape[1]], 1.0)
            else:
                grad_x = grad_x + (back @ downs) * keep
            grad_x = scatter_input_grad(grad_x, sides)
        inner = x
        if gain is not None:
            grad_x, inner, grad_gain = rms_norm_backward(x, rstd, gain, grad_x, grads[0])
            grad_gain = grad_gain.to(gain.dtype) if ctx.needs_input_grad[1] else None
        elif after_swiglu:
            grad_x, inner = swiglu_backward(x, grad_x)
        full = gather_input(inner, sides, again=True)
        grad_downs = (back.t() @ (full if keep is None else full * keep)).chunk(len(ups))
        factor_grads = [factor_grad for pair in zip(grad_downs, grad_ups, strict=True) for factor_grad in pair]
        return grad_x, grad_gain, None, grad_bias, grad_ratio, None, None, *factor_grads
