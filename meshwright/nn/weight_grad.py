"""Weight gradients go straight into the flat gradient buffer, without a tensor of their own: at once or, where a
schedule computes weight gradients apart from input gradients, when the schedule says.

A `Sink` is a parameter's place in that buffer. The first contribution of a step overwrites it, so the buffer is never
zeroed; each contribution is reported, so that a full bucket is reduced while backward continues. The functions that add
a contribution are registered operators, so that a compiled backward can call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshwright.comm.registered import operator
from meshwright.kernels import kernels_take


class Sink:
    """A parameter's place in the gradient buffer. `prepare` is called before a contribution and `arrived` after it;
    `fresh` says that the next contribution is the step's first."""

    def __init__(
        self, view: Tensor, arrived: Callable[[Sink], None], prepare: Callable[[], None] = lambda: None
    ) -> None:
        self.view, self.prepare, self._arrived = view, prepare, arrived
        self.fresh, self.contributions = True, 0
        _SINKS[_address(view)] = self

    def reset(self) -> None:
        self.fresh, self.contributions = True, 0

    def done(self) -> None:
        self.fresh = False
        if not _UNFINISHED:
            self.contributions += 1
            self._arrived(self)

    def add(self, grad: Tensor) -> None:
        """Adds one contribution, given as a whole gradient."""
        self.prepare()
        if self.fresh:
            self.view.copy_(grad)
        else:
            self.view.add_(grad)
        self.done()


TOGETHER = 16  # gradients of vectors that are added by one call


class VectorGradients:
    """Adds finished gradients to sinks: those of matrices at once; those of vectors, as norms and biases have, wait
    until there are several, since launching a copy of each takes longer than making it. At the end of a step the rest
    is added by `add_all`, before anybody reads the buffer."""

    def __init__(self) -> None:
        self._waiting: dict[Sink, Tensor] = {}

    def forget(self) -> None:
        """Drops those of a step that was not finished."""
        self._waiting = {}

    def add(self, sink: Sink, grad: Tensor) -> None:
        if sink in self._waiting:  # of another micro-batch
            self.add_all()
        if grad.dim() > 1:
            sink.add(grad)
            return
        self._waiting[sink] = grad
        if len(self._waiting) == TOGETHER:
            self.add_all()

    @torch.no_grad()
    def add_all(self) -> None:
        """Adds those that still wait, in the order in which they came."""
        waiting, self._waiting = self._waiting, {}
        for sink in waiting:
            sink.prepare()
        for fresh, add in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
            if sinks := [sink for sink in waiting if sink.fresh == fresh]:
                add([sink.view for sink in sinks], [waiting[sink] for sink in sinks])
        for sink in waiting:
            sink.done()


# Registered operators take tensors but no Python objects, so a layer passes the view of its gradient and the operator
# looks up the sink here by the view's address. The table is process-wide, but two trainers in one process can't
# collide, since no two live tensors share an address. It is weak, so a trainer that is gone leaves nothing behind.
_SINKS: WeakValueDictionary[tuple[int, int], Sink] = WeakValueDictionary()


def _address(view: Tensor) -> tuple[int, int]:
    """Returns the address of the storage object, and not of its memory: ZeRO stages 2 and 3 release that memory and
    allocate it again elsewhere, under the same storage."""
    return int(view.untyped_storage()._cdata), int(view.storage_offset())


def sink_of(view: Tensor) -> Sink:
    return _SINKS[_address(view)]


class Deferred:
    """Weight gradients that are still to be computed, each a call with the tensors that it needs. `copies`: those
    tensors are copied first. Compiled backwards need that, since they write other results over a tensor's memory once
    the operator that read it has returned."""

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[..., None], *tensors: Tensor) -> None:
        # Detached, or a saved activation would hold the whole graph behind it.
        held = [x.detach().clone() if self.copies else x.detach() for x in tensors]
        last = not _UNFINISHED

        def later() -> None:
            with piece_of_contribution(last):
                call(*held)

        self._calls.append(later)

    @torch.no_grad()
    def run(self) -> None:
        """Computes them in the order in which they came, which is that of a backward in one piece."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()


# Not empty while pieces of contributions arrive that are not their last. Process-wide for the same reason as below.
_UNFINISHED: list[None] = []


@contextmanager
def piece_of_contribution(last: bool) -> Iterator[None]:
    """What is added to sinks inside is a piece of one contribution, which only the `last` piece completes."""
    marks = [] if last else [None]
    _UNFINISHED.extend(marks)
    try:
        yield
    finally:
        del _UNFINISHED[len(_UNFINISHED) - len(marks) :]


# Where weight gradients go while a backward defers them. Process-wide, since the operators that look here take tensors
# only, and autograd may call them on a thread of its own.
_DEFERRED: list[Deferred] = []


@contextmanager
def deferring(deferred: Deferred) -> Iterator[None]:
    """Defers the contributions that come as factors (the products of linear layers, the rows of embeddings). Those that
    come as finished gradients, as of norms and biases, are small and don't wait for the schedule."""
    _DEFERRED.append(deferred)
    try:
        yield
    finally:
        _DEFERRED.pop()


def now_or_later(call: Callable[..., None], *tensors: Tensor) -> None:
    """Makes the call at once, unless this backward defers its weight gradients."""
    if _DEFERRED:
        _DEFERRED[-1].add(call, *tensors)
    else:
        call(*tensors)


def add_product(slot: Sink, grad: Tensor, x: Tensor, last: bool = True) -> None:
    """Adds grad^T x to a sink: a contribution, or a piece of one. Only the `last` piece completes the contribution."""
    slot.prepare()
    write_product(slot.view, grad, x, add=not slot.fresh)
    slot.fresh = False
    if last:
        slot.done()


def write_product(out: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """Computes out (+)= grad^T x, where `out` may be wider than the factors: on CUDA the product itself then
    accumulates in float32. In a dry run (a `meta` tensor) it returns at once, so no intermediate result is counted."""
    if out.is_meta:
        return
    left = grad.t()
    if out.dtype == x.dtype:
        out.addmm_(left, x) if add else torch.mm(left, x, out=out)
    elif x.is_cuda and out.dtype == torch.float32:
        if add:
            torch.ops.aten.addmm.dtype_out(out, left, x, torch.float32, out=out)
        else:
            torch.ops.aten.mm.dtype_out(left, x, torch.float32, out=out)
    elif add:
        out.add_(left @ x)
    else:
        out.copy_(left @ x)


@operator("meshwright::add_product_grad", mutates={"sink"})
def add_product_grad(sink: Tensor, grad: Tensor, x: Tensor) -> None:
    """sink += grad^T x, for a linear layer's weight [out, in], grad [tokens, out], x [tokens, in]."""
    add_factors(sink, grad, x)


def add_factors(sink: Tensor, grad: Tensor, x: Tensor) -> None:
    now_or_later(partial(add_product, sink_of(sink)), grad, x)


@operator("meshwright::add_grad", mutates={"sink"})
def add_grad(sink: Tensor, grad: Tensor) -> None:
    """sink += grad, for a weight gradient that is there as a whole."""
    sink_of(sink).add(grad)


def dense_rows_grad(grad: Tensor, rows: Tensor, size: int) -> Tensor:
    """Returns the gradient of an embedding of `size` rows as one dense tensor."""
    grad = grad.masked_fill((rows < 0)[:, None], 0.0)
    found: Tensor = torch.ops.aten.embedding_dense_backward(grad, rows.clamp(min=0), size, -1, False)
    return found


@operator("meshwright::add_rows_grad", mutates={"sink"})
def add_rows_grad(sink: Tensor, grad: Tensor, rows: Tensor) -> None:
    """sink[rows] += grad, for an embedding [vocabulary, hidden]; `rows` [tokens] may repeat, and negative ones are left
    out. The same sum has the same bits every time."""
    now_or_later(partial(_add_rows, sink_of(sink)), grad, rows)


FEW_ROWS = 16  # of a table whose every row is that of many tokens, as of token types


def _add_rows(slot: Sink, grad: Tensor, rows: Tensor) -> None:
    sink = slot.view
    if sink.shape[0] <= FEW_ROWS and len(rows) > FEW_ROWS:
        # A row of zeros and one 1 for every token makes the sums a product, which uses the whole device. The kernel
        # below adds up a row's tokens one after the other.
        each = (rows[:, None] == torch.arange(sink.shape[0], device=rows.device)).to(grad.dtype)
        add_product(slot, each, grad)
        return
    kernel = sink.dtype == torch.float32 and (kernels_take(sink, grad) or sink.is_meta)
    if not kernel and sink.device.type != "cpu":  # index_add_ is not deterministic there
        slot.add(dense_rows_grad(grad, rows, sink.shape[0]))
        return
    slot.prepare()
    if slot.fresh:
        sink.zero_()
    if kernel and not sink.is_meta:
        from meshwright.kernels.embedding import add_rows

        add_rows(sink, grad, rows)
    elif not kernel:
        kept = rows >= 0
        sink.index_add_(0, rows[kept], grad[kept].to(sink.dtype))
    slot.done()
