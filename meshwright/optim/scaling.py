"""What the stored gradient is divided by, and whether there is an update at all: one formula for the host's numbers and
for a device's, which the host need not know."""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Number = TypeVar("Number", float, Tensor)


class Scaling(NamedTuple, Generic[Number]):
    """`norm` is that of the true gradient, the stored one / `divisor` is the true one after clipping. `counts` says
    whether there was anything to learn from, `updates` whether the norm is finite too."""

    norm: Number
    divisor: Number
    counts: Number
    updates: Number


def gradient_scaling(count: Number, squares: Number, weight: float, clip: float) -> Scaling[Number]:
    """Of a stored gradient with this sum of squares, which is weight x the sum over `count` tokens of their gradients.

    Without a token and with a zero gradient nothing is learned. (One rank of a pipeline that is run alone has a
    gradient, and no token of the last stage.) A clip of 0 is none. Written so that floats and tensors both pass.
    """
    divisor = weight * (count + (count == 0))
    norm = squares**0.5 / divisor
    counts = (count > 0) | (squares != 0)
    if clip:
        excess = norm / clip
        divisor = divisor * (excess * (excess > 1) + (excess <= 1))
    return Scaling(norm, divisor, counts, counts & (norm < math.inf))
