"""What the stored gradient is divided by, and whether there is an update at all: one formula for numbers on the host
and for tensors on a device, whose values the host need not know."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

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
    squares is `squares`.

    Without a token and with a zero gradient nothing is learned. (One rank of a pipeline that is run alone has a
    gradient, and no token of the last stage.) A clip of 0 means no clipping. Branches
    are written as arithmetic, so that tensors stay on their device.
    """
    divisor = weight * (count + (count == 0))
    norm = squares**0.5 / divisor
    counts = (count > 0) | (squares != 0)
    if clip:
        excess = norm / clip
        divisor = divisor * (excess * (excess > 1) + (excess <= 1))
    return Scaling(norm, divisor, counts, counts & (norm < math.inf))
