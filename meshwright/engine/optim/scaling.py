"""What the stored gradient is divided by, and whether there is an update at all: one formula for numbers on the host
and for tensors on a device, whose values the host need not know. And the scale of the loss in fp16."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from meshwright.config.sections import LossScaleConfig

Number = TypeVar("Number", float, Tensor)


class Scaling(NamedTuple, Generic[Number]):
    """How an update uses the stored gradient. `norm` is the grad norm before clipping; the stored gradient / `divisor`
    is the gradient after clipping. `counts`: there was something to learn from; `updates`: the norm is finite too."""

    norm: Number
    divisor: Number
    counts: Number
    updates: Number


def gradient_scaling(count: Number, squares: Number, weight: float, clip: float) -> Scaling[Number]:
    """Returns the scaling of a stored gradient: weight x the sum over `count` tokens of their gradients, whose sum of
    squares is `squares`. A clip of 0 means no clipping.

    Without a token and with a zero gradient nothing is learned. (One rank of a pipeline that is run alone has a
    gradient, and no token of the last stage.) Branches are written as arithmetic, so that tensors stay on their device.
    """
    divisor = weight * (count + (count == 0))
    norm = squares**0.5 / divisor
    counts = (count > 0) | (squares != 0)
    if clip:
        excess = norm / clip
        divisor = divisor * (excess * (excess > 1) + (excess <= 1))
    return Scaling(norm, divisor, counts, counts & (norm < math.inf))


class LossScale:
    """Dynamic loss scaling: the factor `value` multiplies the loss before backward. It is halved on overflow, when the
    step is skipped, and doubled after a window of good steps. In precisions other than fp16 it is 1 and not active."""

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
