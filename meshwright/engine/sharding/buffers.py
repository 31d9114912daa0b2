"""Contiguous parameter and gradient buffers: one for each dtype and set of axes to reduce over, cut into buckets.

Parameters become views of the parameter buffer, weight gradients are added straight into the gradient buffer, and a
bucket is what is reduced or gathered at once. Parameters lie in the order in which backward fills them. Each bucket is
padded so that the data-parallel ranks can split it evenly, whatever the ZeRO stage.

What a rank owns of a bucket is its *share*: all of it without ZeRO. Whole gradients (stage 2) or whole parameters too
(stage 3) then exist only while they are used: their memory is released, but the tensors and all views of them stay.
Where a step has one micro-batch, gradients come while activations go; so in stages 0 and 1 a bucket's have memory from
the first of them to the next step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.engine.sharding.offload import StateStore
from meshwright.engine.sharding.remainders import PairedTensor, Values, plain
from meshwright.nn.parallel import draw_parameter, is_unallocated, record_of
from meshwright.nn.weight_grad import Sink
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Box, Init, ParamRecord, global_boxes, row_of, whole
from meshwright.spec.traffic.placement import (
    ALIGN,
    Split,
    backward_order,
    bucket_elements,
    buffer_key,
    grad_bytes,
    place,
)

REDUCER = "reducer."  # with which the names of a reducer's states begin
REPLICA_STATE = "replica."  # the same of states that each of `layout.replicas` has for itself
OUTER = "outer."  # and of those of their synchronisation


class BufferKey(NamedTuple):
    """What the parameters of one buffer have in common."""

    dtype: torch.dtype
    data_axes: str
    partial: tuple[str, ...]
    trained: bool = True
    compressed: bool = False  # a reducer that mixes elements may sum them
    matrices: bool = False  # the optimizer updates their matrices as wholes


class NamedParameter(NamedTuple):
    """A parameter before it has a place in a buffer; `unit` is the number of the unit that it is gathered with."""

    name: str
    parameter: nn.Parameter
    record: ParamRecord
    unit: int


@dataclass
class Slot:
    """One parameter's place in its buffer. `view` and `grad` are its whole value and gradient. In stage 3 the value,
    and in a buffer whose gradients are released the gradient, has memory only while it is used. A frozen one has an
    empty gradient, no sink."""

    name: str
    parameter: nn.Parameter
    record: ParamRecord
    start: int
    bucket: int
    view: Tensor
    grad: Tensor
    sink: Sink = field(init=False)

    @property
    def stop(self) -> int:
        return self.start + self.record.numel


class ReleasableTensor:
    """A flat tensor whose memory can be released and allocated again, under the same tensor and its views.

    On an accelerator the storage is resized, so that its memory goes back to torch's allocator while views keep
    pointing at the storage. On a CPU the tensor lies in pages of its own, which go back to the system: blocks that the
    C library frees and hands out again and again would leave gaps that add up.
    """

    def __init__(self, tensor: Tensor, pages: mmap.mmap | None = None) -> None:
        self.tensor, self.allocated = tensor, True
        self._pages, self._bytes = pages, tensor.untyped_storage().nbytes()

    @classmethod
    def of(cls, size: int, dtype: torch.dtype, device: torch.device) -> ReleasableTensor:
        """Returns a new one, filled with zeros."""
        if device.type != "cpu":
            return cls(torch.zeros(size, dtype=dtype, device=device))
        pages = mmap.mmap(-1, max(1, size * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not every system has large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        return cls(torch.frombuffer(pages, dtype=dtype, count=size), pages)

    def allocate(self) -> None:
        """Allocates the memory; its contents are undefined until they are written."""
        if not self.allocated and self._pages is None:
            self.tensor.untyped_storage().resize_(self._bytes)
        self.allocated = True

    def release(self) -> None:
        """Releases the memory. Views stay valid objects, but must not be read or written before `allocate`."""
        if self._pages is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)
        self.allocated = False


@dataclass(eq=False, repr=False)
class Bucket:
    """What is reduced or gathered at once. `share` is the range of the buffer that this rank owns, and `own_*` are the
    tensors of that range. Their memory is never released, but for `own_grads` in stages 0 and 1."""

    buffer: FlatBuffer
    index: int
    start: int
    stop: int
    share: tuple[int, int]
    params: ReleasableTensor
    grads: ReleasableTensor
    own_params: Tensor
    own_grads: Tensor
    slots: list[Slot] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return self.buffer.split.stage

    def allocate_params(self) -> None:
        """Allocates the whole weights, of which the model's parameters become views again."""
        self.params.allocate()
        for slot in self.slots:
            slot.parameter.data = slot.view

    def release_params(self) -> None:
        """Releases the whole weights. The parameters become empty, so that no read finds released memory."""
        for slot in self.slots:
            slot.parameter.data = slot.view.new_empty(0)
        self.params.release()

    def allocate_grads(self) -> None:
        """Makes sure that the whole gradients have memory; what is between the parameters' own is zero."""
        if not self.grads.allocated:
            self.grads.allocate()
            for gap in self._gaps:
                gap.zero_()

    @cached_property
    def _gaps(self) -> list[Tensor]:
        """The gradients' memory between those of the parameters."""
        found, at = [], self.start
        for start, stop in [*((s.start, s.stop) for s in self.slots), (self.stop, self.stop)]:
            if start > at:
                found.append(self.grads.tensor[at - self.start : start - self.start])
            at = stop
        return found


class FlatBuffer:
    """The parameters of one key, their gradients, and the buckets they are reduced in."""

    def __init__(
        self,
        key: BufferKey,
        named: list[NamedParameter],
        split: Split,
        bucket_mib: float,
        grad_dtype: torch.dtype,
        params_at: tuple[str, Path],
        seed: int,
        releases_grads: bool,
        align: int = ALIGN,
    ) -> None:
        """`params_at` says where owned weights are stored in stage 3: on the device, in host memory or in a file.
        Parameters begin at multiples of `align` elements."""
        self.key, self.split = key, split
        self.releases_grads = key.trained and (split.stage >= 2 or releases_grads)
        dtype = key.dtype if grad_bytes(key.dtype.itemsize, grad_dtype.itemsize) == key.dtype.itemsize else grad_dtype
        elements = bucket_elements(bucket_mib, dtype.itemsize, split.ranks)
        units = [item.unit for item in named] if split.stage == 3 else None
        places, bounds = place([item.record.numel for item in named], split.ranks, elements, units, align)
        self.device = named[0].parameter.device
        self.size = bounds[-1][1]
        self.slots: list[Slot] = []
        # Memory that is never released: for everything, or for this rank's shares, one after the other.
        sizes = [(stop - start) // split.shards for start, stop in bounds]
        self.store = StateStore(sizes, key.dtype, self.device, *params_at) if split.stage == 3 else None
        self.params = torch.zeros(0 if split.stage == 3 else self.size, dtype=key.dtype, device=self.device)
        # Where shares are views of whole gradients that are released, nothing of these lasts.
        graded = self.size // split.shards if split.stage >= 2 else 0 if self.releases_grads else self.size
        self.grads = torch.zeros(graded if key.trained else 0, dtype=dtype, device=self.device)
        self.buckets: list[Bucket] = []
        placed = list(zip(named, places, strict=True))
        for number, (start, stop) in enumerate(bounds):
            bucket = self._bucket(number, start, stop)
            self.buckets.append(bucket)
            self._add_parameters(bucket, [(item, at) for item, (at, where) in placed if where == number], seed)

    def _bucket(self, index: int, start: int, stop: int) -> Bucket:
        low, high = share = self.split.share(start, stop)
        own = slice(start // self.split.shards, stop // self.split.shards)
        params, own_params = ReleasableTensor(self.params[start:stop]), self.params[low:high]
        grads, own_grads = ReleasableTensor(self.grads[start:stop]), self.grads[low:high]
        if self.split.stage == 3:
            assert self.store is not None
            params = ReleasableTensor.of(stop - start, self.params.dtype, self.device)
            own_params = self.store.shares[index]
        if self.releases_grads:
            grads = ReleasableTensor.of(stop - start, self.grads.dtype, self.device)
            own_grads = self.grads[own] if self.split.stage >= 2 else grads.tensor[low - start : high - start]
        return Bucket(self, index, start, stop, share, params, grads, own_params, own_grads)

    def _add_parameters(self, bucket: Bucket, named: list[tuple[NamedParameter, int]], seed: int) -> None:
        """Gives parameters their slots and copies (or draws) their values into the bucket. Memory that the stage does
        not keep is then released, so that no more than one bucket is whole at any time."""
        for item, start in named:
            at = slice(start - bucket.start, start - bucket.start + item.record.numel)
            view = bucket.params.tensor[at].view(item.record.local_shape)
            grad = bucket.grads.tensor[at].view(item.record.local_shape if self.key.trained else (0,))
            if is_unallocated(item.parameter):
                draw_parameter(item.record, view, seed)
            else:
                view.copy_(item.parameter.data)
            item.parameter.data = view
            slot = Slot(item.name, item.parameter, item.record, start, bucket.index, view, grad)
            self.slots.append(slot)
            bucket.slots.append(slot)
        if self.releases_grads:
            bucket.grads.release()
        if self.split.stage == 3:
            low, high = bucket.share
            bucket.own_params.copy_(bucket.params.tensor[low - bucket.start : high - bucket.start])
            bucket.release_params()

    @property
    def grad_bytes(self) -> int:
        """The bytes of the gradients that an update needs: those of this rank's shares, or in stage 1 of all."""
        whole = [bucket.grads.tensor for bucket in self.buckets if self.releases_grads and self.split.stage < 2]
        return self.grads.nbytes + sum(grads.nbytes for grads in whole)

    def runs(self, wanted: Iterable[Slot]) -> list[tuple[Bucket, int, int]]:
        """Returns ranges of this rank's shares that cover the wanted slots: (bucket, start, stop), counted from the
        share's first element. Neighbours are joined across the padding between them, which is zero."""
        chosen = {id(slot) for slot in wanted}
        ranges: list[tuple[Bucket, int, int]] = []
        for bucket in self.buckets:
            low, high = bucket.share
            ends = [*(slot.start for slot in bucket.slots[1:]), bucket.stop]
            joined = False
            for slot, end in zip(bucket.slots, ends, strict=True):
                start, stop = max(slot.start, low) - low, min(end, high) - low
                if id(slot) not in chosen or start >= stop:
                    joined = False
                elif joined:
                    ranges[-1] = (bucket, ranges[-1][1], stop)
                else:
                    ranges.append((bucket, start, stop))
                    joined = True
        return ranges


class Rows(NamedTuple):
    """This rank's row, and the number of rows, of a state whose value is the sum of what several ranks hold."""

    row: int
    rows: int

    def saved_as(self, rows: int) -> Iterator[Rows]:
        """Yields this row among `rows`, and then those that hold nothing new. Several parameters may hold parts of one
        global tensor (query rows and copied key-value rows), and the ranks that have rows of their own may be fewer for
        one of them. The ranks that read row `row` of `rows` also read each of those, so together they read all."""
        yield from (Rows(row, rows) for row in range(self.row, rows, self.rows))


class State(NamedTuple):
    """One kind of state of a buffer, as a checkpoint holds it: one tensor per bucket, of this rank's share. With
    `additive` each rank has a row of its own, which may cover the whole bucket. With `replica` each replica of
    `layout.replicas` has one: another number of replicas begins with the mean of the rows, or, if they are `summed`,
    adds them up. `absorbs`: another kind of state, for which this run has no place, that is added to this one.
    `widest`: by the name of a global tensor, the most rows that any parameter that holds a part of it has."""

    name: str
    buffer: FlatBuffer
    tensors: Sequence[Values]
    additive: Rows | None = None
    replica: Rows | None = None
    summed: bool = False
    absorbs: str = ""
    widest: Mapping[str, int] = {}

    def record(self, slot: Slot) -> ParamRecord:
        """Returns where a parameter's state lies in the global tensor that a checkpoint holds."""
        rows = self.additive or self.replica
        return slot.record if rows is None else row_of(slot.record, *rows)

    def saved(self, slot: Slot, low: int, high: int) -> Iterator[tuple[ParamRecord, Values]]:
        """Yields what a checkpoint holds of elements low to high: their record and values, and zeros for rows that
        this parameter does not have and another part of its global tensor has."""
        values = self.values(slot, low, high)
        if self.additive is None:
            yield self.record(slot), values
            return
        # The next backward changes a reducer's state while it is written.
        first, *others = self.additive.saved_as(self.widest.get(slot.record.name, self.additive.rows))
        yield row_of(slot.record, *first), plain(values).clone()
        for row in others:
            yield row_of(slot.record, *row), torch.zeros_like(plain(values))

    def clear(self, slot: Slot | None = None) -> None:
        """Sets the state, or that of one parameter, as it is in a new run."""
        for tensor in self.tensors if slot is None else [self.values(slot, *self.holds(slot))]:
            tensor.zero_()

    def holds(self, slot: Slot) -> tuple[int, int]:
        """Returns the range of a parameter's elements that this rank holds; it is empty if the second is not above the
        first."""
        low, high = self._covered(slot)
        return max(low, slot.start) - slot.start, min(high, slot.stop) - slot.start

    def values(self, slot: Slot, low: int, high: int) -> Values:
        """Returns elements low to high of a parameter, which this rank must hold."""
        at = slot.start - self._covered(slot)[0]
        return self.tensors[slot.bucket][at + low : at + high]

    def _covered(self, slot: Slot) -> tuple[int, int]:
        """The range of the buffer that the tensor of the slot's bucket covers: the bucket, this rank's share, or what
        it writes of that."""
        bucket, size = self.buffer.buckets[slot.bucket], self.tensors[slot.bucket].numel()
        ranges = [(bucket.start, bucket.stop), bucket.share, self.buffer.split.written(bucket.start, bucket.stop)]
        return next(each for each in ranges if each[1] - each[0] == size)


class SideState(NamedTuple):
    """A state that has a tensor of another shape for some parameters of a buffer: by the slot's id, the tensor and the
    record of where it lies in a global one. Ranks that the reducer sums over hold the same; those that sum a gradient
    further have a row each. A layout that cuts a parameter in another way begins with new ones (`draw`). `widest` is
    that of `State`."""

    name: str
    buffer: FlatBuffer
    held: dict[int, tuple[Tensor, ParamRecord]]
    rows: Rows
    draw: Callable[[Slot], None]
    additive: Rows | None = None
    replica: Rows | None = None
    widest: Mapping[str, int] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self.held.values()]

    @property
    def writes(self) -> bool:
        """Whether this rank is the first of those that hold the same."""
        split = self.buffer.split
        return split.shard == 0 and (split.stage > 0 or split.replica == 0)

    def record(self, slot: Slot) -> ParamRecord:
        return row_of(self.held[id(slot)][1], *self._rows_of(slot)[0])

    def saved(self, slot: Slot, low: int, high: int) -> Iterator[tuple[ParamRecord, Values]]:
        """Yields what a checkpoint holds of a parameter's tensor, which stands in every row that only others need."""
        for row in self._rows_of(slot):
            yield row_of(self.held[id(slot)][1], *row), self.values(slot, low, high).clone()

    def _rows_of(self, slot: Slot) -> list[Rows]:
        return list(self.rows.saved_as(self.widest.get(slot.record.name, self.rows.rows)))

    def clear(self, slot: Slot | None = None) -> None:
        for each in self.buffer.slots if slot is None else [slot]:
            if id(each) in self.held:
                self.draw(each)

    def holds(self, slot: Slot) -> tuple[int, int]:
        return 0, self.held[id(slot)][1].numel if id(slot) in self.held else 0

    def values(self, slot: Slot, low: int, high: int) -> Tensor:
        return self.held[id(slot)][0].view(-1)[low:high]


def with_widest_rows(states: Sequence[State | SideState]) -> Iterator[State | SideState]:
    """Yields the states of reducers, each with the most rows that any state of its name has for a global tensor."""
    widest: dict[str, dict[str, int]] = {}
    for state in states:
        rows = state.rows if isinstance(state, SideState) else state.additive
        if rows is not None:
            found = widest.setdefault(state.name, {})
            for slot in state.buffer.slots:
                found[slot.record.name] = max(rows.rows, found.get(slot.record.name, 1))
    yield from (state._replace(widest=widest.get(state.name, {})) for state in states)


def build_buffers(
    modules: Iterable[nn.Module],
    split_of: Callable[[BufferKey], Split],
    bucket_mib: float,
    units: dict[int, int] | None = None,
    grad_dtype: torch.dtype = torch.float32,
    params_at: tuple[str, Path] = ("none", Path()),
    seed: int = 0,
    mixed_in: tuple[Layout, int] | None = None,
    releases_grads: bool = False,
) -> tuple[list[FlatBuffer], dict[int, Slot]]:
    """Builds buffers for every parameter of the chunks, in the order of backward. Returns each parameter's slot too.
    `split_of` says how the ranks divide a buffer; `units` gives the number of a parameter's unit, by its id. A
    parameter without a record (of a module that is not ours) is taken to be whole, and the same on every rank.
    `requires_grad` decides whether a parameter is trained, and the record of its slot says the same. `mixed_in` is the
    layout, where the reducer mixes elements, and the reducer's `align`. `releases_grads` says that
    whole gradients in stages 0 and 1 have memory only from a step's backward to its update."""
    named: dict[int, NamedParameter] = {}
    for chunk, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if id(parameter) not in named:
                record = record_of(parameter) or foreign_record(name, parameter)
                record = replace(record, trained=parameter.requires_grad)
                unit = (units or {}).get(id(parameter), chunk)
                named[id(parameter)] = NamedParameter(f"{chunk}.{name}", parameter, record, unit)
    layout, align = mixed_in or (None, ALIGN)
    keyed = backward_order(
        named.values(), lambda item: BufferKey(item.parameter.dtype, *buffer_key(item.record, layout))
    )
    more = (grad_dtype, params_at, seed, releases_grads)
    buffers = [
        FlatBuffer(key, items, split_of(key), bucket_mib, *more, align if key.compressed else ALIGN)
        for key, items in keyed.items()
    ]
    return buffers, {id(slot.parameter): slot for buffer in buffers for slot in buffer.slots}


def regions(record: ParamRecord, low: int, high: int, values: Values) -> Iterator[tuple[Box, Values]]:
    """Yields the boxes of the global tensor that elements low to high of the local one hold, each with its part of
    `values`, which are those elements."""
    strides = torch.empty(record.local_shape, device="meta").stride()
    for box in global_boxes(record, low, high):
        at = sum(a * stride for a, stride in zip(box.local_start, strides, strict=True)) - low
        yield box, _strided(values, box.shape, strides, at)


def _strided(values: Values, shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> Values:
    if isinstance(values, PairedTensor):
        return values.both(lambda half: half.as_strided(shape, strides, half.storage_offset() + at))
    return values.as_strided(shape, strides, values.storage_offset() + at)


def foreign_record(name: str, parameter: nn.Parameter) -> ParamRecord:
    """Returns a record for a parameter of a module that is not ours, taken to be whole and the same on every rank."""
    return whole(name, tuple(parameter.shape), Init("given"), decay=parameter.dim() > 1, copies=("tp",))
