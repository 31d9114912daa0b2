"""Dynamic loss scaling for fp16: halves and skips the step on overflow, doubles after a window of good steps."""

from __future__ import annotations

from meshwright.config.sections import LossScaleConfig


class LossScale:
    """The factor `value` multiplies the loss before backward. In precisions other than fp16 it is 1 and never
    changes."""

    def __init__(self, config: LossScaleConfig, active: bool) -> None:
        self.config, self.active = config, active
        self.value = config.initial if active else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        if not self.active:
            return
        if not finite:
            self.value = max(self.config.min, self.value / 2)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.config.window:  # it exceeds the window where a run is resumed with a shorter one
            self.value *= 2
            self.good_steps = 0
