"""Weight gradients go straight into the flat gradient buffer, without a tensor of their own: at once or, where a
schedule computes weight gradients apart from input gradients, when the schedule says.

A `Sink` is a parameter's place in that buffer. The first contribution of a step overwrites it, so the buffer is never
zeroed; each contribution is reported, so that a full bucket is reduced while backward continues. The functions that add
a contribution are registered operators, so that a compiled backward can call them.

A layer holds no sink but its handle, which is what an operator can take. The sinks themselves are in a `SinkTable`,
which belongs to one trainer. Torch is not told that the operators write to the buffer: it would give a compiled graph a
copy of the buffer and copy that back, over the gradient that the operator wrote in the meantime. They are registered
with an ordered effect instead, so that a compiler neither drops, joins, repeats nor reorders their calls.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshwright.comm.registered import effectful_operator
from meshwright.kernels import kernels_take


class Sink:
    """A parameter's place in the gradient buffer. `prepare` is called before a contribution and `arrived` after it;
    `fresh` says that the next contribution is the step's first. `handle` stands for the sink in a layer."""

    def __init__(
        self, table: SinkTable, handle: Tensor, view: Tensor, arrived: Callable[[Sink], None],
        prepare: Callable[[], None],
    ) -> None:  # fmt: skip
        self.table, self.handle, self.view = table, handle, view
        self.prepare, self._arrived = prepare, arrived
        self.fresh, self.contributions = True, 0
        self._unfinished = 0

    def reset(self) -> None:
        self.fresh, self.contributions = True, 0

    def done(self) -> None:
        """Report a contribution, unless what was written is a piece that more pieces follow."""
        self.fresh = False
        if not self._unfinished:
            self.contributions += 1
            self._arrived(self)

    def add(self, grad: Tensor) -> None:
        """Add one contribution, given as a whole gradient."""
        self.prepare()
        if self.fresh:
            self.view.copy_(grad)
        else:
            self.view.add_(grad)
        self.done()

    def take(self, grad: Tensor, add: Callable[[Sink, Tensor], None]) -> None:
        """Call add(sink, grad) with a finished gradient: at once, or later if it is a vector's that is deferred."""
        if self.table.deferred is None or grad.dim() > 1:
            add(self, grad)
        else:
            self.table.deferred.add(self, partial(add, self), grad)

    def add_factors(self, add: Callable[..., None], *factors: Tensor) -> None:
        """Call add(sink, *factors) at once, or later if the trainer defers its weight gradients."""
        if self.table.deferred is None:
            add(self, *factors)
        else:
            self.table.deferred.add(self, partial(add, self), *factors)

    @property
    def complete(self) -> bool:
        """Return True if the next write completes a contribution."""
        return not self._unfinished

    @contextmanager
    def piece(self, last: bool) -> Iterator[None]:
        """Treat writes to this sink as a piece of one contribution, which only the `last` piece completes."""
        self._unfinished += not last
        try:
            yield
        finally:
            self._unfinished -= not last


# A handle is the number of a table and, in its lower half, the number of a sink in it.
_SINK_BITS = 32
_TABLE_NUMBERS = itertools.count(1)
# The only process-wide state: operators take no Python objects, so a number must lead to its table. Numbers are never
# given out twice, so the handles of several trainers can't collide. The map is weak: it keeps no trainer alive.
_TABLES: WeakValueDictionary[int, SinkTable] = WeakValueDictionary()


class SinkTable:
    """The sinks of one trainer, and where its weight gradients go while a backward defers them.

    A handle is a tensor without dimensions, in the host's memory. As a Python int it would be a constant of a compiled
    graph, and every layer would be compiled again; a tensor is data to a compiler. Reading it waits for no device.
    """

    def __init__(self) -> None:
        self.deferred: Deferred | None = None
        self._sinks: list[Sink] = []
        self._number = next(_TABLE_NUMBERS)
        _TABLES[self._number] = self

    def add(self, view: Tensor, arrived: Callable[[Sink], None], prepare: Callable[[], None] = lambda: None) -> Sink:
        """Return a new sink that writes to `view`."""
        number = self._number << _SINK_BITS | len(self._sinks)
        handle = torch.tensor(number, dtype=torch.int64, device="cpu")
        sink = Sink(self, handle, view, arrived, prepare)
        self._sinks.append(sink)
        return sink

    def __getitem__(self, number: int) -> Sink:
        return self._sinks[number]

    @contextmanager
    def deferring(self, deferred: Deferred | None) -> Iterator[None]:
        """Defer the contributions that come as factors (the products of linear layers, the rows of embeddings), and
        the finished gradients of vectors: these are small, but would allocate whole buckets before their matrices."""
        # An attribute and no thread-local variable: autograd may call the operators on a thread of its own.
        before, self.deferred = self.deferred, deferred
        try:
            yield
        finally:
            self.deferred = before


def sink_of(handle: Tensor) -> Sink:
    """Return the sink that a handle stands for."""
    number = int(handle)
    table = _TABLES.get(number >> _SINK_BITS)
    if table is None:
        raise RuntimeError(
            f"the gradient sink {number} is gone: the trainer that owned it was deleted, but its model still runs "
            "backward; keep the trainer, or build the model again"
        )
    return table[number & (1 << _SINK_BITS) - 1]


@contextmanager
def piece_of_contribution(handles: Iterable[Tensor | None], last: bool) -> Iterator[None]:
    """Treat writes to the sinks of these handles as pieces of a contribution, which only the `last` piece completes."""
    with ExitStack() as stack:
        for handle in handles:
            if handle is not None:
                stack.enter_context(sink_of(handle).piece(last))
        yield


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


class Deferred:
    """Weight gradients that are still to be computed, each a call with the tensors that it needs. `copies`: those
    tensors are copied first. Compiled backwards need that, since they write other results over a tensor's memory once
    the operator that read it has returned."""

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self._calls: deque[Callable[[], None]] = deque()

    def add(self, sink: Sink, call: Callable[..., None], *tensors: Tensor) -> None:
        held, last = [self.kept(x) for x in tensors], sink.complete

        def later() -> None:
            with sink.piece(last):
                call(*held)

        self._calls.append(later)

    def kept(self, x: Tensor) -> Tensor:
        """Return what is kept of a tensor: detached, or a saved activation would hold the whole graph behind it."""
        return x.detach().clone() if self.copies else x.detach()

    @torch.no_grad()
    def run(self) -> None:
        """Compute them in the order in which they came, which is that of a backward in one piece. Each call's tensors
        are released before the next one, which may allocate a bucket of gradients."""
        while self._calls:
            self._calls.popleft()()


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


@effectful_operator("meshwright::add_product_grad")
def add_product_grad(sink: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to the sink of a linear layer's weight [out, in]; grad [tokens, out], x [tokens, in]. Here and below
    `sink` is the handle."""
    sink_of(sink).add_factors(add_product, grad, x)


@effectful_operator("meshwright::add_grad")
def add_grad(sink: Tensor, grad: Tensor) -> None:
    """Add a weight gradient that is there as a whole to the sink."""
    sink_of(sink).add(grad)


def give_grad(grad: Tensor, sink: Tensor | None) -> Tensor | None:
    """Add a whole weight gradient to the sink and return None, or return it for autograd if there is no sink."""
    if sink is None:
        return grad
    add_grad(sink, grad)
    return None


def dense_rows_grad(grad: Tensor, rows: Tensor, size: int) -> Tensor:
    """Returns the gradient of an embedding of `size` rows as one dense tensor."""
    grad = grad.masked_fill((rows < 0)[:, None], 0.0)
    found: Tensor = torch.ops.aten.embedding_dense_backward(grad, rows.clamp(min=0), size, -1, False)
    return found


@effectful_operator("meshwright::add_rows_grad")
def add_rows_grad(sink: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add `grad` to rows of the sink of an embedding [vocabulary, hidden]; `rows` [tokens] may repeat, and negative
    ones are left out. The same sum has the same bits every time."""
    sink_of(sink).add_factors(_add_rows, grad, rows)


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
