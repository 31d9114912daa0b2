"""The layers of a GPT on a grid of tensor-parallel ranks. `layout/grid.py` says who plays which role in a product.

One product serves all kinds of grids: gather what is needed of both factors, multiply, sum and scatter where the
contraction is cut. What was gathered is not kept but gathered again in backward, unless the config says otherwise, so
that a rank keeps its own block of every activation and nothing more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.comm.ops import all_gather, all_reduce_, reduce_scatter
from meshwright.layout.grid import STREAM, Roles
from meshwright.layout.params import ParamRecord
from meshwright.nn.attention import Attention
from meshwright.nn.embedding import TableRows
from meshwright.nn.fused import swiglu, wide
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.nn.weight_grad import add_grad, dense_rows_grad
from meshwright.parts import grid as parts

Side = tuple[str, int]  # the name and the size of a group
NOBODY: Side = ("", 1)


def side_of(parallel: Parallel, axis: str) -> Side:
    if not axis:
        return NOBODY
    group = group_of(parallel, axis)
    return group.name, group.size


def group_of(parallel: Parallel, axis: str) -> Group:
    assert parallel.grid is not None
    return parallel.grid[axis]


def own_rows(x: Tensor, parallel: Parallel, axes: tuple[str, ...]) -> Tensor:
    """Returns the rows of x, which every tp rank holds whole, that these axes (the slowest first) leave to a rank."""
    for axis in axes:
        group = group_of(parallel, axis)
        if not group.alone:
            x = x.chunk(group.size)[group.index]
    return x


class Sides(NamedTuple):
    """The groups over which the tensors of one product travel."""

    x: Side
    joins: bool
    weight: Side
    summed: Side
    keeps: bool = False

    @staticmethod
    def of(parallel: Parallel, roles: Roles, keeps: bool = False) -> Sides:
        gathered, weight, summed = (side_of(parallel, axis) for axis in (roles.gathered, roles.weight, roles.summed))
        return Sides(gathered, roles.joins, weight, summed, keeps)


def gather(x: Tensor, side: Side, again: bool = False) -> Tensor:
    """Returns the rows of all ranks."""
    return x if side[1] == 1 else all_gather(x, *side, again)


def scatter(x: Tensor, side: Side) -> Tensor:
    """Returns this rank's rows of the sum of all ranks' tensors."""
    return x if side[1] == 1 else reduce_scatter(x, *side)


def bring(x: Tensor, sides: Sides, again: bool = False) -> Tensor:
    """Returns x as the product takes it: with its features joined, or with the rows of all."""
    full = gather(x, sides.x, again)
    if not sides.joins or sides.x[1] == 1:
        return full
    return full.view(sides.x[1], *x.shape).transpose(0, 1).reshape(x.shape[0], -1)


def send_back(x: Tensor, sides: Sides) -> Tensor:
    """Returns this rank's block of the sum of all ranks' x: the reverse of `bring`, for its gradient."""
    if sides.joins and sides.x[1] > 1:
        x = x.view(x.shape[0], sides.x[1], -1).transpose(0, 1).reshape(x.shape[0] * sides.x[1], -1)
    return scatter(x, sides.x)


def give(grad: Tensor, sink: Tensor | None) -> Tensor | None:
    """Adds a weight gradient to the sink and returns None, or returns it for autograd where there is no sink."""
    if sink is None:
        return grad
    add_grad(sink, grad)
    return None


class _Product(torch.autograd.Function):
    """y = x W^T + b with its collectives; every rank adds its block of the bias to its block of y, once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Tensor | None, sides: Sides
    ) -> Tensor:
        full, whole = bring(x, sides), gather(weight, sides.weight)
        # The sink changes between this forward and its backward, so it is no saved tensor (see nn/linear.py).
        ctx.sink, ctx.sides = sink, sides
        ctx.save_for_backward(*((full, whole) if sides.keeps else (x, weight)))
        y = scatter(F.linear(full, whole), sides.summed)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), sides = ctx.saved_tensors, ctx.sides
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_y = gather(grad, sides.summed)
        grad_x = grad_weight = None
        if needs_x:
            whole = weight if sides.keeps else gather(weight, sides.weight, again=True)
            grad_x = send_back(grad_y @ whole, sides)
            del whole
        if needs_weight:
            full = x if sides.keeps else bring(x, sides, again=True)
            grad_weight = give(scatter(grad_y.t() @ full, sides.weight), ctx.sink)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None, None


class GridLinear(nn.Module):
    """A product and its bias on a grid, with the interface of `Linear` that attention and the MLP use."""

    def __init__(
        self, parallel: Parallel, weight: ParamRecord, bias: ParamRecord | None, roles: Roles, keeps: bool = False
    ) -> None:
        super().__init__()
        self.weight = parallel.parameter(weight)
        self.bias = parallel.parameter(bias) if bias is not None else None
        self.sinks: dict[str, Tensor] = {}
        self.roles, self.sides = roles, Sides.of(parallel, roles, keeps)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias, self.sinks.get("weight"), self.sides)

    def after_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return x, self(norm(x))

    def after_swiglu(self, x: Tensor) -> Tensor:
        return self(swiglu(x))


class _Norm(torch.autograd.Function):
    """A norm over the features of all ranks of the group, `width` in all. Layer norm: the ranks' means and sums of
    squared differences are combined, which is as exact as one pass over whole rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, centred: bool, eps: float, width: int, side: Side
    ) -> Tensor:
        values, own = wide(x), x.shape[1]
        if centred:
            mean = values.mean(1)
            squares = (values - mean[:, None]).square().sum(1)
            both = gather(torch.stack((mean, squares))[None], side)  # [ranks, 2, rows]
            means, total = both[:, 0], both[:, 0].mean(0)
            variance = (both[:, 1].sum(0) + own * (means - total).square().sum(0)) / width
        else:
            total, variance = None, values.square().sum(1)
            if side[1] > 1:
                all_reduce_(variance, side[0], "sum")
            variance = variance / width
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, scale, total)
        ctx.width, ctx.side = width, side
        normed = _normed(values, scale, total) * wide(weight)
        return (normed if bias is None else normed + wide(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, total = ctx.saved_tensors
        normed, given = _normed(wide(x), scale, total), wide(grad)
        scaled = given * wide(weight)
        sums = [(scaled * normed).sum(1)] + ([] if total is None else [scaled.sum(1)])
        means = torch.stack(sums)
        if ctx.side[1] > 1:
            all_reduce_(means, ctx.side[0], "sum")
        means = means / ctx.width
        inside = scaled - normed * means[0][:, None] - (0.0 if total is None else means[1][:, None])
        grad_bias = given.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        grad_weight = (given * normed).sum(0).to(weight.dtype)
        return (inside * scale[:, None]).to(x.dtype), grad_weight, grad_bias, *([None] * 4)


def _normed(values: Tensor, scale: Tensor, mean: Tensor | None) -> Tensor:
    return (values if mean is None else values - mean[:, None]) * scale[:, None]


class GridNorm(Norm):
    """A layer norm or RMS norm of rows whose features are cut."""

    def __init__(self, parallel: Parallel, part: parts.GridNormPart, records: dict[str, ParamRecord]) -> None:
        super().__init__(parallel, part.part, records)
        self.fuses, self.width, self.side = False, part.part.width, side_of(parallel, STREAM.features)

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.bias, self.kind == "layernorm", self.eps, self.width, self.side)


class _Projection(nn.Module):
    """The projection to queries, keys and values."""

    def __init__(self, qkv: GridLinear) -> None:
        super().__init__()
        self.qkv = qkv

    def forward(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self.qkv.after_norm(x, norm)


class GridAttention(Attention):
    """Self-attention of a rank's heads and sequences."""

    def __init__(self, parallel: Parallel, part: parts.GridAttentionPart, records: dict[str, ParamRecord]) -> None:
        self.grid = part.grid
        heads = replace(parallel, tp=group_of(parallel, part.grid.inner.features), fused=False)
        super().__init__(heads, part.part, records)

    def products(self, parallel: Parallel, records: dict[str, ParamRecord]) -> tuple[nn.Module, nn.Module]:
        grid = self.grid
        qkv = GridLinear(parallel, records["qkv.weight"], records.get("qkv.bias"), grid.first, grid.keeps)
        out = GridLinear(parallel, records["out.weight"], records.get("out.bias"), grid.second, grid.keeps)
        return _Projection(qkv), out


class GridMLP(MLP):
    """The MLP of a rank's inner features and rows."""

    def __init__(self, parallel: Parallel, part: parts.GridMLPPart, records: dict[str, ParamRecord]) -> None:
        self.grid = part.grid
        super().__init__(parallel, part.part, records)

    def products(self, parallel: Parallel, first: str, records: dict[str, ParamRecord]) -> tuple[Any, Any]:
        grid = self.grid
        up = GridLinear(parallel, records[f"{first}.weight"], records.get(f"{first}.bias"), grid.first, grid.keeps)
        return up, GridLinear(parallel, records["down.weight"], records.get("down.bias"), grid.second, grid.keeps)


class _Lookup(torch.autograd.Function):
    """Looks up rows of a cut table: the product of the output layer, turned round. A negative row is one of another
    part of the vocabulary, and gives zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, sink: Tensor | None, sides: Sides) -> Tensor:
        table = gather(weight, sides.weight)
        ctx.save_for_backward(rows)
        ctx.sink, ctx.sides, ctx.size = sink, sides, table.shape[0]
        found = table[rows.clamp(min=0)].masked_fill_((rows < 0)[:, None], 0.0)
        return send_back(found, sides)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        whole = dense_rows_grad(bring(grad, ctx.sides), rows, ctx.size)
        return give(scatter(whole, ctx.sides.weight), ctx.sink), None, None, None


class GridTokens(nn.Module):
    """Maps the ids of all tokens of a micro-batch to this rank's block of their activations."""

    def __init__(self, parallel: Parallel, part: parts.GridTokensPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.parallel, self.roles = parallel, part.grid.first
        self.sides = Sides.of(parallel, self.roles)
        self.size = self.weight.shape[0] * self.sides.weight[1]
        self.first = group_of(parallel, self.roles.y.features).index * self.size

    def forward(self, ids: Tensor) -> Tensor:
        rows = own_rows(ids, self.parallel, self.roles.rows) - self.first
        rows = torch.where((rows >= 0) & (rows < self.size), rows, -1)
        return _Lookup.apply(self.weight, rows, self.sinks.get("weight"), self.sides)


class GridPositions(nn.Module):
    """A table of learned positions, of this rank's features, looked up for its rows."""

    def __init__(self, parallel: Parallel, part: parts.GridPositionsPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])
        self.sinks: dict[str, Tensor] = {}
        self.parallel, self.offset = parallel, part.part.offset

    def forward(self, positions: Tensor) -> Tensor:
        rows = own_rows(positions, self.parallel, STREAM.rows) + self.offset
        return TableRows.apply(self.weight, rows, False, self.sinks.get("weight"))
