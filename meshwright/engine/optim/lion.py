"""Lion (Chen et al., 2023, arXiv 2302.06675): the sign of an interpolated momentum, with decoupled decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.engine.optim.rule import Rule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from meshwright.engine.optim.flat import UpdatePart


class Lion(Rule):
    """p = p (1 - lr wd) - lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g.

    Every element moves by lr, so the learning rate is usually 3 to 10 times smaller than for AdamW, and the weight
    decay larger by the same factor. `eps` is not used.
    """

    # The state must not share the name exp_avg with AdamW: a run that changes optimizers must begin with zeros.
    states = (StateSpec("lion_momentum"),)

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        beta1, beta2 = self.config.betas
        for part in parts:
            # Slices bound the memory of the direction, which is a new tensor.
            for chunk in part.slices():
                (momentum,) = chunk.states
                grad = chunk.grad.div_(step.divisor)
                direction = momentum.lerp(grad, 1.0 - beta1).sign_()
                chunk.master.mul_(1.0 - step.lr * decay).sub_(direction, alpha=step.lr)
                momentum.lerp_(grad, 1.0 - beta2)
