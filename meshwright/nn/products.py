"""The three products of a linear layer, y = x W^T and its two gradients, in the precision that `kind` names.

An empty kind multiplies in the tensors' own dtype; "fp8" and "fp8-row" quantise what they multiply first (nn/fp8.py).
All take [tokens, features]; a gradient is prepared once for both products that read it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshwright.nn.weight_grad import add_product_grad

Prepared = Tensor


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return F.linear(x, weight, bias)


def prepare_grad(grad: Tensor, kind: str, for_input: bool, for_weight: bool) -> Prepared:
    return grad


def input_grad(grad: Prepared, weight: Tensor, kind: str) -> Tensor:
    return grad @ weight


def weight_grad(grad: Prepared, x: Tensor, sink: Tensor | None, kind: str) -> Tensor | None:
    """grad^T x: added to the sink, if there is one, and else returned."""
    if sink is None:
        return grad.t() @ x
    add_product_grad(sink, grad.contiguous(), x)
    return None
