"""Embeddings: tokens, sharded over tp by rows of the vocabulary, and learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.ops import reduce_from, reduce_scatter_from
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import add_rows_grad, dense_rows_grad
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model import bert, gpt


class TableRows(torch.autograd.Function):
    """Looks up weight[rows]. A negative row is held by another rank, and gives zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, cut: bool, sink: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.sink, ctx.size = sink, weight.shape[0]
        if not cut:
            return weight[rows]
        return weight[rows.clamp(min=0)].masked_fill_((rows < 0)[:, None], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (rows,) = ctx.saved_tensors
        if ctx.sink is None:
            return dense_rows_grad(grad, rows, ctx.size), None, None, None
        add_rows_grad(ctx.sink, grad.contiguous(), rows)
        return None, None, None, None


class ScaledGrad(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.share, None


class TokenEmbedding(nn.Module):
    """Maps ids [tokens] to activations [tokens, hidden], or to this rank's rows of them under sequence parallelism."""

    def __init__(self, parallel: Parallel, part: gpt.TokenEmbeddingPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.parallel, self.dropout, self.grad_share = parallel, part.dropout, part.grad_share
        self.first = parallel.tp.index * self.weight.shape[0] if not parallel.tp.alone else 0

    def forward(self, ids: Tensor) -> Tensor:
        tp = self.parallel.tp
        sink = self.sinks.get("weight")
        if tp.alone:
            return TableRows.apply(self.weight, ids, False, sink)
        rows = ids - self.first
        inside = (rows >= 0) & (rows < self.weight.shape[0])
        part = TableRows.apply(self.weight, torch.where(inside, rows, -1), True, sink)
        return reduce_scatter_from(part, tp) if self.parallel.splits_tokens else reduce_from(part, tp)


class PositionEmbedding(nn.Module):
    """A table of learned positions or of token types. Every tp rank holds all of it, and looks up its own tokens. The
    first position is row `offset` of the table."""

    def __init__(
        self, parallel: Parallel, part: gpt.PositionEmbeddingPart | bert.TokenTypePart, records: dict[str, ParamRecord]
    ) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.offset = part.offset if isinstance(part, gpt.PositionEmbeddingPart) else 0

    def forward(self, positions: Tensor) -> Tensor:
        return TableRows.apply(self.weight, positions + self.offset, False, self.sinks.get("weight"))
