"""Contiguous parameter and gradient buffers: one for each dtype and set of axes to reduce over, cut into buckets.

Parameters become views of the parameter buffer, weight gradients are added straight into the gradient buffer, and a
bucket is what is reduced at once. Parameters lie in the order in which backward fills them. Each bucket is padded so
that the data-parallel ranks can split it evenly, whatever the ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.layout.params import Init, ParamRecord, whole
from meshwright.nn.parallel import record_of
from meshwright.nn.weight_grad import Sink
from meshwright.sharding.placement import backward_order, bucket_elements, place


class Key(NamedTuple):
    """What parameters of one buffer have in common."""

    dtype: torch.dtype
    data_axes: str
    partial: tuple[str, ...]


@dataclass
class Slot:
    """One parameter's place in its buffer."""

    name: str
    parameter: nn.Parameter
    record: ParamRecord
    start: int
    bucket: int
    sink: Sink = field(init=False)

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass
class Bucket:
    index: int
    start: int
    stop: int
    slots: list[Slot] = field(default_factory=list)


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients add up in float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FlatBuffer:
    """The parameters of one key, their gradients, and the buckets they are reduced in."""

    def __init__(
        self, key: Key, named: list[tuple[str, nn.Parameter, ParamRecord]], ranks: int, bucket_bytes: float
    ) -> None:
        self.key = key
        self.ranks = ranks
        dtype = grad_dtype(key.dtype)
        elements = bucket_elements(bucket_bytes, dtype.itemsize)
        places, bounds = place([p.numel() for _, p, _ in named], ranks, elements)
        device = named[0][1].device
        self.size = bounds[-1][1]
        self.params = torch.zeros(self.size, dtype=key.dtype, device=device)
        self.grads = torch.zeros(self.size, dtype=dtype, device=device)
        self.buckets = [Bucket(i, start, stop) for i, (start, stop) in enumerate(bounds)]
        self.slots: list[Slot] = []
        for (name, parameter, record), (start, bucket) in zip(named, places, strict=True):
            slot = Slot(name, parameter, record, start, bucket)
            view = self.params[start : slot.stop].view_as(parameter)
            view.copy_(parameter.data)
            parameter.data = view
            self.slots.append(slot)
            self.buckets[bucket].slots.append(slot)

    def grad_of(self, slot: Slot) -> Tensor:
        return self.grads[slot.start : slot.stop].view_as(slot.parameter)

    def runs(self, wanted: Iterable[Slot]) -> list[tuple[int, int]]:
        """Ranges that cover the wanted slots, neighbours joined across the padding between them (it is zero)."""
        chosen = {id(slot) for slot in wanted}
        ranges: list[tuple[int, int]] = []
        joined = False
        for slot, after in zip(self.slots, [*self.slots[1:], None], strict=True):
            end = self.size if after is None else after.start
            if id(slot) not in chosen:
                joined = False
            elif joined:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((slot.start, end))
                joined = True
        return ranges


def build_buffers(
    modules: Iterable[nn.Module], ranks_of: dict[str, int] | None, bucket_mib: float
) -> tuple[list[FlatBuffer], dict[int, Slot]]:
    """Buffers for every trainable parameter of the chunks, in the order of backward; and the slot of each parameter.

    `ranks_of` gives the number of ranks that split a bucket, by data axes. A parameter without a record (of a module
    that is not ours) is taken to be whole and the same on every rank but for the data.
    """
    named: dict[int, tuple[str, nn.Parameter, ParamRecord]] = {}
    for chunk, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in named:
                record = record_of(parameter) or foreign_record(name, parameter)
                named[id(parameter)] = (f"{chunk}.{name}", parameter, record)
    keyed = backward_order(named.values(), lambda item: Key(item[1].dtype, item[2].data_axes, item[2].partial))
    buffers = [
        FlatBuffer(key, items, (ranks_of or {}).get(key.data_axes, 1), bucket_mib * 2**20)
        for key, items in keyed.items()
    ]
    return buffers, {id(slot.parameter): slot for buffer in buffers for slot in buffer.slots}


def foreign_record(name: str, parameter: nn.Parameter) -> ParamRecord:
    """For a module that is not ours: its parameter is taken to be whole, and the same on every rank."""
    shape = tuple(parameter.shape)
    return whole(name, shape, Init("given"), decay=parameter.dim() > 1, copies=("tp",))
