"""Adafactor (Shazeer and Stern, 2018, arXiv 1804.04235): second moments of matrices as a vector of rows and one of
columns.

    b = 1 - t^-decay    R = b R + (1 - b) mean of each row of (G^2 + eps)    C = the same of each column
    U = G / sqrt(R C / mean(R))    W = W (1 - lr wd) - lr U / max(1, rms(U) / clip)

There is no first moment. All other parameters have a whole second moment V = b V + (1 - b) (g^2 + eps), and their
update g / sqrt(V) is not clipped by its root mean square, which would take a sum over ranks for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.config.optimizer import AdafactorConfig
from meshwright.engine.optim.rule import MatrixRule, Rule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.engine.optim.flat import UpdatePart


def _beta(config: AdafactorConfig, step: UpdateStep) -> float:
    """Return the factor of the old moments. It is 0 in the first step, so they need no correction of their bias."""
    return 1.0 - math.pow(step.number, -config.decay)


class AdafactorElements(Rule):
    """The update rule of parameters that are not matrices of blocks."""

    states = (StateSpec("adafactor_sq"),)

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        c = self.config.adafactor
        beta = _beta(c, step)
        for part in parts:
            # Slices bound the memory of the squares, which are a new tensor.
            for chunk in part.slices():
                (second,) = chunk.states
                grad = chunk.grad.div_(step.divisor)
                second.lerp_(grad.square().add_(c.eps), 1.0 - beta)
                chunk.master.mul_(1.0 - step.lr * decay).addcdiv_(grad, second.sqrt(), value=-step.lr)


class Adafactor(MatrixRule):
    """The update rule of matrices. `AdafactorElements` updates the other parameters."""

    others = AdafactorElements

    def matrix_states(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        return {"adafactor_row": (rows,), "adafactor_column": (columns,)}

    def matrix_flops(self, rows: int, columns: int) -> float:
        return 8.0 * rows * columns

    def matrix_bytes(self, rows: int, columns: int, element: int) -> float:
        return 2.0 * rows * columns * max(4, element)

    def direct(self, parts: Sequence[UpdatePart], step: UpdateStep) -> None:
        for part in parts:
            part.grad.div_(step.divisor)

    def transform(self, x: Tensor, states: Sequence[Tensor], step: UpdateStep) -> Tensor:
        c, (rows, columns) = self.config.adafactor, states
        squares = x.to(rows.dtype).square().add_(c.eps)
        weight = 1.0 - _beta(c, step)
        rows.lerp_(squares.mean(dim=-1), weight)
        columns.lerp_(squares.mean(dim=-2), weight)
        # The roots are taken of the vectors, since products of such small numbers would underflow in fp32.
        scale = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_()
        update = (x * scale[..., None]).mul_(columns.rsqrt()[..., None, :])
        rms = update.square().mean(dim=(-2, -1), keepdim=True).sqrt_()
        return update.div_((rms / c.clip).clamp_min_(1.0))

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        for part in parts:
            part.master.mul_(1.0 - step.lr * decay).sub_(part.grad, alpha=step.lr)
