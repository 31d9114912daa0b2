"""The first tensor of a step that is not finite: the step is computed once more, without an update, and every module's
results and input gradients are looked at. Slow, and only asked for when a step is bad twice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from meshwright.engine.compiling import blocks_one_by_one
from meshwright.engine.marks import BACKWARD, FORWARD, Found, unit_places
from meshwright.engine.step import Trainer
from meshwright.nn.inputs import Inputs


def first_bad(trainer: Trainer) -> Found | None:
    """What was the first on this rank, named by its module. All ranks must call it together."""
    finder = _Finder(trainer)
    handle = register_module_forward_hook(finder.passed)
    try:
        # Hooks of modules inside a graph are not called.
        with torch.compiler.set_stance("force_eager"), blocks_one_by_one(trainer.modules):
            trainer.gradients()
    finally:
        handle.remove()
    if finder.found is None and trainer.marks is not None:  # weight gradients have no module
        return trainer.marks.not_finite(trainer.marks.steps[trainer.step_number + 1])
    return finder.found


class _Finder:
    def __init__(self, trainer: Trainer) -> None:
        self.streams = trainer.ctx.parallel.streams
        self.found: Found | None = None
        self.places: dict[int, tuple[int, str]] = {}
        for unit, order, name, _ in unit_places(trainer.ctx, trainer.modules):
            for inner, part in unit.named_modules():
                self.places[id(part)] = order, f"{name}.{inner}" if inner else name

    def passed(self, module: nn.Module, given: Any, result: Any) -> None:
        """Inner modules are called back before those that they are in, so the first one found is the innermost."""
        if id(module) not in self.places:
            return
        self._look(FORWARD, module, self.streams.where[1], *_tensors(result))
        for x in _tensors(given):
            if x.requires_grad:
                x.register_hook(partial(self._look, BACKWARD, module, self.streams.where[1]))

    def _look(self, direction: str, module: nn.Module, micro_batch: int, *xs: Tensor) -> None:
        if self.found is None and any(not bool(x.isfinite().all()) for x in xs):
            order, name = self.places[id(module)]
            self.found = Found(direction, order, name, micro_batch)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value.detach() if not value.requires_grad else value
    elif isinstance(value, Inputs):
        yield from _tensors([*value.streams.values()])
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
