"""Collectives inside a layer, as registered operators, and their autograd pairs.

torch.compile can't trace a Python side effect (the ledger) inside an autograd function, but it can call a registered
operator, whose Python runs every time. The operators work on dim 0: activations are [tokens, hidden], and a part of the
tokens is a run of rows. The pairs, each other's backward: copy_to and reduce_from, gather_from and scatter_to,
all_gather_from and reduce_scatter_from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, custom_op

from meshwright.comm.group import Group, group_named

# The Python of every operator that does more than its result shows, by name: a dry run calls it, since torch would only
# ask for shapes.
BODIES: dict[str, Callable[..., Any]] = {}


def operator(name: str, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Registers a function with a side effect."""

    def register(body: Callable[..., Any]) -> CustomOpDef:
        BODIES[name] = body
        return custom_op(name, body, mutates_args=tuple(mutates))

    return register


@operator("meshwright::all_reduce_", mutates={"x"})
def all_reduce_(x: Tensor, group: str, op: str) -> None:
    group_named(group).all_reduce(x, op)


@all_reduce_.register_fake
def _(x: Tensor, group: str, op: str) -> None:
    return None


@operator("meshwright::all_gather")
def all_gather(x: Tensor, group: str, size: int, again: bool = False) -> Tensor:
    """`again` marks a second gather of a tensor in backward: without it a compiler sees the same call twice, makes it
    once and keeps the result, which gathering again is there to avoid."""
    out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
    group_named(group).all_gather(out, x.contiguous())
    return out


@all_gather.register_fake
def _(x: Tensor, group: str, size: int, again: bool = False) -> Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


@operator("meshwright::reduce_scatter")
def reduce_scatter(x: Tensor, group: str, size: int) -> Tensor:
    out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    group_named(group).reduce_scatter(out, x.contiguous())
    return out


@reduce_scatter.register_fake
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


class _CopyTo(torch.autograd.Function):
    """Every rank uses the same tensor: the gradient is the sum of what each found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, ctx.group, "sum")
        return total, None


class _ReduceFrom(torch.autograd.Function):
    """The sum of all ranks' tensors, which every rank then uses alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce_(total, group, "sum")
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    """Each rank's rows of the sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return reduce_scatter(x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.size), None, None


class _AllGather(torch.autograd.Function):
    """All ranks' rows, of which each rank then uses its own way: the gradient is the sum of what each found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return all_gather(x, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.group, ctx.size), None, None


def _part(x: Tensor, dim: int, index: int, size: int) -> Tensor:
    return x.chunk(size, dim)[index].contiguous()


def _whole(x: Tensor, dim: int, group: str, size: int) -> Tensor:
    return torch.cat(all_gather(x.contiguous(), group, size).chunk(size), dim) if dim else all_gather(x, group, size)


class _Gather(torch.autograd.Function):
    """All ranks' parts along `dim`, which every rank then uses alike: the gradient is this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, index: int, size: int) -> Tensor:
        ctx.where = (dim, index, size)
        return _whole(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _part(grad, *ctx.where), None, None, None, None


class _Scatter(torch.autograd.Function):
    """This rank's part along `dim` of what every rank holds alike: the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str, index: int, size: int) -> Tensor:
        ctx.where = (dim, group, size)
        return _part(x, dim, index, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _whole(grad, *ctx.where), None, None, None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Into a region where each rank does a part of the work on the same tensor."""
    return x if group.alone else _CopyTo.apply(x, group.name)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """Out of it: the sum."""
    return x if group.alone else _ReduceFrom.apply(x, group.name)


def reduce_scatter_from(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of the sum."""
    return x if group.alone else _ReduceScatter.apply(x, group.name, group.size)


def all_gather_from(x: Tensor, group: Group) -> Tensor:
    """All rows, for ranks that each do a part of the work on them."""
    return x if group.alone else _AllGather.apply(x, group.name, group.size)


def gather_from(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """The whole of a tensor that is cut along `dim`."""
    return x if group.alone else _Gather.apply(x, dim, group.name, group.index, group.size)


def scatter_to(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's part along `dim`."""
    return x if group.alone else _Scatter.apply(x, dim, group.name, group.index, group.size)
