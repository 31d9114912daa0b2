"""The three products of a linear layer, y = x W^T and its two gradients, in the precision that `kind` names.

An empty kind multiplies in the dtype of the tensors. "fp8" and "fp8-row" quantise both factors first (nn/fp8.py), if
the sizes allow it. All functions take [tokens, features]. The output's gradient is prepared once for the two products
that read it. On grids of ranks a factor may be a stack of blocks of columns, in the form that collectives gather and
scatter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.registered import pure_operator, shapes_of
from meshwright.nn import fp8
from meshwright.nn.weight_grad import add_product_grad

# A gradient [tokens, out], and its fp8 form if it has one.
Prepared = tuple[Tensor, fp8.QuantisedPair | None]


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if not kind or not _in_fp8(x, weight):
        return F.linear(x, weight, bias)
    a, b = (fp8.quantise(part, kind, fp8.VALUES).straight for part in (x, weight))
    y = fp8.product(*a, *b, dtype=x.dtype, fast=True)
    return y if bias is None else y + bias


def prepare_grad(grad: Tensor, weight: Tensor, kind: str, for_input: bool = True, for_weight: bool = True) -> Prepared:
    """Prepare a gradient [tokens, out] for the two functions below, which then need not quantise it twice."""
    if not kind or not _in_fp8(grad, weight):
        return grad, None
    return grad, fp8.quantise(grad, kind, fp8.GRADIENTS, straight=for_input, across=for_weight)


def input_grad(grad: Prepared, weight: Tensor, kind: str) -> Tensor:
    plain, quantised = grad
    if quantised is None:
        return plain @ weight
    across = fp8.quantise(weight, kind, fp8.VALUES, straight=False, across=True).across
    return fp8.product(*quantised.straight, *across, dtype=plain.dtype, fast=False)


def weight_grad(grad: Prepared, x: Tensor, sink: Tensor | None, kind: str) -> Tensor | None:
    """Add grad^T x to the sink and return None, or return it if there is no sink."""
    plain, quantised = grad
    if quantised is None:
        if sink is None:
            return plain.t() @ x
        add_product_grad(sink, plain.contiguous(), x)
        return None
    across = fp8.quantise(x, kind, fp8.VALUES, straight=False, across=True).across
    if sink is None:
        return fp8.product(*quantised.across, *across, dtype=x.dtype, fast=False)
    fp8.add_fp8_product_grad(sink, *quantised.across, *across)
    return None


def _in_fp8(x: Tensor, weight: Tensor) -> bool:
    return fp8.sizes_fit_fp8(x.shape[0], *weight.shape)


@pure_operator("meshwright::product_in_blocks")
def product_in_blocks(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Return x @ weight with its blocks of columns stacked below each other, [parts * rows, columns / parts].

    A reduce-scatter over the rows then gives each rank its block of columns.
    """
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
    """Return grad^T x. `blocks` is x with its blocks of columns stacked below each other, as an all-gather yields."""
    out = grad.new_empty((grad.shape[1], parts * blocks.shape[1]))
    for columns, block in zip(out.chunk(parts, 1), blocks.chunk(parts), strict=True):
        torch.mm(grad.t(), block, out=columns)
    return out


@shapes_of(weight_grad_of_blocks)
def _(grad: Tensor, blocks: Tensor, parts: int) -> Tensor:
    return grad.new_empty((grad.shape[1], parts * blocks.shape[1]))
