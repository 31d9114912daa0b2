"""Weight gradients are written straight into the flat gradient buffer, without intermediate tensors. They are computed
at once or, in schedules that separate weight gradients from input gradients, when the schedule says so.

A `Sink` is a parameter's place in that buffer. The first contribution of a step overwrites it, so the buffer is never
zeroed. Each contribution is reported, so that a full bucket is reduced while backward continues. The functions that add
a contribution are registered operators, so that a compiled backward can call them.

A layer does not hold a sink but its handle, because an operator can take a tensor but no Python object. The sinks are
in a `SinkTable`, which belongs to one trainer. The operators do not declare to torch that they write to the buffer. If
they did, torch would give a compiled graph a copy of the buffer and copy it back, over the gradient that the operator
wrote in the meantime. They are registered with an ordered effect instead, so that a compiler neither drops, joins,
repeats nor reorders their calls.
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
from meshwright.device import is_host, kind_of
from meshwright.kernels import kernels_take


class Sink:
    """A parameter's place in the gradient buffer.

    `prepare` is called before a contribution and `arrived` after it. `fresh` is true if the next contribution is the
    first one of the step. Layers hold the `handle` in place of the sink.
    """

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
        """Report a contribution, unless only a piece of it was written and more pieces follow."""
        self.fresh = False
        if not self._unfinished:
            self.contributions += 1
            self._arrived(self)

    def add(self, grad: Tensor) -> None:
        """Add one contribution: a complete gradient."""
        self.prepare()
        if self.fresh:
            self.view.copy_(grad)
        else:
            self.view.add_(grad)
        self.done()

    def take(self, grad: Tensor, add: Callable[[Sink, Tensor], None]) -> None:
        """Call add(sink, grad) with a finished gradient: later if it is a vector's and gradients are deferred, else at
        once."""
        if self.table.deferred is None or grad.dim() > 1:
            add(self, grad)
        else:
            self.table.deferred.add(self, partial(add, self), grad)

    def add_factors(self, add: Callable[..., None], *factors: Tensor) -> None:
        """Call add(sink, *factors): later if the trainer defers its weight gradients, otherwise at once."""
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
# The only process-wide state: operators take no Python objects, so they must find a table by its number. A number is
# never used twice, so the handles of several trainers can't collide. The map is weak, so it keeps no trainer alive.
_TABLES: WeakValueDictionary[int, SinkTable] = WeakValueDictionary()


class SinkTable:
    """The sinks of one trainer, and the queue for its weight gradients while a backward defers them.

    A handle is a 0-dimensional tensor in host memory. A Python int would be a constant of a compiled graph, so that
    every layer would be compiled again, whereas a tensor is data to a compiler. Reading it does not wait for a device.
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
    def defer_to(self, deferred: Deferred | None) -> Iterator[None]:
        """Defer the contributions that are given as factors (products of linear layers, rows of embeddings), and the
        finished gradients of vectors.

        Vectors are small, but adding them at once would allocate whole buckets before the matrices need them.
        """
        # This is not a thread-local variable, because autograd may call the operators on another thread.
        before, self.deferred = self.deferred, deferred
        try:
            yield
        finally:
            self.deferred = before


def sink_of(handle: Tensor) -> Sink:
    """Return the sink with this handle."""
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


# The number of vectors whose gradients one call adds.
VECTORS_PER_CALL = 16


class VectorGradients:
    """Adds finished gradients to sinks: those of matrices at once, those of vectors (norms, biases) several at a time.

    Launching a copy for each vector would take longer than the copies themselves. At the end of a step `add_all` must
    be called, before the buffer is read.
    """

    def __init__(self) -> None:
        self._waiting: dict[Sink, Tensor] = {}

    def forget(self) -> None:
        """Drop the waiting gradients of a step that was not finished."""
        self._waiting = {}

    def add(self, sink: Sink, grad: Tensor) -> None:
        # A gradient of an earlier micro-batch still waits for this sink.
        if sink in self._waiting:
            self.add_all()
        if grad.dim() > 1:
            sink.add(grad)
            return
        self._waiting[sink] = grad
        if len(self._waiting) == VECTORS_PER_CALL:
            self.add_all()

    @torch.no_grad()
    def add_all(self) -> None:
        """Add the gradients that still wait, in the order in which they arrived."""
        waiting, self._waiting = self._waiting, {}
        for sink in waiting:
            sink.prepare()
        for fresh, add in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
            if sinks := [sink for sink in waiting if sink.fresh == fresh]:
                add([sink.view for sink in sinks], [waiting[sink] for sink in sinks])
        for sink in waiting:
            sink.done()


class Deferred:
    """Weight gradients that are still to be computed, each stored as a call and its tensors.

    With `copies`, the tensors are copied first. Compiled backwards need this, since they reuse the memory of a tensor
    as soon as the operator that read it has returned.
    """

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self._calls: deque[Callable[[], None]] = deque()

    def add(self, sink: Sink, call: Callable[..., None], *tensors: Tensor) -> None:
        held = [self.detach(x) for x in tensors]
        last = sink.complete

        def later() -> None:
            with sink.piece(last):
                call(*held)

        self._calls.append(later)

    def detach(self, x: Tensor) -> Tensor:
        """Return a tensor without its graph, which a saved activation would otherwise keep alive."""
        return x.detach().clone() if self.copies else x.detach()

    @torch.no_grad()
    def run(self) -> None:
        """Compute all deferred gradients in the order in which they were added, as an undivided backward would.

        The tensors of each call are released before the next one, which may allocate a bucket of gradients.
        """
        while self._calls:
            self._calls.popleft()()


def add_product(slot: Sink, grad: Tensor, x: Tensor, last: bool = True) -> None:
    """Add grad^T x to a sink, as a contribution or a piece of one. Only the `last` piece completes the contribution."""
    slot.prepare()
    write_product(slot.view, grad, x, add=not slot.fresh)
    slot.fresh = False
    if last:
        slot.done()


def write_product(out: Tensor, grad: Tensor, x: Tensor, add: bool) -> None:
    """Set `out` to grad^T x, or add that to it (`add`). `out` may have a wider dtype than the factors.

    On CUDA the product then accumulates in float32. A dry run (a `meta` tensor) returns at once, so that no
    intermediate result is counted as memory.
    """
    if out.is_meta:
        return
    left = grad.t()
    if out.dtype == x.dtype:
        out.addmm_(left, x) if add else torch.mm(left, x, out=out)
    elif kind_of(x.device).has_wide_products and out.dtype == torch.float32:
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
    """Add grad^T x to the sink of a linear layer's weight [out, in], for grad [tokens, out] and x [tokens, in].

    Here and below `sink` is the handle.
    """
    sink_of(sink).add_factors(add_product, grad, x)


@effectful_operator("meshwright::add_grad")
def add_grad(sink: Tensor, grad: Tensor) -> None:
    """Add a complete weight gradient to the sink."""
    sink_of(sink).add(grad)


def give_grad(grad: Tensor, sink: Tensor | None) -> Tensor | None:
    """Add a complete weight gradient to the sink and return None, or return it for autograd if there is no sink."""
    if sink is None:
        return grad
    add_grad(sink, grad)
    return None


def dense_rows_grad(grad: Tensor, rows: Tensor, size: int) -> Tensor:
    """Return the gradient of an embedding of `size` rows as one dense tensor."""
    grad = grad.masked_fill((rows < 0)[:, None], 0.0)
    dense: Tensor = torch.ops.aten.embedding_dense_backward(grad, rows.clamp(min=0), size, -1, False)
    return dense


@effectful_operator("meshwright::add_rows_grad")
def add_rows_grad(sink: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add `grad` [tokens, hidden] to rows of the sink of an embedding [vocabulary, hidden].

    `rows` [tokens] may repeat; tokens with a negative row are skipped. The sum has the same bits every time.
    """
    sink_of(sink).add_factors(_add_rows, grad, rows)


# A table with at most this many rows, such as that of token types, has many tokens for each row.
FEW_ROWS = 16


def _add_rows(slot: Sink, grad: Tensor, rows: Tensor) -> None:
    sink = slot.view
    if sink.shape[0] <= FEW_ROWS and len(rows) > FEW_ROWS:
        # A product with the tokens' one-hot rows computes these sums on the whole device. The kernel below would add
        # the tokens of a row one after the other.
        one_hot = (rows[:, None] == torch.arange(sink.shape[0], device=rows.device)).to(grad.dtype)
        add_product(slot, one_hot, grad)
        return
    kernel = sink.dtype == torch.float32 and (kernels_take(sink, grad) or sink.is_meta)
    # On an accelerator, index_add_ is not deterministic.
    if not kernel and not is_host(sink.device):
        slot.add(dense_rows_grad(grad, rows, sink.shape[0]))
        return
    slot.prepare()
    if slot.fresh:
        sink.zero_()
    if kernel and not sink.is_meta:
        from meshwright.kernels.embedding import add_rows

        add_rows(sink, grad, rows)
    elif not kernel:
        is_local = rows >= 0
        sink.index_add_(0, rows[is_local], grad[is_local].to(sink.dtype))
    slot.done()
