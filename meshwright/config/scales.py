"""The sections of the two numbers that change from step to step: the loss scale and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.config.numbers import share_from, whole_number_from
from meshwright.errors import UserError


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scaling, used with train.precision=fp16 only."""

    initial: float = 65536.0
    window: int = 1000  # good steps before the scale doubles
    min: float = 1.0

    def __post_init__(self) -> None:
        positive("loss_scale", self, "initial", "window", "min")
        if self.min > self.initial:
            raise UserError(f"loss_scale.min={self.min} must not be above loss_scale.initial={self.initial}")


@dataclass(frozen=True)
class LRConfig:
    """Learning rate over steps: linear warm-up, then the schedule down to `min`."""

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: int | str = 0  # steps, or a share of train.steps such as 2%
    decay: int = 0  # steps of decay; 0: cosine and linear to the last step, wsd the last tenth
    min: float = 0.0

    def __post_init__(self) -> None:
        not_negative("lr", self, "decay", "min")
        if isinstance(self.warmup, str):
            steps = whole_number_from(self.warmup, "lr.warmup")
            if steps is None and share_from(self.warmup) is None:
                raise UserError(f"lr.warmup={self.warmup} must be a number of steps or a share of them, e.g. 2%")
            if steps is not None:
                object.__setattr__(self, "warmup", steps)
        if not isinstance(self.warmup, str):
            not_negative("lr", self, "warmup")

    def warmup_steps(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of `steps` steps. A share above zero is at least one step."""
        if not isinstance(self.warmup, str):
            return self.warmup
        share = share_from(self.warmup) or 0.0
        return max(1, round(share * steps)) if share else 0
