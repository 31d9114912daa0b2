"""Collectives for use inside a layer: registered operators, and differentiable functions built on them.

torch.compile can't trace a Python side effect (the ledger) inside an autograd function. It can call a registered
operator, whose Python runs every time. The operators work on dim 0: activations are [tokens, hidden], and a shard of
the tokens is a contiguous range of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.group import Group, group_named
from meshwright.comm.registered import operator, shapes_of


def _rows_like(x: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


@operator("meshwright::all_reduce_", mutates={"x"})
def all_reduce_(x: Tensor, group: str, op: str) -> None:
    group_named(group).all_reduce(x, op)


@operator("meshwright::all_gather")
def all_gather(x: Tensor, group: str, size: int, again: bool = False) -> Tensor:
    """Gather the rows of all ranks.

    `again` marks the second gather of a tensor, in backward. Without it the compiler would merge the two equal calls
    into one and save the result for backward, which is the memory that gathering again avoids.
    """
    out = _rows_like(x, x.shape[0] * size)
    group_named(group).all_gather(out, x.contiguous())
    return out


@shapes_of(all_gather)
def _(x: Tensor, group: str, size: int, again: bool = False) -> Tensor:
    return _rows_like(x, x.shape[0] * size)


@operator("meshwright::reduce_scatter")
def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    out = _rows_like(x, x.shape[0] // size)
    group_named(group).reduce_scatter(out, x.contiguous())
    return out


@shapes_of(reduce_scatter)
def _(x: Tensor, group: str, size: int) -> Tensor:
    return _rows_like(x, x.shape[0] // size)


@operator("meshwright::all_to_all")
def _all_to_all(x: Tensor, group: str, sends: list[int], receives: list[int]) -> Tensor:
    out = _rows_like(x, sum(receives))
    group_named(group).all_to_all(out, x.contiguous(), sends=sends, receives=receives)
    return out


@shapes_of(_all_to_all)
def _(x: Tensor, group: str, sends: list[int], receives: list[int]) -> Tensor:
    return _rows_like(x, sum(receives))


class _Exchange(torch.autograd.Function):
    """An all_to_all of rows. Backward sends the gradient of each row back to the rank that the row came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, sends: list[int], receives: list[int]) -> Tensor:
        ctx.settings = (group, receives, sends)
        out: Tensor = _all_to_all(x, group, sends, receives)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, *ctx.settings), None, None, None


def all_to_all(x: Tensor, group: str, sends: list[int], receives: list[int]) -> Tensor:
    """Send `sends[n]` rows of x to place n of the group, and receive `receives[n]` rows from there."""
    out: Tensor = _Exchange.apply(x, group, sends, receives)  # type: ignore[no-untyped-call]
    return out


class _ReduceFrom(torch.autograd.Function):
    """All-reduce in forward, identity in backward: every rank uses the sum in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, group, "sum")
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """Reduce-scatter in forward, all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        out: Tensor = reduce_scatter(x, group, size)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.size), None, None


class _CopyTo(torch.autograd.Function):
    """Identity in forward, all-reduce in backward: each rank uses the same tensor in a different way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        # An autograd function must not return its input itself.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, ctx.group, "sum")
        return total, None


class _GatherFrom(torch.autograd.Function):
    """All-gather in forward, reduce-scatter in backward: each rank uses the gathered rows in a different way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        out: Tensor = all_gather(x, group, size)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.size), None, None


class _GatherRows(torch.autograd.Function):
    """All-gather in forward, slice in backward: all ranks use the gathered rows in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, index: int) -> Tensor:
        ctx.rows = slice(index * x.shape[0], (index + 1) * x.shape[0])
        out: Tensor = all_gather(x, group, size)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.rows].contiguous(), None, None, None


class _SliceRows(torch.autograd.Function):
    """Slice in forward, all-gather in backward: each rank continues with its rows of a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, index: int) -> Tensor:
        ctx.group, ctx.size = group, size
        rows = x.shape[0] // size
        return x[index * rows : (index + 1) * rows].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(grad, ctx.group, ctx.size), None, None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Return x, a replicated tensor that each rank uses in a different way. Backward all-reduces the gradient."""
    return x if group.alone else _CopyTo.apply(x, group.name)  # type: ignore[no-untyped-call]


def gather_from(x: Tensor, group: Group) -> Tensor:
    """Return the rows of all ranks, which each rank uses in a different way. Backward reduce-scatters the gradient."""
    return x if group.alone else _GatherFrom.apply(x, group.name, group.size)  # type: ignore[no-untyped-call]


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Return the rows of all ranks, which all ranks use in the same way. Backward takes this rank's rows of the
    gradient and communicates nothing."""
    place = (group.name, group.size, group.index)
    return x if group.alone else _GatherRows.apply(x, *place)  # type: ignore[no-untyped-call]


def slice_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of a replicated tensor. Backward all-gathers the gradient."""
    place = (group.name, group.size, group.index)
    return x if group.alone else _SliceRows.apply(x, *place)  # type: ignore[no-untyped-call]


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Return the sum of all ranks' tensors. Its gradient is the same on all ranks, so backward communicates nothing."""
    return x if group.alone else _ReduceFrom.apply(x, group.name)  # type: ignore[no-untyped-call]


def reduce_scatter_from(x: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the sum of all ranks' tensors. Backward all-gathers the gradient."""
    return x if group.alone else _ReduceScatter.apply(x, group.name, group.size)  # type: ignore[no-untyped-call]


def last_dim(call: Callable[[Tensor, Group], Tensor], x: Tensor, group: Group) -> Tensor:
    """Apply one of these functions, which work on rows (the first dimension), to the last dimension."""
    return call(x.movedim(-1, 0).contiguous(), group).movedim(0, -1).contiguous()
