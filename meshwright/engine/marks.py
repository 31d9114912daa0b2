"""Norms that localise a bad step to a rank and a layer.

The norms are those of each unit's output, of the gradient that comes back to it, and of each rank's weight gradients
before they are summed. They are read only after a bad step, to find the first rank and layer that went wrong. They are
kept for two steps, since the loop runs one step ahead, and stay on the device until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.engine.context import Context
from meshwright.engine.sharding.buffers import Bucket
from meshwright.models.stage import stage_of
from meshwright.nn.parallel import record_of
from meshwright.nn.unit import MARK, MARK_SENT_BACK
from meshwright.spec.schedule.kinds import placement_of

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weight gradients"
DIRECTIONS = (FORWARD, BACKWARD, WEIGHTS)
# The relative difference that is allowed when a step is computed again: accelerator kernels add in any order.
TOLERANCE = 1e-3


class Mark(NamedTuple):
    """One norm. `order` grows with the position in the model and is comparable between ranks."""

    direction: str
    order: int
    name: str
    micro_batch: int
    norm: Tensor


class MarkPlace(NamedTuple):
    """A mark without its norm, as it is sent to the other ranks."""

    direction: str
    order: int
    name: str
    micro_batch: int

    @property
    def sooner(self) -> tuple[int, int]:
        """The key that sorts marks by time: forward in model order, backward in reverse, then weight gradients."""
        back = self.direction == BACKWARD
        return DIRECTIONS.index(self.direction), -self.order if back else self.order

    @property
    def words(self) -> str:
        if self.direction == WEIGHTS:
            return f"the weight gradients of {self.name}"
        return f"the {self.direction} of {self.name}"


class UnitPlace(NamedTuple):
    """The position of a unit or of a chunk in the model, and its name.

    For a unit, `following` names the unit after it, which computes the gradient that comes back. For a chunk it names
    the chunk's first unit, which computes the gradient that the chunk sends back.
    """

    unit: nn.Module
    order: int
    name: str
    following: str


def chunk_places(ctx: Context, modules: Sequence[nn.Module]) -> Iterator[UnitPlace]:
    c = ctx.config
    places = placement_of(c.pipeline.schedule, c.layout.pp, c.layout.chunks)
    # The upper bits of an order are the stage, the lower 20 the unit in it, so orders of all ranks compare.
    stages = [number for number, (rank, _) in enumerate(places) if rank == ctx.pp_rank]
    for stage, module in zip(stages, modules, strict=True):
        units = stage_of(module).units()
        name = f"stage {stage}"
        yield UnitPlace(module, stage << 20, name, unit_name(module, units[0]) if units else name)


def unit_places(ctx: Context, modules: Sequence[nn.Module]) -> Iterator[UnitPlace]:
    for module, first, name, _ in chunk_places(ctx, modules):
        units = stage_of(module).units()
        named = [*(unit_name(module, unit) for unit in units), f"stage {(first >> 20) + 1}"] if units else [name, name]
        units = units or [module]
        for number, unit in enumerate(units):
            yield UnitPlace(unit, first + number + 1, named[number], named[number + 1])


def unit_name(module: nn.Module, unit: nn.Module) -> str:
    """Return a unit's name in the whole model, from the names of its parameters, or else its name in the chunk.

    A unit that only groups parts of a wrapped module has no name, and gets that of its first part.
    """
    records = [(name, record) for name, value in unit.named_parameters() if (record := record_of(value)) is not None]
    for name, record in records:
        if record.name.endswith(f".{name}"):
            return str(record.name).removesuffix(f".{name}")
    for name, part in module.named_modules():
        if part is unit:
            return str(name)
    return str(records[0][1].name.rpartition(".")[0]) if records else type(unit).__name__


class Marks:
    """The marks of this rank's last two steps. The constructor attaches itself to all units and chunks."""

    def __init__(self, ctx: Context, modules: Sequence[nn.Module]) -> None:
        self.streams = ctx.parallel.streams
        self.steps: dict[int, list[Mark]] = {}
        self._now: list[Mark] = []
        self._names: dict[nn.Module, str] = {}
        self._joined: dict[str, str] = {}  # the common name of units that run as one graph, by the first one's name
        for place in unit_places(ctx, modules):
            self._names[place.unit] = place.name
            setattr(place.unit, MARK, partial(self._record_outputs, place.order, place.name, place.following))
        for chunk in chunk_places(ctx, modules):
            setattr(chunk.unit, MARK_SENT_BACK, partial(self._came_back, chunk.order, chunk.following))

    def begin(self, step: int) -> None:
        """Begin to record a step, or begin anew if it is computed again."""
        self.steps = {number: marks for number, marks in self.steps.items() if number == step - 1}
        self._now = self.steps[step] = []

    def _record_outputs(self, order: int, name: str, following: str, passed: Any, first: nn.Module) -> None:
        """Record the output of a unit, or of several units from `first` to this one that ran as one graph."""
        begin = self._names[first]
        name = self._joined[begin] = name if begin == name else f"{begin} to {name}"
        x = passed[0] if isinstance(passed, tuple) else passed
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        micro_batch = self.streams.where[1]
        self._now.append(Mark(FORWARD, order, name, micro_batch, _norm(x.detach())))
        if x.requires_grad and x.dim():
            x.register_hook(partial(self._came_back, order, following, micro_batch))

    def _came_back(self, order: int, name: str, micro_batch: int, grad: Tensor) -> None:
        self._now.append(Mark(BACKWARD, order, self._joined.get(name, name), micro_batch, _norm(grad)))

    def reduces(self, bucket: Bucket, grads: Tensor) -> None:
        """Record this rank's gradients of a bucket before they are summed over ranks."""
        names = [slot.record.name for slot in bucket.slots]
        name = names[0] if len(names) == 1 else f"{names[-1]} to {names[0]}"
        self._now.append(Mark(WEIGHTS, bucket.index, name, -1, _norm(grads)))

    def not_finite(self, marks: Sequence[Mark]) -> MarkPlace | None:
        """Return the first mark whose norm is not finite, or None."""
        return _first(m for m, norm in zip(marks, _read(marks), strict=True) if not math.isfinite(norm))

    def first_difference(self, marks: Sequence[Mark], again: Sequence[Mark]) -> MarkPlace | None:
        """Return the first mark whose norm differed when the step was computed again, or None."""
        # Marks are matched by position, which needs equal numbers.
        if len(marks) != len(again):
            return None
        norms = zip(marks, _read(marks), _read(again), strict=True)
        return _first(mark for mark, a, b in norms if not math.isclose(a, b, rel_tol=TOLERANCE))


def _norm(x: Tensor) -> Tensor:
    # In 16 bits the norm would overflow (fp16) or lose most of its digits (bf16).
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float32 if x.element_size() < 4 else None)
    return norm


def _read(marks: Sequence[Mark]) -> list[float]:
    return torch.stack([mark.norm.double() for mark in marks]).tolist() if marks else []


def _first(marks: Iterable[Mark]) -> MarkPlace | None:
    found = [MarkPlace(*mark[:4]) for mark in marks]
    return min(found, key=lambda mark: mark.sooner, default=None)
