"""Compares the steps of a layout with those of one process: losses, norms, gradients and bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.config.sections import Config
from meshwright.plan.communication import predict_step, unplanned_axes


@dataclass(frozen=True)
class Verdict:
    """The differences between a layout and one process.

    `gradients` has the largest error of every parameter over all steps and ranks, in the order of the model.
    `first_step` is the first step with an error beyond the tolerance. `at_first` has the errors of that step alone,
    because all later gradients differ after a wrong update.
    """

    tolerance: float
    losses: tuple[tuple[float, float], ...]  # (one process, the layout) for each step.
    norms: tuple[tuple[float, float], ...]
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    first_step: int | None
    at_first: Mapping[str, float]
    # Wire bytes by axis: (planned, recorded). Planned bytes are None if they depend on the tokens.
    comm: Mapping[str, tuple[int | None, int]]
    # The relative change of the other documents' loss when the first one is replaced; None without packed documents.
    documents: float | None = None

    @property
    def differing_parameters(self) -> list[str]:
        """The parameters whose gradients differ, in the order of the model.

        If all gradients agree, these are the parameters whose values differ after the steps.
        """
        return [name for name, error in self._errors.items() if error > self.tolerance]

    @property
    def _errors(self) -> Mapping[str, float]:
        return self.parameters if self.first_step is None else self.at_first

    @property
    def worst(self) -> str:
        """The parameter with the largest error among those that differ, or an empty name if none differs."""
        return max(self.differing_parameters, key=lambda name: self._errors[name], default="")

    @property
    def complaints(self) -> list[str]:
        """One sentence per difference, parameters first."""
        complaints = []
        if names := self.differing_parameters:
            errors = self._errors
            what = "values after the steps" if self.first_step is None else f"gradients of step {self.first_step}"
            complaints.append(
                f"{len(names)} of {len(errors)} parameters differ in their {what}: the first is {names[0]} (off by "
                f"{errors[names[0]]:.1e}), the worst {self.worst} (off by {errors[self.worst]:.1e})"
            )
        for what, pairs in (("loss", self.losses), ("gradient norm", self.norms)):
            wrong = [step for step, (a, b) in enumerate(pairs, 1) if difference(a, b) > self.tolerance]
            if wrong:
                one, layout = pairs[wrong[0] - 1]
                complaints.append(f"the {what} of step {wrong[0]} is {layout:.9g}, and {one:.9g} on one process")
        for axis, (planned, recorded) in self.comm.items():
            if planned is not None and planned != recorded:
                complaints.append(f"a step sends {recorded:,} bytes over {axis}, and {planned:,} are planned")
        if self.documents is not None and not self.documents <= self.tolerance:
            complaints.append(
                f"documents of a sample see each other: replacing the first one changes the loss of the others by "
                f"{self.documents:.1e} of it"
            )
        return complaints


def difference(one: float, other: float) -> float:
    """Return the relative difference of two numbers, or infinity unless both are finite: two NaNs agree in nothing."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), 1e-300)


def judge(
    config: Config, world: int, tolerance: float, reference: Any, ranks: Sequence[Any], plans: bool = True
) -> Verdict:
    """Compare the steps of all ranks with those of one process and, with `plans`, the bytes with the plan's."""
    gradients = _largest(reference.names, [step for rank in ranks for step in rank.gradients])
    by_step = [_largest(reference.names, steps) for steps in zip(*(rank.gradients for rank in ranks), strict=True)]
    wrong = [number for number, errors in enumerate(by_step, 1) if max(errors.values()) > tolerance]
    first = wrong[0] if wrong else None
    one = ranks[0]
    comm: dict[str, tuple[int | None, int]] = {axis: (None, counts["wire_bytes"]) for axis, counts in one.comm.items()}
    if plans:
        # The plan already counts the values that the objective monitors.
        others = one.monitored - len(config.monitored_names)
        planned = predict_step(config, world, samples=one.samples, monitored=others)
        unknown = unplanned_axes(config)
        for axis in dict.fromkeys([*planned, *one.comm]):
            planned_bytes = planned[axis].wire_bytes if axis in planned else 0
            comm[axis] = (None if axis in unknown else planned_bytes, comm.get(axis, (None, 0))[1])
    moved = [rank.documents for rank in ranks if rank.documents is not None]
    return Verdict(
        tolerance, tuple(zip(reference.losses, one.losses, strict=True)),
        tuple(zip(reference.norms, one.norms, strict=True)), gradients,
        _largest(reference.names, [rank.parameters for rank in ranks]), first, by_step[first - 1] if first else {},
        comm, max(moved, default=None),
    )  # fmt: skip


def _largest(names: Sequence[str], errors_of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest error of every parameter among the ranks that hold some of it, in the order of `names`."""
    held = {name: [errors[name] for errors in errors_of_ranks if name in errors] for name in names}
    return {name: max(errors) for name, errors in held.items() if errors}
