"""The layers of a GPT on a grid of tensor-parallel ranks. `spec/layout/grid.py` defines the role of each axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.nn.attention.attention import Attention
from meshwright.nn.embedding import TableRows
from meshwright.nn.grid.products import GridLinear
from meshwright.nn.grid.sides import (
    Sides,
    gather,
    gather_input,
    group_of,
    own_rows,
    scatter,
    scatter_input_grad,
    side_of,
)
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import dense_rows_grad, give_grad
from meshwright.spec.layout.grid import STREAM
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model import grid as parts


class _Projection(nn.Module):
    """The projection to queries, keys and values, with the interface of `QKV`."""

    def __init__(self, qkv: GridLinear) -> None:
        super().__init__()
        self.qkv = qkv

    def forward(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self.qkv.after_norm(x, norm)


class GridAttention(Attention):
    """Self-attention of this rank's heads and sequences."""

    def __init__(self, parallel: Parallel, part: parts.GridAttentionPart, records: dict[str, ParamRecord]) -> None:
        self.grid = part.grid
        # Heads are divided along one axis of the grid, which plays the part of tp in `Attention`.
        heads = replace(parallel, tp=group_of(parallel, part.grid.inner.features))
        super().__init__(heads, part.part, records)

    def products(self, parallel: Parallel, records: dict[str, ParamRecord]) -> tuple[nn.Module, nn.Module]:
        grid = self.grid
        qkv = GridLinear(parallel, records["qkv.weight"], records.get("qkv.bias"), grid.first, grid.keeps)
        out = GridLinear(parallel, records["out.weight"], records.get("out.bias"), grid.second, grid.keeps)
        return _Projection(qkv), out


class GridMLP(MLP):
    """The MLP of this rank's inner features and rows."""

    def __init__(self, parallel: Parallel, part: parts.GridMLPPart, records: dict[str, ParamRecord]) -> None:
        self.grid = part.grid
        super().__init__(parallel, part.part, records)

    def products(self, parallel: Parallel, first: str, records: dict[str, ParamRecord]) -> tuple[Any, Any]:
        grid = self.grid
        up = GridLinear(parallel, records[f"{first}.weight"], records.get(f"{first}.bias"), grid.first, grid.keeps)
        return up, GridLinear(parallel, records["down.weight"], records.get("down.bias"), grid.second, grid.keeps)


class _Lookup(torch.autograd.Function):
    """Looks up rows of a sharded table, with the collectives of the output layer's product in reverse.

    A negative row belongs to another part of the vocabulary, and gives zeros.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, sink: Tensor | None, sides: Sides) -> Tensor:
        table = gather(weight, sides.weight)
        ctx.save_for_backward(rows)
        ctx.sink = sink
        ctx.sides = sides
        ctx.size = table.shape[0]
        found = table[rows.clamp(min=0)].masked_fill_((rows < 0)[:, None], 0.0)
        return scatter_input_grad(found, sides)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        whole = dense_rows_grad(gather_input(grad, ctx.sides), rows, ctx.size)
        return give_grad(scatter(whole, ctx.sides.weight), ctx.sink), None, None, None


class GridTokens(nn.Module):
    """The token embedding: maps the ids of all tokens of a micro-batch to this rank's block of their activations."""

    def __init__(self, parallel: Parallel, part: parts.GridTokensPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.parallel, self.roles = parallel, part.grid.first
        self.dropout, self.grad_share = part.part.dropout, part.part.grad_share
        self.sides = Sides.of(parallel, self.roles)
        self.size = self.weight.shape[0] * side_of(parallel, self.roles.weight)[1]
        self.first = group_of(parallel, self.roles.y.features).index * self.size

    def forward(self, ids: Tensor) -> Tensor:
        rows = own_rows(ids, self.parallel, self.roles.rows) - self.first
        rows = torch.where((rows >= 0) & (rows < self.size), rows, -1)
        return _Lookup.apply(self.weight, rows, self.sinks.get("weight"), self.sides)


class GridPositions(nn.Module):
    """Learned positions: this rank's features of the table, looked up for its rows."""

    def __init__(self, parallel: Parallel, part: parts.GridPositionsPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.parallel, self.offset = parallel, part.part.offset

    def forward(self, positions: Tensor) -> Tensor:
        rows = own_rows(positions, self.parallel, STREAM.rows) + self.offset
        return TableRows.apply(self.weight, rows, False, self.sinks.get("weight"))
