"""The config section on the learning rate, and the registry of its schedules. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.config.blocks import not_negative
from meshwright.config.numbers import share_from, whole_number_from
from meshwright.errors import UserError
from meshwright.plugins import Registry


class LRSchedule(NamedTuple):
    """The learning rate between the warm-up and the end of the decay.

    `rate` is a function of (peak, lowest rate, share of the decay that has passed, from 0 to 1).
    """

    rate: Callable[[float, float, float], float]
    decays_last: bool = False  # the rate stays at its peak until the last steps: by default, the last tenth


def _linear(peak: float, low: float, share: float) -> float:
    return peak + (low - peak) * share


# The schedules by name, for the key `lr.schedule`.
LR_SCHEDULES = Registry("lr.schedule", {
    "cosine": LRSchedule(lambda peak, low, share: low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * share))),
    "linear": LRSchedule(_linear),
    "constant": LRSchedule(lambda peak, low, share: peak),
    "wsd": LRSchedule(_linear, decays_last=True),
})  # fmt: skip


@dataclass(frozen=True)
class LRConfig:
    """The learning rate over steps: a linear warm-up, then the schedule down to `min`."""

    schedule: str = "cosine"  # one of LR_SCHEDULES
    warmup: int | str = 0  # steps, or a share of train.steps such as 2%
    decay: int = 0  # steps of decay; 0: cosine and linear to the last step, wsd the last tenth
    min: float = 0.0

    def __post_init__(self) -> None:
        LR_SCHEDULES.entry(self.schedule)
        not_negative("lr", self, "decay", "min")
        if isinstance(self.warmup, str):
            steps = whole_number_from(self.warmup, "lr.warmup")
            if steps is None and share_from(self.warmup) is None:
                raise UserError(f"lr.warmup={self.warmup} must be a number of steps or a share of them, e.g. 2%")
            if steps is not None:
                object.__setattr__(self, "warmup", steps)
        if not isinstance(self.warmup, str):
            not_negative("lr", self, "warmup")

    @property
    def facts(self) -> LRSchedule:
        return LR_SCHEDULES[self.schedule]

    def warmup_steps(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of `steps` steps. A share above zero is at least one step."""
        if not isinstance(self.warmup, str):
            return self.warmup
        share = share_from(self.warmup) or 0.0
        return max(1, round(share * steps)) if share else 0
