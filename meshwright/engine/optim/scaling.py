"""The divisor of the stored gradient, the decision whether to update, and the dynamic loss scale of fp16.

One formula serves numbers on the host and tensors on a device whose values the host need not know.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from meshwright.config.sections import LossScaleConfig

Number = TypeVar("Number", float, Tensor)


class Scaling(NamedTuple, Generic[Number]):
    """The numbers by which an update uses the stored gradient.

    `norm` is the gradient norm before clipping. The stored gradient / `divisor` is the gradient after clipping.
    `counts` is true if there was something to learn from, `updates` if the norm is finite as well.
    """

    norm: Number
    divisor: Number
    counts: Number
    updates: Number


def gradient_scaling(count: Number, squares: Number, weight: float, clip: float, late: bool = False) -> Scaling[Number]:
    """Return the scaling of a stored gradient, which is weight x the sum of the gradients of `count` tokens.

    `squares` is the stored gradient's sum of squares. A clip of 0 means no clipping.

    A step without tokens whose gradient is zero has nothing to learn from. (The gradient decides as well, because one
    pipeline rank that runs alone has a gradient but not the last stage's tokens.) With `late`, the gradients of a step
    may arrive in later ones, so a step whose gradient is zero makes no update. Branches are written as arithmetic,
    so that tensors stay on their device.
    """
    divisor = weight * (count + (count == 0))
    norm = squares**0.5 / divisor
    counts = (count > 0) | (squares != 0)
    if clip:
        excess = norm / clip
        divisor = divisor * (excess * (excess > 1) + (excess <= 1))
    return Scaling(norm, divisor, counts, counts & (norm < math.inf) & ((squares != 0) | (not late)))


class LossScale:
    """Dynamic loss scaling: the factor `value` multiplies the loss before backward.

    A step that overflows is skipped. The scale doubles after a window of good steps. `hysteresis` overflows since then
    are needed before further ones halve it, so that a single bad batch does not. In precisions other than fp16 it is 1
    and not active.
    """

    def __init__(self, config: LossScaleConfig, active: bool) -> None:
        self.config, self.active = config, active
        self.value = config.initial if active else 1.0
        self.good_steps = 0
        self.overflows = 0

    def update(self, finite: bool) -> None:
        if not self.active:
            return
        if not finite:
            self.overflows += 1
            self.good_steps = 0
            if self.overflows >= self.config.hysteresis:
                self.value = max(self.config.min, self.value / 2)
            return
        self.good_steps += 1
        # More than the window is possible: a run may be resumed with a shorter one.
        if self.good_steps >= self.config.window:
            self.value *= 2
            self.good_steps = self.overflows = 0
