"""What a pipeline's chunk offers to those who run it: the executor, the batches, the sharding and the compiler."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.spec.model.part import LossTerm

LossCounts = Callable[[Mapping[str, Any]], Mapping[str, float]]  # of a sample: what each term of the loss counts in it
Receives = Mapping[str, tuple[Sequence[int], torch.dtype]]
# The tensors that a chunk passes on, and terms of the loss: name, sum, count, weight.
StageResult = tuple[Mapping[str, Tensor], Sequence[tuple[str, Tensor, Any, float]]]


@runtime_checkable
class StageModule(Protocol):
    """The contract of a chunk's module. One that offers all of it is used as it is; `stage_of` adapts any other."""

    @property
    def receives(self) -> Receives:
        """The named tensors that the chunk takes from the chunk before it, with shapes and dtypes."""

    @property
    def ungraded(self) -> Container[str]:
        """The names of tensors that pass between chunks and whose gradient does not come back."""

    @property
    def foreign(self) -> bool:
        """Whether its modules are not ours: which of their parameters get gradients may depend on the data."""

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The chunk's blocks by their numbers in the model, where it knows them."""

    @property
    def needs(self) -> set[str] | None:
        """The fields of a batch that the chunk reads; None stands for all of them."""

    @property
    def draws_by_key(self) -> bool:
        """Whether all random numbers of its forward are keyed (`nn.random.Streams`). For a module that draws from
        torch's default generator, that is seeded before each forward."""

    def announce(self, loss_weight: float | None) -> None:
        """Called before each forward with what backward will multiply the sum of the term "loss" by, or with None
        where that is not known, so that a loss may compute its gradient in forward."""

    def units(self) -> list[nn.Module] | None:
        """The parts whose weights are needed together, in the order of forward; None: the chunk is one."""

    def compiled_blocks(self) -> list[nn.Module]:
        """The parts that are compiled, each as one graph, where the config asks for that."""

    @property
    def losses(self) -> Sequence[tuple[LossTerm, int]]:
        """The terms that the model's blocks add to the loss, with the number of blocks that add each."""

    @property
    def loss_counts(self) -> LossCounts | None:
        """What each term of the loss counts in a sample, where the model's own loss has several."""


class _Adapted:
    """Adapts a module that is not ours: what it offers, and defaults for the rest."""

    draws_by_key = foreign = False
    ungraded: Container[str] = ()
    layers: Mapping[int, nn.Module] = MappingProxyType({})
    losses: Sequence[tuple[LossTerm, int]] = ()
    loss_counts: LossCounts | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def receives(self) -> Receives:
        found: Receives | None = getattr(self.module, "receives", None)
        if found is None:
            name = type(self.module).__name__
            raise UserError(
                f"{name} takes tensors from the stage before it and has no `receives`: give it a dict of each tensor's "
                "name to its (shape, dtype)"
            )
        return found

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
    """A chunk whose forward step is its own: our models, and those that transformers builds."""

    def step(self, batch: dict[str, Tensor], received: Mapping[str, Tensor]) -> StageResult:
        """Returns the tensors for the next chunk and the terms of the loss."""


def stage_of(module: nn.Module) -> StageModule:
    """Returns the module itself if it offers all of `StageModule`, else an adapter around it."""
    return module if isinstance(module, StageModule) else _Adapted(module)
