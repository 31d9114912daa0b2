"""Whether a step's numbers allow its update. What decides stands where the sums are, so that an accelerator holds back
an update by itself while the host, which runs ahead, does not know of it yet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.engine.losses import Normalisation, StepSums
from meshwright.engine.optim.scaling import gradient_scaling


class Gate:
    """Holds the update of a step whose loss or gradient norm is above a bound or, with `nonfinite`, not finite; and of
    all steps after it that were begun before somebody knew, so that the weights stay as they were before the bad step.
    `release` lets updates pass again."""

    def __init__(self, terms: int) -> None:
        self.terms = terms
        self.active = self.nonfinite = False
        self.loss_bound = self.norm_bound = math.inf
        self._held: Tensor | None = None  # whether one was held since the last release

    def release(self) -> None:
        self._held = None

    def pass_on(self, sums: StepSums, normalisation: Normalisation) -> tuple[StepSums, Tensor | None]:
        """Returns the sums that an update may be made of, in which a held step has an infinite gradient, so that
        nobody learns from it; and whether it is held, as a number."""
        if not self.active:
            return sums, None
        n, all_sums = self.terms, sums.all
        counts = all_sums[n : 2 * n]
        loss = (all_sums[:n] / (counts + (counts <= 0))).sum()
        count = normalisation.count_on_device(all_sums[n])
        norm = gradient_scaling(count, all_sums[2 * n], normalisation.weight, 0.0).norm
        held = (loss > self.loss_bound) & loss.isfinite() | (norm > self.norm_bound) & norm.isfinite()
        if self.nonfinite:
            held = held | ~loss.isfinite() | ~norm.isfinite()
        held = held if self._held is None else held | self._held
        self._held = held
        gated = all_sums.clone()
        gated[2 * n] = torch.where(held, math.inf, all_sums[2 * n])
        return StepSums(gated, gated), held.double()
