"""The three products of a linear layer, y = x W^T and its two gradients, in the precision that `kind` names.

An empty kind multiplies in the tensors' own dtype; "fp8" and "fp8-row" quantise both factors first (nn/fp8.py), where
the sizes allow it. All take [tokens, features]; a gradient is prepared once for both products that read it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshwright.nn import fp8
from meshwright.nn.weight_grad import add_product_grad

Prepared = tuple[Tensor, fp8.Pair | None]


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if not _in_fp8(kind, x, weight):
        return F.linear(x, weight, bias)
    a, b = (fp8.quantise(part, kind, fp8.VALUES).straight for part in (x, weight))
    y = fp8.product(*a, *b, dtype=x.dtype, fast=True)
    return y if bias is None else y + bias


def prepare_grad(grad: Tensor, weight: Tensor, kind: str, for_input: bool = True, for_weight: bool = True) -> Prepared:
    """Prepares a gradient [tokens, out] for the two functions below: quantises it once for both."""
    if not _in_fp8(kind, grad, weight):
        return grad, None
    return grad, fp8.quantise(grad, kind, fp8.GRADIENTS, straight=for_input, across=for_weight)


def input_grad(grad: Prepared, weight: Tensor, kind: str) -> Tensor:
    plain, quantised = grad
    if quantised is None:
        return plain @ weight
    across = fp8.quantise(weight, kind, fp8.VALUES, straight=False, across=True).across
    return fp8.product(*quantised.straight, *across, dtype=plain.dtype, fast=False)


def weight_grad(grad: Prepared, x: Tensor, sink: Tensor | None, kind: str) -> Tensor | None:
    """Adds grad^T x to the sink and returns None; without a sink, returns it."""
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


def _in_fp8(kind: str, x: Tensor, weight: Tensor) -> bool:
    return kind != "" and fp8.sizes_fit_fp8(x.shape[0], *weight.shape)
