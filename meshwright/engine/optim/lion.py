"""Lion (Chen et al., 2023, arXiv 2302.06675): the sign of an interpolated momentum, with decoupled decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.engine.optim.rule import Rule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from meshwright.engine.optim.flat import UpdatePart


class Lion(Rule):
    """p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g.

    Every element moves by lr, so the learning rate is usually 3 to 10 times smaller than AdamW's and the weight decay
    as much larger. `eps` is not used."""

    # Not AdamW's exp_avg: a change of optimizer must begin with zeros, as its count of updates does.
    states = (StateSpec("lion_momentum"),)

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        beta1, beta2 = self.config.betas
        for part in parts:
            # In slices, because the direction needs memory of its own.
            for piece in part.slices():
                (momentum,) = piece.states
                grad = piece.grad.div_(step.divisor)
                direction = momentum.lerp(grad, 1.0 - beta1).sign_()
                piece.master.mul_(1.0 - step.lr * decay).sub_(direction, alpha=step.lr)
                momentum.lerp_(grad, 1.0 - beta2)
