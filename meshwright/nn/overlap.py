"""Linear layers that communicate over tp while they multiply (`comm.overlap.tensor`).

With sequence parallelism each rank has a piece of the rows. A column product multiplies its own piece first and the
others as they arrive; a row product multiplies the pieces of other ranks first and sends each of them while it goes on.
Pieces go straight to the rank that needs them, one call for each distance round the group, so the bytes are the same as
those of the collectives. Several pieces that have arrived are multiplied at once, since small products are slow.
Without sequence parallelism a row product is summed in pieces of its rows. In backward the input gradient travels while
the weight gradient is multiplied. Each function is one registered operator, whose results have arrived when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from meshwright.comm.group import Group, Shift, group_named
from meshwright.comm.registered import operator, shapes_of
from meshwright.nn.weight_grad import add_factors
from meshwright.parts.gpt import TP_PIECES, summed_pieces


def runs(size: int) -> list[range]:
    """Returns the distances of a group's ranks, 0 for this rank itself, in the runs that are multiplied at once."""
    count = min(size - 1, TP_PIECES - 1)
    cuts = [1 + (size - 1) * number // count for number in range(count + 1)]
    return [range(1), *(range(low, high) for low, high in pairwise(cuts))]


def spans(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the places as (first, one behind the last) of neighbours: round the end of a group these are two."""
    begin = end = -1
    for place in sorted(places):
        if place != end and end >= 0:
            yield begin, end
        begin, end = (begin if place == end else place), place + 1
    yield begin, end


def multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> None:
    """Sets `out` to x W^T, or to x W where the weight is `turned`."""
    right = weight if turned else weight.t()
    if bias is None:
        torch.mm(x, right, out=out)
    else:
        torch.addmm(bias, x, right, out=out)


def begin_gather(group: Group, x: Tensor) -> tuple[Tensor, list[Shift]]:
    """Begins to gather the rows of all ranks, by distance. Returns where they arrive, with this rank's own."""
    rows, x = x.shape[0], x.contiguous()
    full = x.new_empty((rows * group.size, *x.shape[1:]))
    pieces = full.view(group.size, rows, *x.shape[1:])
    pieces[group.index].copy_(x)
    return full, [group.shift(x, by, pieces[(group.index - by) % group.size]) for by in range(1, group.size)]


def begin_scatter(
    group: Group, x: Tensor, width: int, product: Callable[[Tensor, Tensor], None]
) -> tuple[Tensor, list[Shift]]:
    """Multiplies the rows for each rank of the group and sends them there, and those for this rank last. Returns the
    latter, and what is to be added to them when it arrives."""
    size, rows = group.size, x.shape[0] // group.size
    others, own, shifts = x.new_empty((x.shape[0], width)), x.new_empty((rows, width)), []
    for run in reversed(runs(size)[1:]):
        for low, high in spans((group.index + by) % size for by in run):
            at = slice(low * rows, high * rows)
            product(others[at], x[at])
        shifts += [group.shift(others.view(size, rows, width)[(group.index + by) % size], by) for by in run]
    product(own, x[group.index * rows : (group.index + 1) * rows])
    return own, shifts


def finish_scatter(own: Tensor, shifts: list[Shift]) -> Tensor:
    for shift in shifts:
        own.add_(shift.arrived())
    return own


@operator("meshwright::gather_in_pieces")
def gather_in_pieces(x: Tensor, group: str, size: int) -> Tensor:
    """The rows of all ranks, by the calls that `gather_product` makes."""
    full, shifts = begin_gather(group_named(group), x)
    for shift in shifts:
        shift.arrived()
    return full


@shapes_of(gather_in_pieces)
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


@operator("meshwright::gather_product")
def gather_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, group: str, size: int
) -> tuple[Tensor, Tensor]:
    """Returns the product (see `multiply`) of the rows of all ranks, and these rows."""
    at, rows = group_named(group), x.shape[0]
    full, shifts = begin_gather(at, x)
    y = x.new_empty((full.shape[0], weight.shape[1 if turned else 0]))
    for run in runs(size):
        for by in run:
            if by:
                shifts[by - 1].arrived()
        for low, high in spans((at.index - by) % size for by in run):
            these = slice(low * rows, high * rows)
            multiply(y[these], full[these], weight, bias, turned)
    return y, full


@shapes_of(gather_product)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, group: str, size: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = x.shape[0] * size
    return x.new_empty((rows, weight.shape[1 if turned else 0])), x.new_empty((rows, *x.shape[1:]))


@operator("meshwright::product_scatter")
def product_scatter(x: Tensor, weight: Tensor, turned: bool, group: str, size: int) -> Tensor:
    """Returns this rank's rows of the sum of all ranks' products (see `multiply`)."""
    width = weight.shape[1 if turned else 0]
    begun = begin_scatter(group_named(group), x, width, lambda out, rows: multiply(out, rows, weight, None, turned))
    return finish_scatter(*begun)


@shapes_of(product_scatter)
def _(x: Tensor, weight: Tensor, turned: bool, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, weight.shape[1 if turned else 0]))


@operator("meshwright::product_sum")
def product_sum(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """Returns the sum of all ranks' x W^T; pieces of its rows are summed while the next ones are multiplied."""
    at, y = group_named(group), x.new_empty((x.shape[0], weight.shape[0]))
    pendings = []
    for rows, out in zip(x.chunk(summed_pieces(x.shape[0])), y.chunk(summed_pieces(x.shape[0])), strict=True):
        multiply(out, rows, weight, None, False)
        pendings.append(at.all_reduce(out, wait=False))
    for pending in pendings:
        pending.wait()
    return y


@shapes_of(product_sum)
def _(x: Tensor, weight: Tensor, group: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@operator("meshwright::column_backward", mutates={"sink"})
def column_backward(grad: Tensor, weight: Tensor, x: Tensor, sink: Tensor, group: str, scatters: bool) -> Tensor:
    """Returns the gradient of a column product's input, summed over the ranks, and adds the weight's to the sink while
    that sum travels. `scatters`: x has this rank's rows alone, as the returned gradient will."""
    at, grad = group_named(group), grad.contiguous()
    width = weight.shape[1]
    if not scatters:
        grad_x = grad.new_empty((grad.shape[0], width))
        multiply(grad_x, grad, weight, None, True)
        pending = at.all_reduce(grad_x, wait=False)
        add_factors(sink, grad, x)
        pending.wait()
        return grad_x
    full, arriving = begin_gather(at, x)
    own, shifts = begin_scatter(at, grad, width, lambda out, rows: multiply(out, rows, weight, None, True))
    for shift in arriving:
        shift.arrived()
    add_factors(sink, grad, full)
    return finish_scatter(own, shifts)


@shapes_of(column_backward)
def _(grad: Tensor, weight: Tensor, x: Tensor, sink: Tensor, group: str, scatters: bool) -> Tensor:
    return grad.new_empty((x.shape[0], weight.shape[1]))
