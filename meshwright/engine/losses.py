"""The loss as a list of terms: the sum over terms of weight x sum / count, each over the whole global batch.

A count is known for certain only after the last micro-batch. So there are two ways to divide by it:

- One term, named "loss", needs no declaration. Its gradient is stored as a sum with a nominal weight, its count is
  summed together with the loss after backward, and the update divides by it. Nothing is communicated in advance.
- Any other list is declared by `loss_counts(sample) -> {name: count}`, a pure function of a sample. At the beginning
  of a step the counts of all its samples are summed over the world, and each term's gradient is divided by its count
  before the terms are added. That costs one small all-reduce that the host waits for, and the reader holds all
  micro-batches of the step meanwhile. The counts of forward are checked against the declared ones. Built-in models
  whose loss has several terms declare them (`StageModule.loss_counts`).

Terms that a model's blocks add (`StageModule.losses`) count the tokens of "loss" once in each block. Their counts are
multiples of the count of "loss", so they need no declaration either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.engine.context import Context
from meshwright.engine.executor import Seeds
from meshwright.engine.optim.scaling import gradient_scaling
from meshwright.engine.output import LOSS, TermTotal, Totals
from meshwright.errors import UserError
from meshwright.spec.layout.layout import REPLICAS
from meshwright.spec.traffic.counts import sums_length


@dataclass(frozen=True)
class Normalisation:
    """The divisor that turns the stored gradient into the true one: weight x count.

    `counts` are the counts of the declared terms in this step. The stored gradient is then already divided by them;
    without them the count comes from the sums. `blocks` has the number of blocks that add each of the model's terms.
    """

    weight: float
    counts: Mapping[str, float] | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)

    def gradient_factor(self, name: str) -> float:
        """Return the factor of a term's sum in the stored gradient. A term with a count of 0 contributes nothing."""
        if name in self.blocks:
            return self.gradient_factor(LOSS) / self.blocks[name]
        if self.counts is None:
            if name != LOSS:
                raise UserError(f"the loss's term '{name}' is not declared: {_DECLARE}")
            return self.weight
        if name not in self.counts:
            raise UserError(f"the loss's term '{name}' is not among {', '.join(self.counts)}: {_DECLARE}")
        return self.weight / self.counts[name] if self.counts[name] else 0.0

    def seeds(self) -> Seeds:
        known = self.counts is None or LOSS in self.counts
        # A seed of 0 is not announced, because a gradient of zeros looks like a missing one.
        return Seeds(self.gradient_factor, (self.gradient_factor(LOSS) or None) if known else None)

    def count(self, tokens: float) -> float:
        """Return the divisor of the stored gradient apart from the weight, or 0 if nothing was counted."""
        return tokens if self.counts is None else float(any(self.counts.values()))

    def count_on_device(self, tokens: Tensor) -> Tensor:
        """Return the same number as a tensor that the device fills in, since a copy would make the host wait."""
        return tokens if self.counts is None else tokens.new_full((), self.count(0.0))


_DECLARE = "pass loss_counts to pretrain, which says from a sample what each term counts"


def declared_counts(ctx: Context, names: Sequence[str], own: Mapping[str, float]) -> dict[str, float]:
    """Return the declared counts of a step, summed over the ranks of one replica. `own` are this rank's counts.

    One rank of each pipeline counts; the others contribute zeros.
    """
    counted = [own.get(name, 0.0) for name in names]
    # A rank alone needs no sum. Reading one would make the host wait for the device, and it could not launch ahead.
    if ctx.mesh.inner.alone:
        return dict(zip(names, counted, strict=True))
    vector = torch.tensor(counted, dtype=torch.float64)
    with ctx.ledger.phase("data"):
        vector = ctx.device.upload(vector)
        ctx.mesh.inner.all_reduce(vector)
    return dict(zip(names, ctx.device.download(vector).read(), strict=True))


def sums_over_world(
    ctx: Context, totals: Totals, names: Sequence[str], squares: Tensor | float = 0.0, group: Group | None = None
) -> Tensor:
    """Sum the loss of a step over ranks with one small all-reduce, in the format of `sums_length`.

    It holds the terms' weighted sums, their counts, the squared gradient norm and, if there are several terms, their
    plain sums. All tensor-parallel ranks of a stage have the same terms, so only the first one contributes them.
    """
    vector = torch.zeros(sums_length(len(names)), dtype=torch.float64, device=ctx.device.torch)
    if ctx.mesh.tp.index <= 0:
        for i, name in enumerate(names):
            term = totals.terms.get(name, TermTotal())
            vector[i], vector[len(names) + i] = term.weighted, term.count
            if len(names) > 1:
                vector[2 * len(names) + 1 + i] = term.sum
    vector[2 * len(names)] = squares
    (ctx.mesh.world if group is None else group).all_reduce(vector)
    return vector


class StepSums(NamedTuple):
    """The sums of a step's loss, tokens and squared norm.

    `own` is over the ranks of one replica, and `all` over all ranks, which is reported. With several replicas, the norm
    of `all` is the root mean square of the replicas' norms. `tokens` has the number of tokens that each replica has
    learned from; it is zero for a replica whose gradient is not finite.
    """

    own: Tensor
    all: Tensor
    tokens: Tensor | None = None


def sums_of_step(
    ctx: Context, totals: Totals, names: Sequence[str], squares: Tensor, divided: bool = False
) -> StepSums:
    """Sum over the ranks of each replica with one small all-reduce and, if there are several, over the replicas.

    `divided` means that the stored gradient is divided by the counts already, as it is if the terms are declared.
    """
    own = sums_over_world(ctx, totals, names, squares, ctx.mesh.inner)
    replicas = ctx.layout.replicas
    if replicas == 1:
        return StepSums(own, own)
    vector = torch.cat([own, own.new_zeros(replicas)])
    # The reported norm is the root mean square over the replicas. A stored gradient that is not divided yet will be
    # divided by the tokens of all replicas, although each replica has only about 1 / replicas of them.
    vector[2 * len(names)] *= 1 / replicas if divided else replicas
    vector[own.numel() + ctx.mesh.replica] = own[len(names)]
    ctx.mesh.group(REPLICAS).all_reduce(vector)
    summed, tokens = vector.split([own.numel(), replicas])
    return StepSums(own, summed, tokens * summed[2 * len(names)].isfinite())


@dataclass(frozen=True)
class Sums:
    """The result of `sums_over_world` on the host. `losses` are the means of the single terms if there are several."""

    loss: float
    tokens: float
    squares: float
    counts: dict[str, float]
    losses: dict[str, float]

    @staticmethod
    def read(numbers: Sequence[float], names: Sequence[str]) -> Sums:
        n = len(names)
        counts = list(numbers[n : 2 * n])
        divisors = [count if count > 0 else 1.0 for count in counts]
        loss = sum(weighted / divisor for weighted, divisor in zip(numbers[:n], divisors, strict=True))
        # With a single term there are no plain sums, so `means` is empty.
        means = [x / count if count else math.nan for x, count in zip(numbers[2 * n + 1 :], counts, strict=False)]
        by_name = dict(zip(names, counts, strict=True))
        return Sums(loss, counts[0], numbers[2 * n], by_name, dict(zip(names, means, strict=False)))

    def check_counts(self, declared: Mapping[str, float]) -> None:
        for name, count in declared.items():
            if not math.isclose(count, self.counts[name], rel_tol=1e-9):
                raise UserError(
                    f"loss_counts said {count:g} for the term '{name}' and forward_step counted {self.counts[name]:g}: "
                    "both must count the same"
                )


class UpdateGate:
    """Holds back the update of a step whose loss or gradient norm is above a bound or, with `nonfinite`, not finite.

    Later steps that were launched before the host knew are held back too, so that the weights stay as they were before
    the bad step. `release` lets updates pass again. The decision is made on the device that has the sums: the host runs
    ahead and does not know of it yet.
    """

    def __init__(self, terms: int) -> None:
        self.terms = terms
        self.active = self.nonfinite = False
        self.loss_bound = self.norm_bound = math.inf
        self._held: Tensor | None = None  # true if an update was held back since the last release

    def release(self) -> None:
        self._held = None

    def pass_on(self, sums: StepSums, normalisation: Normalisation) -> tuple[StepSums, Tensor | None]:
        """Return the sums to update from, and whether the step is held (1.0 or 0.0), or None if the gate is not active.

        A held step gets an infinite squared norm, so that no rank makes an update from it.
        """
        if not self.active:
            return sums, None
        n, all_sums = self.terms, sums.all
        counts = all_sums[n : 2 * n]
        # The divisor of a term without a count becomes 1, to avoid 0 / 0.
        loss = (all_sums[:n] / (counts + (counts <= 0))).sum()
        count = normalisation.count_on_device(all_sums[n])
        norm = gradient_scaling(count, all_sums[2 * n], normalisation.weight, 0.0).norm
        # The bounds only judge finite numbers; `nonfinite` decides about all others.
        held = (loss > self.loss_bound) & loss.isfinite() | (norm > self.norm_bound) & norm.isfinite()
        if self.nonfinite:
            held = held | ~loss.isfinite() | ~norm.isfinite()
        held = held if self._held is None else held | self._held
        self._held = held
        gated = all_sums.clone()
        gated[2 * n] = torch.where(held, math.inf, all_sums[2 * n])
        return StepSums(gated, gated), held.double()
