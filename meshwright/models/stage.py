"""The interface of a pipeline chunk to the code that runs it: the executor, the batches, the sharding, the compiler."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.spec.model.part import LossTerm

# A function that maps a sample to the count of each loss term in it.
LossCounts = Callable[[Mapping[str, Any]], Mapping[str, float]]
# The shape and dtype of each tensor that a chunk receives.
Receives = Mapping[str, tuple[Sequence[int], torch.dtype]]
# The tensors that a chunk passes on, and its terms of the loss: (name, sum, count, weight) each.
StageResult = tuple[Mapping[str, Tensor], Sequence[tuple[str, Tensor, Any, float]]]


@runtime_checkable
class StageModule(Protocol):
    """The contract of a chunk's module. A module that fulfils all of it is used as it is; `stage_of` adapts others."""

    @property
    def receives(self) -> Receives:
        """The named tensors that the chunk takes from the chunk before it, with shapes and dtypes."""

    @property
    def ungraded(self) -> Container[str]:
        """The names of the tensors that pass between chunks without a gradient coming back."""

    @property
    def foreign(self) -> bool:
        """True if the modules are not Meshwright's. Which of their parameters get gradients may depend on the data."""

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The chunk's blocks by their layer numbers in the model. Empty if the chunk does not know them."""

    @property
    def needs(self) -> set[str] | None:
        """The fields of a batch that the chunk reads, or None for all of them."""

    @property
    def draws_by_key(self) -> bool:
        """True if all random numbers of the forward are keyed (`nn.random.Streams`).

        For any other module, torch's default generator is seeded before each forward.
        """

    def announce(self, loss_weight: float | None) -> None:
        """Set the factor by which backward will multiply the sum of the term "loss", or None if it is not known.

        Called before each forward, so that a loss may compute its gradient in forward.
        """

    def units(self) -> list[nn.Module] | None:
        """Return the parts whose weights are gathered together, in the order of forward; None if the chunk is one."""

    def compiled_blocks(self) -> list[nn.Module]:
        """Return the parts that are compiled, each as one graph, if the config asks for compilation."""

    @property
    def losses(self) -> Sequence[tuple[LossTerm, int]]:
        """The terms that the model's blocks add to the loss, with the number of blocks that add each."""

    @property
    def loss_counts(self) -> LossCounts | None:
        """The function that counts each loss term in a sample, or None if the model's own loss has only one term."""


class _Adapted:
    """An adapter around a user's module, with defaults for the parts of `StageModule` that it lacks."""

    draws_by_key = foreign = False
    ungraded: Container[str] = ()
    layers: Mapping[int, nn.Module] = MappingProxyType({})
    losses: Sequence[tuple[LossTerm, int]] = ()
    loss_counts: LossCounts | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def receives(self) -> Receives:
        receives: Receives | None = getattr(self.module, "receives", None)
        if receives is None:
            name = type(self.module).__name__
            raise UserError(
                f"{name} takes tensors from the stage before it and has no `receives`: give it a dict of each tensor's "
                "name to its (shape, dtype)"
            )
        return receives

    @property
    def needs(self) -> set[str] | None:
        return getattr(self.module, "needs", None)

    def announce(self, loss_weight: float | None) -> None:
        pass

    def units(self) -> list[nn.Module] | None:
        return None

    def compiled_blocks(self) -> list[nn.Module]:
        return []


class StepModule(Protocol):
    """A chunk that defines its own forward step: Meshwright's models, and those that transformers builds."""

    def step(self, batch: dict[str, Tensor], received: Mapping[str, Tensor]) -> StageResult:
        """Return the tensors for the next chunk and the terms of the loss."""


def stage_of(module: nn.Module) -> StageModule:
    """Return the module itself if it fulfils all of `StageModule`, else an adapter around it."""
    return module if isinstance(module, StageModule) else _Adapted(module)
