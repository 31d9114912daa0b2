"""Contiguous parameter and gradient buffers: one for each dtype and set of axes to reduce over, cut into buckets.

Parameters become views of the parameter buffer, and weight gradients are added directly to the gradient buffer. A
bucket is reduced or gathered in one call. Parameters are in the order in which backward produces their gradients. Each
bucket is padded so that the data-parallel ranks can split it evenly, whatever the ZeRO stage.

The range of a bucket that a rank owns is its *share*: its ZeRO shard, or the whole bucket without ZeRO. Whole gradients
(stage 2), and whole parameters too (stage 3), exist only while they are used: their memory is released, but the tensors
and all views of them remain valid objects. In a step of one micro-batch, gradients appear while activations are freed.
So in stages 0 and 1 a bucket's gradients then have memory only from the first of them to the next step.
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

from meshwright.config.memory import Place
from meshwright.device import is_host
from meshwright.engine.sharding.offload import StateStore
from meshwright.engine.sharding.remainders import PairedTensor, Values, as_tensor
from meshwright.nn.parallel import draw_parameter, is_unallocated, record_of
from meshwright.nn.weight_grad import Sink
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Box, Init, ParamRecord, global_boxes, row_of, whole
from meshwright.spec.traffic.placement import (
    ALIGN,
    Split,
    UpdateKind,
    backward_order,
    bucket_elements,
    buffer_key,
    grad_bytes,
    place,
)

REDUCER = "reducer."  # the prefix of the names of a reducer's states
REPLICA_STATE = "replica."  # the prefix of states that differ between the replicas of `layout.replicas`
EMA = "ema"  # the name of the moving average of the weights
OUTER = "outer."  # the prefix of states of the synchronisation of these replicas


class BufferKey(NamedTuple):
    """The properties that all parameters of one buffer have in common."""

    dtype: torch.dtype
    data_axes: str
    partial: tuple[str, ...]
    trained: bool = True
    compressed: bool = False  # A reducer that mixes elements may sum the gradients.
    update: UpdateKind = UpdateKind()  # The rule that updates them.


class NamedParameter(NamedTuple):
    """A parameter that has no slot in a buffer yet. `unit` is the number of the unit that it is gathered with."""

    name: str
    parameter: nn.Parameter
    record: ParamRecord
    unit: int


@dataclass
class Slot:
    """One parameter's slot in its buffer. `view` and `grad` are its whole value and gradient.

    In stage 3 the value has memory only while it is used, and so has the gradient in a buffer that releases gradients.
    A frozen parameter has an empty gradient and no sink.
    """

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
    """A flat tensor whose memory can be released and allocated again, without replacing the tensor or its views.

    On an accelerator the storage is resized: its memory returns to torch's allocator while views keep pointing at the
    storage. On a CPU the tensor has separate pages that are returned to the system. Repeated allocation by the C
    library would fragment memory more and more.
    """

    def __init__(self, tensor: Tensor, pages: mmap.mmap | None = None) -> None:
        self.tensor, self.allocated = tensor, True
        self._pages = pages
        self._bytes = tensor.untyped_storage().nbytes()

    @classmethod
    def of(cls, size: int, dtype: torch.dtype, device: torch.device) -> ReleasableTensor:
        """Return a new tensor, filled with zeros."""
        if not is_host(device):
            return cls(torch.zeros(size, dtype=dtype, device=device))
        pages = mmap.mmap(-1, max(1, size * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Not every system has huge pages.
        with suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return cls(torch.frombuffer(pages, dtype=dtype, count=size), pages)

    def allocate(self) -> None:
        """Allocate the memory. Its contents are undefined until they are written."""
        if not self.allocated and self._pages is None:
            self.tensor.untyped_storage().resize_(self._bytes)
        self.allocated = True

    def release(self) -> None:
        """Release the memory. Views stay valid objects, but must not be read or written before `allocate`."""
        if self._pages is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)
        self.allocated = False


@dataclass(eq=False, repr=False)
class Bucket:
    """A range of a buffer that is reduced or gathered in one call.

    `share` is the range of the buffer that this rank owns, and `own_*` are the tensors of that range. Their memory is
    never released, except that of `own_grads` in stages 0 and 1.
    """

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
        """Allocate the whole weights, and make the model's parameters views of them again."""
        self.params.allocate()
        for slot in self.slots:
            slot.parameter.data = slot.view

    def release_params(self) -> None:
        """Release the whole weights. The parameters become empty, so that no code reads released memory."""
        for slot in self.slots:
            slot.parameter.data = slot.view.new_empty(0)
        self.params.release()

    def allocate_grads(self) -> None:
        """Allocate the whole gradients if they have no memory, with zeros in the padding between parameters."""
        if not self.grads.allocated:
            self.grads.allocate()
            # New memory has undefined contents, and the padding is reduced together with the gradients.
            for gap in self._gaps:
                gap.zero_()

    @cached_property
    def _gaps(self) -> list[Tensor]:
        """The padding between the gradients of the parameters and after the last one."""
        gaps, at = [], self.start
        for start, stop in [*((s.start, s.stop) for s in self.slots), (self.stop, self.stop)]:
            if start > at:
                gaps.append(self.grads.tensor[at - self.start : start - self.start])
            at = stop
        return gaps


class FlatBuffer:
    """The parameters of one key, their gradients, and the buckets in which they are reduced."""

    def __init__(
        self,
        key: BufferKey,
        named: list[NamedParameter],
        split: Split,
        bucket_mib: float,
        grad_dtype: torch.dtype,
        params_at: tuple[Place, Path],
        seed: int,
        releases_grads: bool,
        align: int = ALIGN,
    ) -> None:
        """Allocate the buffer and move the parameters into it. They begin at multiples of `align` elements.

        `params_at` says where owned weights are stored in stage 3: on the device, in host memory or in a file.
        """
        self.key, self.split = key, split
        self.releases_grads = key.trained and (split.stage >= 2 or releases_grads)
        dtype = key.dtype if grad_bytes(key.dtype.itemsize, grad_dtype.itemsize) == key.dtype.itemsize else grad_dtype
        elements = bucket_elements(bucket_mib, dtype.itemsize, split.ranks)
        units = [item.unit for item in named] if split.stage == 3 else None
        places, bounds = place([item.record.numel for item in named], split.ranks, elements, units, align)
        self.device = named[0].parameter.device
        self.size = bounds[-1][1]
        self.slots: list[Slot] = []
        # `params` and `grads` are memory that is never released: the whole buffer, or this rank's shards in sequence.
        sizes = [(stop - start) // split.shards for start, stop in bounds]
        self.store = StateStore(sizes, key.dtype, self.device, *params_at) if split.stage == 3 else None
        self.params = torch.zeros(0 if split.stage == 3 else self.size, dtype=key.dtype, device=self.device)
        lasting_grads = self.size
        if split.stage >= 2:
            lasting_grads = self.size // split.shards
        elif self.releases_grads:
            # In stages 0 and 1 shards are views of the whole gradients, and those are released.
            lasting_grads = 0
        self.grads = torch.zeros(lasting_grads if key.trained else 0, dtype=dtype, device=self.device)
        self.buckets: list[Bucket] = []
        placed = list(zip(named, places, strict=True))
        for number, (start, stop) in enumerate(bounds):
            bucket = self._bucket(number, start, stop)
            self.buckets.append(bucket)
            self._add_parameters(bucket, [(item, at) for item, (at, where) in placed if where == number], seed)

    def _bucket(self, index: int, start: int, stop: int) -> Bucket:
        low, high = share = self.split.share(start, stop)
        # In stages 2 and 3, `self.grads` has only this rank's shards, one after the other.
        own = slice(start // self.split.shards, stop // self.split.shards)
        params = ReleasableTensor(self.params[start:stop])
        own_params = self.params[low:high]
        grads = ReleasableTensor(self.grads[start:stop])
        own_grads = self.grads[low:high]
        if self.split.stage == 3:
            assert self.store is not None
            params = ReleasableTensor.of(stop - start, self.params.dtype, self.device)
            own_params = self.store.shares[index]
        if self.releases_grads:
            grads = ReleasableTensor.of(stop - start, self.grads.dtype, self.device)
            own_grads = self.grads[own] if self.split.stage >= 2 else grads.tensor[low - start : high - start]
        return Bucket(self, index, start, stop, share, params, grads, own_params, own_grads)

    def _add_parameters(self, bucket: Bucket, named: list[tuple[NamedParameter, int]], seed: int) -> None:
        """Give parameters their slots, and copy (or draw) their values into the bucket.

        Memory that does not persist in this ZeRO stage is then released, so that at most one bucket is whole at any
        time.
        """
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
        """The bytes of the gradients that an update needs: those of this rank's shards, or all in stages 0 and 1."""
        whole = [bucket.grads.tensor for bucket in self.buckets if self.releases_grads and self.split.stage < 2]
        return self.grads.nbytes + sum(grads.nbytes for grads in whole)

    def runs(self, wanted: Iterable[Slot]) -> list[tuple[Bucket, int, int]]:
        """Return ranges of this rank's shards that cover the wanted slots.

        A range is (bucket, start, stop), counted from the first element of the shard. Neighbours are joined across the
        padding between them, which is zero.
        """
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


class StateRows(NamedTuple):
    """This rank's row, and the number of rows, of a state that has one row for each of several ranks."""

    row: int
    rows: int

    def saved_as(self, rows: int) -> Iterator[StateRows]:
        """Yield this row among `rows`, and then the additional rows that this rank has to fill.

        Several parameters may hold slices of one global tensor (query rows and copied key-value rows), and one of them
        may have fewer rows than another. Its ranks then also fill the rows `row + self.rows`, `row + 2 * self.rows` and
        so on, so that together they fill all.
        """
        yield from (StateRows(row, rows) for row in range(self.row, rows, self.rows))


PARAM = "param"  # the state of master weights or, without them, of the weights


class State(NamedTuple):
    """One kind of state of a buffer, as a checkpoint holds it: one tensor per bucket, of this rank's shard.

    With `additive` each rank has a separate row, which may cover the whole bucket. With `replica` each replica of
    `layout.replicas` has a row; a run with another number of replicas begins with the mean of the rows or, if they are
    `summed`, with their sum. `absorbs` names another kind of state that is added to this one if the run has no such
    state. `begins` are the values that it has in a new run, if these are not zeros. `widest` has, by the name of a
    global tensor, the most rows of any parameter that holds a slice of it.
    """

    name: str
    buffer: FlatBuffer
    tensors: Sequence[Values]
    additive: StateRows | None = None
    replica: StateRows | None = None
    summed: bool = False
    absorbs: str = ""
    begins: Sequence[Values] = ()
    widest: Mapping[str, int] = {}

    def record(self, slot: Slot) -> ParamRecord:
        """Return the record of a parameter's state in the global tensor that a checkpoint holds."""
        rows = self.additive or self.replica
        return slot.record if rows is None else row_of(slot.record, *rows)

    def own_record(self, slot: Slot) -> ParamRecord:
        """Return the record in a checkpoint without replicas, of a state that is not additive."""
        return slot.record

    def saved_values(self, slot: Slot, low: int, high: int) -> Iterator[tuple[ParamRecord, Values]]:
        """Yield the records and values that a checkpoint holds for elements low to high.

        Rows that this parameter does not have, but another slice of its global tensor has, are zeros.
        """
        values = self.values(slot, low, high)
        if self.additive is None:
            yield self.record(slot), values
            return
        # The checkpoint is written while the next backward changes a reducer's state, so a copy is needed.
        first, *others = self.additive.saved_as(self.widest.get(slot.record.name, self.additive.rows))
        yield row_of(slot.record, *first), as_tensor(values).clone()
        for row in others:
            yield row_of(slot.record, *row), torch.zeros_like(as_tensor(values))

    def clear(self, slot: Slot | None = None) -> None:
        """Reset the state, or that of one parameter, to its value in a new run."""
        reset = self if not self.begins else self._replace(tensors=self.begins)
        pairs = list(zip(self.tensors, reset.tensors, strict=True))
        if slot is not None:
            held = self.holds(slot)
            pairs = [(self.values(slot, *held), reset.values(slot, *held))]
        for tensor, begin in pairs:
            if self.begins:
                tensor[:] = as_tensor(begin)
            else:
                tensor.zero_()

    def holds(self, slot: Slot) -> tuple[int, int]:
        """Return the range (low, high) of a parameter's elements that this rank holds; it is empty if high <= low."""
        low, high = self._covered_range(slot)
        return max(low, slot.start) - slot.start, min(high, slot.stop) - slot.start

    def values(self, slot: Slot, low: int, high: int) -> Values:
        """Return elements low to high of a parameter, which this rank must hold."""
        at = slot.start - self._covered_range(slot)[0]
        return self.tensors[slot.bucket][at + low : at + high]

    def _covered_range(self, slot: Slot) -> tuple[int, int]:
        """Return the range of the buffer that the tensor of the slot's bucket covers.

        It is the bucket, this rank's share, or the part of the share that this rank writes to checkpoints.
        """
        bucket = self.buffer.buckets[slot.bucket]
        size = self.tensors[slot.bucket].numel()
        ranges = [(bucket.start, bucket.stop), bucket.share, self.buffer.split.written(bucket.start, bucket.stop)]
        return next((low, high) for low, high in ranges if high - low == size)


class SideState(NamedTuple):
    """A state with tensors whose shapes differ from those of the parameters.

    `held` has, by the slot's id, the tensor and its record in a global tensor. The ranks that the reducer sums over
    hold equal tensors; ranks that sum the gradient further have a row each. A layout that shards a parameter in another
    way begins with new tensors (`draw`). `widest` is the same as in `State`.
    """

    name: str
    buffer: FlatBuffer
    held: dict[int, tuple[Tensor, ParamRecord]]
    rows: StateRows
    draw: Callable[[Slot], None]
    additive: StateRows | None = None
    replica: StateRows | None = None
    widest: Mapping[str, int] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self.held.values()]

    @property
    def writes(self) -> bool:
        """True if this rank is the first of the ranks that hold equal tensors."""
        split = self.buffer.split
        return split.shard == 0 and (split.stage > 0 or split.replica == 0)

    def record(self, slot: Slot) -> ParamRecord:
        return row_of(self.held[id(slot)][1], *self._rows_of(slot)[0])

    def own_record(self, slot: Slot) -> ParamRecord:
        return self.record(slot)

    def saved_values(self, slot: Slot, low: int, high: int) -> Iterator[tuple[ParamRecord, Values]]:
        """Yield the records and values that a checkpoint holds for a parameter's tensor.

        Rows that only other slices of the global tensor have get copies of it.
        """
        for row in self._rows_of(slot):
            yield row_of(self.held[id(slot)][1], *row), self.values(slot, low, high).clone()

    def _rows_of(self, slot: Slot) -> list[StateRows]:
        return list(self.rows.saved_as(self.widest.get(slot.record.name, self.rows.rows)))

    def clear(self, slot: Slot | None = None) -> None:
        for cleared in self.buffer.slots if slot is None else [slot]:
            if id(cleared) in self.held:
                self.draw(cleared)

    def holds(self, slot: Slot) -> tuple[int, int]:
        return 0, self.held[id(slot)][1].numel if id(slot) in self.held else 0

    def values(self, slot: Slot, low: int, high: int) -> Tensor:
        return self.held[id(slot)][0].view(-1)[low:high]


def with_widest_rows(states: Sequence[State | SideState]) -> Iterator[State | SideState]:
    """Yield the states of reducers, each with the most rows that any state of its name has for a global tensor."""
    widest: dict[str, dict[str, int]] = {}
    for state in states:
        rows = state.rows if isinstance(state, SideState) else state.additive
        if rows is not None:
            most_rows = widest.setdefault(state.name, {})
            for slot in state.buffer.slots:
                most_rows[slot.record.name] = max(rows.rows, most_rows.get(slot.record.name, 1))
    yield from (state._replace(widest=widest.get(state.name, {})) for state in states)


def build_buffers(
    modules: Iterable[nn.Module],
    split_of: Callable[[BufferKey], Split],
    bucket_mib: float,
    units: dict[int, int] | None = None,
    grad_dtype: torch.dtype = torch.float32,
    params_at: tuple[Place, Path] = (Place.DEVICE, Path()),
    seed: int = 0,
    mixed_in: tuple[Layout, int] | None = None,
    releases_grads: bool = False,
) -> tuple[list[FlatBuffer], dict[int, Slot]]:
    """Build buffers for all parameters of the chunks, in the order of backward. Return them and each parameter's slot.

    A parameter without a record (of a user's module) is assumed to be whole and equal on every rank. `requires_grad`
    decides whether a parameter is trained, and the record of its slot is set accordingly.

    `split_of` says how the ranks divide a buffer. `units` has the number of a parameter's unit, by the parameter's id.
    `mixed_in` is (layout, align) of a reducer that mixes elements, or None. `releases_grads` says that whole gradients
    in stages 0 and 1 have memory only from a step's backward to its update.
    """
    named: dict[int, NamedParameter] = {}
    for chunk, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            # A parameter that several chunks share gets one slot.
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
    """Yield the boxes of the global tensor that elements low to high of the local tensor cover, with their values.

    `values` are those elements.
    """
    strides = torch.empty(record.local_shape, device="meta").stride()
    for box in global_boxes(record, low, high):
        at = sum(a * stride for a, stride in zip(box.local_start, strides, strict=True)) - low
        yield box, _strided(values, box.shape, strides, at)


def _strided(values: Values, shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> Values:
    if isinstance(values, PairedTensor):
        return values.both(lambda half: half.as_strided(shape, strides, half.storage_offset() + at))
    return values.as_strided(shape, strides, values.storage_offset() + at)


def foreign_record(name: str, parameter: nn.Parameter) -> ParamRecord:
    """Return a record for a parameter of a user's module, which is assumed to be whole and equal on every rank."""
    return whole(name, tuple(parameter.shape), Init("given"), decay=parameter.dim() > 1, copies=("tp",))
