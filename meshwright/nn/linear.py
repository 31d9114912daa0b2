"""Linear layers, written once for every tensor-parallel layout, on activations of shape [tokens, features].

`column` cuts the output features over tp, `row` the input features. With sequence parallelism a column layer gathers
its input's tokens and a row layer scatters its output's; the gathered input is not kept but gathered again in backward.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.ops import all_gather, all_reduce_, reduce_scatter
from meshwright.layout.params import ParamRecord
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import add_product_grad

Cut = Literal["column", "row"]


class _Product(torch.autograd.Function):
    """y = x W^T with its collectives. `mode` says what happens to the tokens and where the sum is taken:

    plain; column: sum of the input gradient; row: sum of the output; gather: tokens gathered before; scatter: tokens
    scattered after.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor | None, mode: str, group: str, size: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink  # not saved: it changes under way, as it should
        ctx.mode, ctx.group, ctx.size, ctx.has_bias = mode, group, size, bias is not None
        full = all_gather(x, group, size) if mode == "gather" else x
        y = F.linear(full, weight, bias)
        if mode == "row":
            all_reduce_(y, group, "sum")
        elif mode == "scatter":
            y = reduce_scatter(y, group, size)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sink = ctx.sink
        mode, group, size = ctx.mode, ctx.group, ctx.size
        if mode == "scatter":
            grad = all_gather(grad, group, size)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            if mode == "column":
                all_reduce_(grad_x, group, "sum")
            elif mode == "gather":
                grad_x = reduce_scatter(grad_x, group, size)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            full = all_gather(x, group, size, again=True) if mode == "gather" else x
            if sink is None:
                grad_weight = grad.t() @ full
            else:
                add_product_grad(sink, grad.contiguous(), full)
        grad_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


class Linear(nn.Module):
    """A product and its bias. A row layer's bias is added after the sum, by every rank to its own tokens."""

    def __init__(self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None, cut: Cut) -> None:
        super().__init__()
        self.weight = parallel.parameter(weight)
        self.bias = parallel.parameter(bias) if bias is not None else None
        self.sinks: dict[str, Tensor] = {}
        self.mode = product_mode(parallel, cut)
        self.group, self.size = parallel.tp.name, parallel.tp.size

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bias if self.mode in ("plain", "column", "gather") else None
        y = product(x, self.weight, inside, self.sinks.get("weight"), self.mode, self.group, self.size)
        return y if inside is self.bias else y + self.bias


def product_mode(parallel: Parallel, cut: Cut) -> str:
    if parallel.tp.alone:
        return "plain"
    if parallel.splits_tokens:
        return "gather" if cut == "column" else "scatter"
    return cut


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor | None, mode: str, group: str, size: int
) -> Tensor:
    return _Product.apply(x, weight, bias, sink, mode, group, size)
