"""The parts that an encoder such as BERT has in addition to those of a GPT. No torch.

These are token types, and heads on a few chosen rows of each sample: the rows whose tokens were masked, and the first
row. Because they are few, every tp rank holds all of them, even if ranks divide the tokens. `ChosenRowsOf` gives the
figures of a part that is applied to such rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.spec.layout.params import Init, whole
from meshwright.spec.model.gpt import second_table_factors
from meshwright.spec.model.linear import ZEROS, replicated_axes
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kernels,
    LossTerm,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)


@dataclass(frozen=True)
class TokenTypePart(Part):
    """A table of token types (which of two segments a token belongs to). Every tp rank holds the whole table."""

    types: int
    hidden: int
    init: Init

    def records(self, at: Coordinate, name: str) -> Records:
        return {"weight": whole(f"{name}.weight", (self.types, self.hidden), self.init, **replicated_axes(at))}

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        yield SavedTensor("token types", batch.rows(at) * 8)

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return second_table_factors(at, batch, kernels, self.hidden)


@dataclass(frozen=True)
class ChosenRowsPart(Part):
    """A selection of `count` rows of each sample. If tp ranks divide the tokens, each contributes the rows it holds.

    Split tokens: forward 1 all_reduce of the chosen rows. Plain: no communication.
    """

    count: int
    hidden: int

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return Work(moved=2.0 * batch.sequences * self.count * self.hidden * batch.element, kernels=4)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        if at.splits_tokens:
            payload = batch.sequences * self.count * self.hidden * batch.element
            yield Collective("forward", "tp", "all_reduce", payload)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the numbers of the rows and, with split tokens, a mask of the rows that this rank holds."""
        yield SavedTensor("rows", batch.sequences * self.count * (9 if at.splits_tokens else 8))


@dataclass(frozen=True)
class ChosenRowsOf(Part):
    """A part that is applied to `count` chosen rows of each sample. Every tp rank holds all of them."""

    part: Part
    count: int

    def _rows(self, at: Coordinate, batch: MicroBatch) -> tuple[Coordinate, MicroBatch]:
        return replace(at, sequence_parallel=False), replace(batch, seq=self.count)

    def records(self, at: Coordinate, name: str) -> Records:
        return self.part.records(replace(at, sequence_parallel=False), name)

    def losses(self) -> Iterable[LossTerm]:
        return self.part.losses()

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return self.part.work(*self._rows(at, batch), kernels)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterable[Collective]:
        return self.part.collectives(*self._rows(at, batch))

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterable[SavedTensor]:
        return self.part.saved(*self._rows(at, batch), kernels)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return self.part.workspace(*self._rows(at, batch), kernels)

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return self.part.factors(*self._rows(at, batch), kernels)


@dataclass(frozen=True)
class DensePart(Part):
    """A product [width, hidden] with a bias and an optional activation, which every tp rank computes completely."""

    hidden: int
    width: int
    activation: str  # an activation of nn/mlp.py, or tanh, or "" for none
    init: Init

    def records(self, at: Coordinate, name: str) -> Records:
        axes = replicated_axes(at)
        return {
            "weight": whole(f"{name}.weight", (self.width, self.hidden), self.init, **axes),
            "bias": whole(f"{name}.bias", (self.width,), ZEROS, decay=False, **axes),
        }

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        rows = batch.tokens(at)
        product = Product("dense", rows, self.width, self.hidden, precise=True)
        return Work((product,), moved=2.0 * rows * self.width * batch.element, kernels=2)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the product's input and, if there is an activation, its input or its result."""
        widths = self.hidden + (self.width if self.activation else 0)
        yield SavedTensor("dense", batch.tokens(at) * widths * batch.element)
