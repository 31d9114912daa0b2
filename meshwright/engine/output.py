"""The output of a stage's forward: tensors for the next stage, terms of the loss, and values to monitor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meshwright.errors import UserError

LOSS = "loss"  # The only term that may be used without declaring it.

Number = float | Tensor


@dataclass(frozen=True)
class Term:
    """One term of the loss in one micro-batch.

    The loss is the sum over terms of weight x sum / count, with sum and count over the whole global batch. Every
    tensor-parallel rank returns the whole sum.
    """

    name: str
    sum: Tensor
    count: Tensor | int | float
    weight: float = 1.0


@dataclass(frozen=True)
class Ratio:
    """A monitored value that is a ratio, such as an accuracy. Its `count` may differ between micro-batches."""

    sum: Number
    count: Number


@dataclass(frozen=True)
class StageOutput:
    """The full form of the value that `forward_step` may return from any stage."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # passed on to the next stage
    terms: Sequence[Term] = ()
    monitored: Mapping[str, Any] = field(default_factory=dict)


def to_output(result: Any) -> StageOutput:
    """Convert the return value of `forward_step` to a StageOutput.

    Its short forms are a dict of tensors to pass on, and a tuple (loss sum, count, monitored values).
    """
    if isinstance(result, StageOutput):
        return result
    if isinstance(result, tuple) and len(result) == 3:
        loss_sum, count, monitored = result
        return StageOutput({}, [Term(LOSS, loss_sum, count)], monitored)
    if isinstance(result, Mapping):
        return StageOutput(result)
    raise UserError(
        f"forward_step returned a {type(result).__name__}: return a dict of the tensors to pass on, the tuple "
        "(loss sum, count, monitored) or a StageOutput"
    )


@dataclass
class TermTotal:
    """A term summed over micro-batches. `weighted` is the sum of the values times the term's weight."""

    sum: Number = 0.0
    count: Number = 0.0
    weighted: Number = 0.0

    def add(self, term: Term) -> None:
        value = term.sum.detach().double()
        self.sum = self.sum + value
        self.weighted = self.weighted + (value if term.weight == 1 else term.weight * value)
        self.count = self.count + _wide(term.count)


@dataclass
class Totals:
    """The outputs of this rank's stages, summed over its micro-batches."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    terms: dict[str, TermTotal] = field(default_factory=lambda: defaultdict(TermTotal))
    monitored: dict[str, Number] = field(default_factory=lambda: defaultdict(float))
    times: dict[str, Number] = field(default_factory=lambda: defaultdict(float))  # the divisors of `monitored`

    def add(self, output: StageOutput) -> None:
        for term in output.terms:
            self.terms[term.name].add(term)
        for name, value in output.monitored.items():
            share = value if isinstance(value, Ratio) else Ratio(value, 1.0)
            self.monitored[name] = self.monitored[name] + _wide(share.sum)
            self.times[name] = self.times[name] + _wide(share.count)


def _wide(value: Any) -> Number:
    return value.detach().double() if isinstance(value, Tensor) else float(value)
