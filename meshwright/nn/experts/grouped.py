"""Products of rows, sorted by expert, with the matrices of their experts; and moving rows to that order and back.

`ends` [experts] holds the end of each expert's rows; an expert may have none. The products are registered operators, so
that a dry run sees them and weight gradients go straight into the flat gradient buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.registered import effectful_operator, operator, shapes_of
from meshwright.device import kind_of
from meshwright.kernels import kernels_take
from meshwright.nn.fused import swiglu, swiglu_backward
from meshwright.nn.mlp import ACTIVATIONS
from meshwright.nn.weight_grad import Sink, sink_of, write_product


def _each(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each expert. The host waits for `ends`, so fast paths on CUDA don't use this."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


def _in_one_call(x: Tensor, width: int) -> bool:
    """Return whether torch's grouped product can turn rows of x into rows of `width` columns, or the reverse.

    It needs at least one row, and rows of a multiple of 16 bytes.
    """
    fits = x.shape[0] > 0 and x.shape[1] % 8 == 0 and width % 8 == 0
    return kind_of(x.device).has_grouped_products and x.dtype == torch.bfloat16 and fits


@operator("meshwright::grouped_product")
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """Return x_e W_e^T for the rows x_e of every expert e and its weight W_e [out, in]; `transposed` gives x_e W_e."""
    factor = weight if transposed else weight.transpose(1, 2)
    if _in_one_call(x, factor.shape[2]):
        return F.grouped_mm(x, factor, offs=ends)
    out = x.new_empty((x.shape[0], factor.shape[2]))
    if not x.is_meta:
        for expert, rows in _each(ends):
            torch.mm(x[rows], factor[expert], out=out[rows])
    return out


@shapes_of(grouped_product)
def _(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2 if transposed else 1]))


def grouped_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return g_e^T x_e for every expert e, [experts, out, in]; an expert without rows has zeros."""
    if _in_one_call(x, grad.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=ends)
    out = x.new_zeros((ends.shape[0], grad.shape[1], x.shape[1]))
    if not x.is_meta:
        for expert, rows in _each(ends):
            torch.mm(grad[rows].t(), x[rows], out=out[expert])
    return out


@effectful_operator("meshwright::add_grouped_grad")
def add_grouped_grad(sink: Tensor, grad: Tensor, x: Tensor, ends: Tensor) -> None:
    """Add g_e^T x_e for every expert e to the sink with this handle, which is that of the weight [experts, out, in]."""
    sink_of(sink).add_factors(_add_grouped, grad, x, ends)


def _add_grouped(slot: Sink, grad: Tensor, x: Tensor, ends: Tensor) -> None:
    slot.prepare()
    if kernels_take(x) and x.element_size() == 2 and slot.view.dtype == torch.float32:
        from meshwright.kernels.experts import add_grouped

        add_grouped(slot.view, grad, x, ends, add=not slot.fresh)
    elif not x.is_meta:
        for expert, rows in _each(ends):
            write_product(slot.view[expert], grad[rows], x[rows], add=not slot.fresh)
    slot.done()


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index]; a negative index stands for an empty row and gives zeros."""
    if x.is_meta:
        return x.new_empty((index.shape[0], x.shape[1]))
    if kernels_take(x):
        from meshwright.kernels.experts import take_rows as kernel

        return kernel(x, index)
    return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0.0)


def sum_rows(x: Tensor, places: Tensor) -> Tensor:
    """Return, for each row of `places` [n, k], the sum of the rows of x that it lists, added in its order in float32.

    Negative places are skipped.
    """
    if x.is_meta:
        return x.new_empty((places.shape[0], x.shape[1]))
    if kernels_take(x):
        from meshwright.kernels.experts import sum_rows as kernel

        return kernel(x, places)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = take_rows(x, places[:, 0]).to(wide)
    for column in range(1, places.shape[1]):
        total += take_rows(x, places[:, column])
    return total.to(x.dtype)


def weighted_activation(inner: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Return the activation of the inner features, times each row's routing weight.

    The second product is linear, so its result is weighted as well.
    """
    other = ACTIVATIONS.get(kind)  # none: SwiGLU
    if other is None and inner.is_meta:
        return inner.new_empty((inner.shape[0], inner.shape[1] // 2))
    if other is None and kernels_take(inner):
        from meshwright.kernels.experts import weighted_swiglu

        return weighted_swiglu(inner, weights)
    value = swiglu(inner) if other is None else other(inner)
    return (value * weights[:, None]).to(inner.dtype)


def weighted_activation_backward(
    inner: Tensor, weights: Tensor, grad: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the inner features, the output of `weighted_activation`, and the weights' gradient.

    On CUDA the first two overwrite `inner` and `grad`, so neither may be used afterwards.
    """
    other = ACTIVATIONS.get(kind)  # none: SwiGLU
    # A dry run counts the same memory as the kernel.
    if other is None and inner.is_meta:
        return inner, grad, torch.empty_like(weights)
    if other is None and kernels_take(inner, grad):
        from meshwright.kernels.experts import weighted_swiglu_backward_

        grad_weights = weighted_swiglu_backward_(inner, weights, grad)
        return inner, grad, grad_weights
    passed = (grad * weights[:, None]).to(grad.dtype)
    if other is None:
        grad_inner, value = swiglu_backward(inner, passed)
    else:
        with torch.enable_grad():
            source = inner.detach().requires_grad_()
            value = other(source)
        (grad_inner,) = torch.autograd.grad(value, source, passed)
        value = value.detach()
    grad_weights = (grad.to(weights.dtype) * value).sum(1)
    return grad_inner, (value * weights[:, None]).to(inner.dtype), grad_weights


class _Move(torch.autograd.Function):
    """Copies each row to its places, or with `collects` sums each row's places. One is the adjoint of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor, collects: bool) -> Tensor:
        ctx.save_for_backward(source if collects else places)
        ctx.collects = collects
        return sum_rows(x, places) if collects else take_rows(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return take_rows(grad, index) if ctx.collects else sum_rows(grad, index), None, None, None


def spread(x: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Return x[source]; `places` [rows of x, k] is the inverse of `source`."""
    return _Move.apply(x, source, places, False)


def collect(x: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Return the sum of x over each row's places: the adjoint of `spread`."""
    return _Move.apply(x, source, places, True)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _take_numbers(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _take_numbers(grad, places), None, None


def _take_numbers(x: Tensor, index: Tensor) -> Tensor:
    return x[index.clamp(min=0)].masked_fill_(index < 0, 0.0)


def permute(x: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """Return x[source] for a tensor of numbers, with zeros for negative indices. `places` is the inverse of `source`,
    negative for numbers that are left out."""
    return _Permute.apply(x, source, places)
