"""Plain SGD without momentum, for debugging: its update is as simple as possible, and it has no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.engine.optim.rule import Rule, UpdateStep

if TYPE_CHECKING:
    from meshwright.engine.optim.flat import UpdatePart


class SGD(Rule):
    """p = p (1 - lr wd) - lr g."""

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        import torch

        params, grads = [part.master for part in parts], [part.grad for part in parts]
        torch._foreach_div_(grads, step.divisor)
        torch._foreach_mul_(params, 1.0 - step.lr * decay)
        torch._foreach_sub_(params, grads, alpha=step.lr)
