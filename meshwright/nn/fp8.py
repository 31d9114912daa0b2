"""Products in fp8: both factors are scaled to the range of an 8-bit float just before the product, and the scales are
divided out after it.

The scale is that of the largest magnitude in the whole tensor ("fp8") or in each line along which the product sums
("fp8-row"). Values are e4m3 (three bits of mantissa); gradients are e5m2 (two bits, and a larger range).
`QuantisedTensor` holds a factor in the order that a product needs: [lines, inner], where inner is the dimension that is
summed. On CUDA torch's scaled product is used. Elsewhere products are emulated in float32, with the same rounding of
the factors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.registered import effectful_operator, pure_operator, shapes_of
from meshwright.config.sections import FP8_UNIT
from meshwright.device import kind_of, scaled_rows_are_wide
from meshwright.kernels import kernels_take
from meshwright.nn.weight_grad import Sink, sink_of

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


class QuantisedTensor(NamedTuple):
    """A factor of a product: `value` [lines, inner] times `scale`, [] or [lines]."""

    value: Tensor
    scale: Tensor


class QuantisedPair(NamedTuple):
    """A quantised tensor [rows, columns]: `straight` for products that sum over its columns, `across` (its transpose)
    for products that sum over its rows."""

    straight: QuantisedTensor
    across: QuantisedTensor


def sizes_fit_fp8(*sizes: int) -> bool:
    """Return whether products of these sizes can run in fp8."""
    return all(size % FP8_UNIT == 0 for size in sizes)


def quantise(x: Tensor, kind: str, dtype: torch.dtype, straight: bool = True, across: bool = False) -> QuantisedPair:
    value, scale, turned, turned_scale = _quantise(x, kind == "fp8-row", dtype == GRADIENTS, straight, across)
    return QuantisedPair(QuantisedTensor(value, scale), QuantisedTensor(turned, turned_scale))


@pure_operator("meshwright::fp8_quantise")
def _quantise(
    x: Tensor, lines: bool, gradient: bool, straight: bool, across: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    value, turned = _empty_pair(x, gradient, straight, across)
    limit = torch.finfo(value.dtype).max
    x = x.contiguous()
    if kernels_take(x):
        from meshwright.kernels.fp8 import cast, largest_magnitudes

        of_rows, of_columns = largest_magnitudes(x, lines, straight, across)
        scale, turned_scale = cast(x, of_rows, of_columns, value, turned, limit, lines)
        return value, scale, turned, turned_scale
    size = x.abs().float()
    of_rows, of_columns = (size.amax(1), size.amax(0)) if lines else (size.amax(), size.amax())
    for out, top, wide in ((value, of_rows, x.float()), (turned, of_columns, x.float().t())):
        if out.numel():
            factor = limit / top.clamp(min=1e-12)
            out.copy_((wide * (factor[:, None] if lines else factor)).clamp(-limit, limit))
    return value, of_rows.clamp(min=1e-12) / limit, turned, of_columns.clone().clamp(min=1e-12) / limit


@shapes_of(_quantise)
def _(x: Tensor, lines: bool, gradient: bool, straight: bool, across: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    value, turned = _empty_pair(x, gradient, straight, across)
    of_rows, of_columns = (x.new_empty((n,) if lines else (), dtype=torch.float32) for n in x.shape)
    return value, of_rows, turned, of_columns


def _empty_pair(x: Tensor, gradient: bool, straight: bool, across: bool) -> tuple[Tensor, Tensor]:
    dtype, (rows, columns) = GRADIENTS if gradient else VALUES, x.shape
    sizes = ((rows, columns) if straight else (0, 0), (columns, rows) if across else (0, 0))
    return x.new_empty(sizes[0], dtype=dtype), x.new_empty(sizes[1], dtype=dtype)


@pure_operator("meshwright::fp8_product")
def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a b^T [lines of a, lines of b]. On CUDA, `fast` accumulates with less precision than float32."""
    return _multiply(a, a_scale, b, b_scale, dtype, fast, None)


@shapes_of(product)
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def _multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, out: Tensor | None
) -> Tensor:
    if a.is_meta:
        # A dry run counts the bytes of an accelerator, where no factor is widened.
        return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype) if out is None else out
    by_rows = a_scale.dim() > 0
    if by_rows:
        a_scale, b_scale = a_scale[:, None], b_scale[None, :]
    if not kind_of(a.device).has_scaled_products:
        wide = (a.float() * a_scale) @ (b.t().float() * b_scale)
        return wide.to(dtype) if out is None else out.copy_(wide)
    # Not every GPU's product with row scales can write float32, so the result may have to pass through bf16.
    if by_rows and dtype == torch.float32 and not scaled_rows_are_wide(a.device):
        narrow = torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return narrow.float() if out is None else out.copy_(narrow)
    kwargs = {} if out is None else {"out": out}
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast, **kwargs)


@effectful_operator("meshwright::add_fp8_product_grad")
def add_fp8_product_grad(sink: Tensor, grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor) -> None:
    """Add grad x^T to the gradient sink with this handle; the factors are [out, tokens] and [in, tokens]."""
    sink_of(sink).add_factors(_add_product, grad, grad_scale, x, x_scale)


def _add_product(slot: Sink, grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor) -> None:
    slot.prepare()
    if slot.fresh:
        _multiply(grad, grad_scale, x, x_scale, slot.view.dtype, False, slot.view)
        slot.done()
    else:
        slot.add(_multiply(grad, grad_scale, x, x_scale, slot.view.dtype, False, None))
