"""The sections of the two numbers that change from step to step: the loss scale and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive
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
    warmup: int = 0
    decay: int = 0  # steps of decay; 0: cosine and linear to the last step, wsd the last tenth
    min: float = 0.0

    def __post_init__(self) -> None:
        not_negative("lr", self, "warmup", "decay", "min")
