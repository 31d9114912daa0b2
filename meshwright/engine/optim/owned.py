"""States of whole matrices, which only the ranks that own a matrix keep (see `MatrixRule.matrix_states`).

A checkpoint holds such a state of a parameter as one vector: the values of its matrices one after the other, each in
row-major order. So a run on another layout, where other ranks own the matrices, finds the values of each matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.engine.optim.matrices import Matrix
from meshwright.engine.sharding.buffers import FlatBuffer, Slot, StateRows
from meshwright.engine.sharding.remainders import Values
from meshwright.spec.layout.params import Box, Init, ParamRecord, row_of

Shape = Callable[[int, int], tuple[int, ...]]  # the shape of a matrix's state, from its rows and columns


class Owned(NamedTuple):
    """A state of the matrices that this rank owns in one parameter.

    `record` places the tensor in the vector of the whole parameter. In `written` are only the matrices for which this
    rank is the first of the owners.
    """

    tensor: Tensor
    record: ParamRecord
    written: ParamRecord


class MatrixState(NamedTuple):
    """A state of whole matrices of a buffer. `held` has its tensors by the slot's id.

    With `replica` each replica of `layout.replicas` has a row. A run with another number of replicas begins with the
    first row: a mean of several bases is no basis.
    """

    name: str
    buffer: FlatBuffer
    held: dict[int, Owned]
    replica: StateRows | None = None
    additive: StateRows | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [owned.tensor for owned in self.held.values()]

    @property
    def writes(self) -> bool:
        """True if this rank is the first of the ranks that own the same matrices, apart from tensor-parallel ones."""
        return self.buffer.split.replica == 0

    def record(self, slot: Slot) -> ParamRecord:
        return self._in_row(self.held[id(slot)].record)

    def own_record(self, slot: Slot) -> ParamRecord:
        """Return the record in a checkpoint without replicas."""
        return self.held[id(slot)].record

    def saved_values(self, slot: Slot, low: int, high: int) -> Iterator[tuple[ParamRecord, Values]]:
        yield self._in_row(self.held[id(slot)].written), self.values(slot, low, high)

    def _in_row(self, record: ParamRecord) -> ParamRecord:
        return record if self.replica is None else row_of(record, *self.replica)

    def clear(self, slot: Slot | None = None) -> None:
        for tensor in self.tensors if slot is None else [self.held[id(slot)].tensor]:
            tensor.zero_()

    def holds(self, slot: Slot) -> tuple[int, int]:
        return 0, self.held[id(slot)].tensor.numel() if id(slot) in self.held else 0

    def values(self, slot: Slot, low: int, high: int) -> Tensor:
        return self.held[id(slot)].tensor[low:high]


def own_matrices(
    slot: Slot, matrices: Iterable[tuple[Matrix, bool]], shape: Shape, dtype: torch.dtype
) -> tuple[Owned, list[Tensor]]:
    """Return a state of zeros for some matrices of a parameter, and its views, one per matrix.

    Each matrix is given with whether this rank is the first of its owners.
    """
    record, boxes, shapes, size = slot.record, list[tuple[Box, bool]](), list[tuple[int, ...]](), 0
    for matrix, first in matrices:
        shapes.append(shape(*matrix.shape[-2:]))
        boxes.append((Box((_offset(record, matrix, shape),), (math.prod(shapes[-1]),), (size,)), first))
        size += math.prod(shapes[-1])
    tensor = torch.zeros(size, dtype=dtype, device=slot.parameter.device)
    total = math.prod(record.shape[:-2]) * _size(record, record.matrices, shape)
    placed = ParamRecord(record.name, (total,), (size,), tuple(box for box, _ in boxes if box.numel), Init("zeros"))
    written = replace(placed, boxes=tuple(box for box, first in boxes if box.numel and first))
    views = [tensor[box.local_start[0] :][: box.numel].view(s) for (box, _), s in zip(boxes, shapes, strict=True)]
    return Owned(tensor, placed, written), views


def _size(record: ParamRecord, heights: Iterable[int], shape: Shape) -> int:
    return sum(math.prod(shape(height, record.shape[-1])) for height in heights)


def _offset(record: ParamRecord, matrix: Matrix, shape: Shape) -> int:
    """Return the first element of a matrix in the vector that a checkpoint holds for its parameter."""
    stack = 0  # the number of the stack of matrices, such as an expert
    for at, size in zip(matrix.start[:-2], record.shape[:-2], strict=True):
        stack = stack * size + at
    above, row = list[int](), 0
    for height in record.matrices:
        if row >= matrix.start[-2]:
            break
        above.append(height)
        row += height
    return stack * _size(record, record.matrices, shape) + _size(record, above, shape)
