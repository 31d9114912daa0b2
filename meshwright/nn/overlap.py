"""Linear layers that communicate over tp while they multiply (`comm.overlap.tensor`).

With sequence parallelism each rank has a chunk of the rows. A column product multiplies its own chunk first and the
others as they arrive. A row product multiplies the chunks of other ranks first, and sends each of them while it
multiplies the next. Chunks go straight to the rank that needs them, so as many bytes travel as with collectives.
The chunks of a run of ranks are sent by one call and multiplied by one product, because the host is slow to launch and
small products are slow. `spec/model/pieces.py` defines the runs, and decides which products are cut.

Without sequence parallelism a row product is all-reduced in chunks of its rows. In backward the input gradient travels
while the weight gradient is computed. Each function is one registered operator, and its results have arrived when it
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group, Pending, group_named
from meshwright.comm.registered import effectful_operator, operator, shapes_of
from meshwright.nn.weight_grad import add_product, sink_of
from meshwright.spec.model.pieces import runs


class PendingScatter(NamedTuple):
    """A scatter in flight."""

    # This rank's summands, [ranks by distance, rows, features]: the local one first, the others as they arrive.
    chunks: Tensor
    pendings: list[Pending]
    # The chunks on their way to other ranks, which must not change before they have arrived.
    sent: Tensor


def spans(places: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, last + 1) of consecutive places. A run that wraps round the end of a group has two."""
    begin = end = -1
    for place in sorted(places):
        if place != end and end >= 0:
            yield begin, end
        begin = begin if place == end else place
        end = place + 1
    yield begin, end


def multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool) -> None:
    """Set `out` to x W^T, or to x W where the weight is `turned`."""
    right = weight if turned else weight.t()
    if bias is None:
        torch.mm(x, right, out=out)
    else:
        torch.addmm(bias, x, right, out=out)


def begin_gather(group: Group, x: Tensor) -> tuple[Tensor, list[Pending]]:
    """Begin to gather the rows of all ranks, run by run.

    Return the tensor in which they arrive, which already holds this rank's rows, and the pending call of each run.
    """
    size = group.size
    rank = group.index
    x = x.contiguous()
    full = x.new_empty((size * x.shape[0], *x.shape[1:]))
    chunks = full.chunk(size)
    chunks[rank].copy_(x)
    return full, [group.shifts([(x, by, chunks[(rank - by) % size]) for by in run]) for run in runs(size)[1:]]


def begin_scatter(group: Group, x: Tensor, width: int, product: Callable[[Tensor, Tensor], None]) -> PendingScatter:
    """Multiply the rows for each rank of the group and send them there. The rows for this rank are multiplied last."""
    size = group.size
    rank = group.index
    rows = x.shape[0] // group.size
    others = x.new_empty((x.shape[0], width))
    chunks = x.new_empty((size, rows, width))
    outgoing = others.chunk(size)
    incoming = chunks.unbind()
    pendings = []
    for run in reversed(runs(size)[1:]):
        for low, high in spans((rank + by) % size for by in run):
            these = slice(low * rows, high * rows)
            product(others[these], x[these])
        pendings.append(group.shifts([(outgoing[(rank + by) % size], by, incoming[by]) for by in run]))
    product(incoming[0], x[rank * rows : (rank + 1) * rows])
    return PendingScatter(chunks, pendings, others)


def finish_scatter(begun: PendingScatter) -> Tensor:
    """Wait for the chunks of the other ranks and return the sum of this rank's rows."""
    for pending in begun.pendings:
        pending.wait()
    return begun.chunks.sum(0)


@operator("meshwright::gather_in_chunks")
def gather_in_chunks(x: Tensor, group: str, size: int) -> Tensor:
    """Gather the rows of all ranks, with the same calls as `gather_product`."""
    full, arriving = begin_gather(group_named(group), x)
    for pending in arriving:
        pending.wait()
    return full


@shapes_of(gather_in_chunks)
def _(x: Tensor, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


@operator("meshwright::gather_product")
def gather_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, group: str, size: int
) -> tuple[Tensor, Tensor]:
    """Return the product (see `multiply`) of the rows of all ranks, and the gathered rows."""
    ranks, rows = group_named(group), x.shape[0]
    full, arriving = begin_gather(ranks, x)
    y = x.new_empty((full.shape[0], weight.shape[1 if turned else 0]))
    for number, run in enumerate(runs(size)):
        # The first run is this rank itself, whose rows need not arrive.
        if number:
            arriving[number - 1].wait()
        for low, high in spans((ranks.index - by) % size for by in run):
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
    """Return this rank's rows of the sum of all ranks' products (see `multiply`)."""
    width = weight.shape[1 if turned else 0]
    begun = begin_scatter(group_named(group), x, width, lambda out, rows: multiply(out, rows, weight, None, turned))
    return finish_scatter(begun)


@shapes_of(product_scatter)
def _(x: Tensor, weight: Tensor, turned: bool, group: str, size: int) -> Tensor:
    return x.new_empty((x.shape[0] // size, weight.shape[1 if turned else 0]))


@operator("meshwright::product_sum")
def product_sum(x: Tensor, weight: Tensor, group: str, chunks: int) -> Tensor:
    """Return the sum of all ranks' x W^T. Each chunk of rows is all-reduced while the next ones are multiplied."""
    ranks = group_named(group)
    y = x.new_empty((x.shape[0], weight.shape[0]))
    pendings = []
    for rows, out in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        multiply(out, rows, weight, None, False)
        pendings.append(ranks.all_reduce(out, wait=False))
    for pending in pendings:
        pending.wait()
    return y


@shapes_of(product_sum)
def _(x: Tensor, weight: Tensor, group: str, chunks: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@effectful_operator("meshwright::column_backward")
def column_backward(grad: Tensor, weight: Tensor, x: Tensor, sink: Tensor, group: str, scatters: bool) -> Tensor:
    """Return the gradient of a column product's input, summed over the ranks, and add the weight gradient to the sink
    while that sum travels.

    With `scatters`, x holds this rank's rows only, and so will the returned gradient. Otherwise both hold all rows.
    """
    ranks, grad = group_named(group), grad.contiguous()
    width = weight.shape[1]
    if not scatters:
        grad_x = grad.new_empty((grad.shape[0], width))
        multiply(grad_x, grad, weight, None, True)
        pending = ranks.all_reduce(grad_x, wait=False)
        sink_of(sink).add_factors(add_product, grad, x)
        pending.wait()
        return grad_x
    # The rows of x arrive while the input gradient is multiplied. That gradient travels during the weight gradient.
    full, arriving = begin_gather(ranks, x)
    begun = begin_scatter(ranks, grad, width, lambda out, rows: multiply(out, rows, weight, None, True))
    for pending in arriving:
        pending.wait()
    sink_of(sink).add_factors(add_product, grad, full)
    return finish_scatter(begun)


@shapes_of(column_backward)
def _(grad: Tensor, weight: Tensor, x: Tensor, sink: Tensor, group: str, scatters: bool) -> Tensor:
    return grad.new_empty((x.shape[0], weight.shape[1]))
