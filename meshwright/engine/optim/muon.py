"""Muon (Jordan et al., 2024): the momentum of each matrix, orthogonalised, and AdamW for everything else.

    M = mu M + G    D = G + mu M (Nesterov)    U = orthogonalised(D)    W = W (1 - lr wd) - lr s U

U has the singular vectors of D, and singular values near 1. It is computed by iterating an odd polynomial, which needs
only matrix products: X = D / |D|, then X = a X + (b A + c A^2) X with A = X X^T over the shorter side. The scale `s` is
0.2 sqrt(max(out, in)), which gives updates the typical size of AdamW updates, so that a learning rate for AdamW can be
used (Moonlight, arXiv 2502.16982), or sqrt(max(1, out / in)) as first published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.config.optimizer import OptimizerConfig
from meshwright.engine.optim.adam import AdamW
from meshwright.engine.optim.rule import MatrixRule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.engine.optim.flat import UpdatePart

Polynomial = tuple[float, float, float]


def _safe(a: float, b: float, c: float, by: float = 1.01) -> Polynomial:
    """Return the polynomial of x / by.

    Rounding may leave singular values slightly above 1, where the original polynomial diverges.
    """
    return a / by, b / by**3, c / by**5


# The polynomial of each iteration; the last one is used for all further iterations.
COEFFICIENTS: dict[str, tuple[Polynomial, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Each iteration's own, for five (You Jiacheng, 2025).
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Chebyshev-optimal ones, for five (Grishina et al., 2025, arXiv 2506.10935).
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # The simple ones, then two that end at 1 exactly, for ten iterations.
    "deepseek_v4": (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2),
    # Polar Express (Amsel et al., 2025, arXiv 2505.16932), Algorithm 1.
    "polar_express": (
        _safe(8.28721201814563, -23.595886519098837, 17.300387312530933),
        _safe(4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        _safe(3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        _safe(3.3184196573706015, -2.488488024314874, 0.51004894012372),
        _safe(2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        _safe(1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        _safe(1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}


def orthogonalised(x: Tensor, coefficients: str, iterations: int) -> Tensor:
    """Return matrices [count, rows, columns] with their singular values brought near 1. Zeros stay zeros."""
    import torch

    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    tiny = torch.finfo(x.dtype).tiny
    # Divide by the largest element before the norm, since the squares of small gradients would underflow.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    steps = COEFFICIENTS[coefficients]
    for number in range(iterations):
        a, b, c = steps[min(number, len(steps) - 1)]
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class AdamWBeside(AdamW):
    """AdamW for all parameters that are not matrices of blocks, with a separate learning rate.

    Its states have separate names too, so that a run that changes to or from plain AdamW begins with zeros everywhere.
    """

    states = (StateSpec("muon_exp_avg"), StateSpec("muon_exp_avg_sq"))
    has_kernel = False


class Muon(MatrixRule):
    """The update rule of matrices. `AdamWBeside` updates the other parameters."""

    states = (StateSpec("muon_momentum"),)
    others = AdamWBeside

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config)
        self.muon = config.muon

    @property
    def config_of_others(self) -> OptimizerConfig:
        return replace(self.config, lr=self.muon.adamw_lr or self.config.lr)

    @property
    def precision(self) -> str:
        return self.muon.precision

    def matrix_flops(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        return self.muon.iterations * 2.0 * (2 * long * short**2 + short**3)

    def matrix_bytes(self, rows: int, columns: int, element: int) -> float:
        size, gram = rows * columns, min(rows, columns) ** 2
        wide = element if self.muon.precision == "fp32" or element == 8 else 2
        result = size * (wide + element) if wide < element else 0
        return float(max(2 * wide * (size + gram), result))

    def direct(self, parts: Sequence[UpdatePart], step: UpdateStep) -> None:
        for part in parts:
            (momentum,) = part.states
            grad = part.grad.div_(step.divisor)
            momentum.mul_(self.muon.momentum).add_(grad)
            grad.add_(momentum, alpha=self.muon.momentum)

    def transform(self, x: Tensor, states: Sequence[Tensor], step: UpdateStep) -> Tensor:
        import torch

        rows, columns = x.shape[-2:]
        narrow = self.muon.precision == "bf16" and x.dtype != torch.float64
        result = orthogonalised(x.bfloat16() if narrow else x, self.muon.coefficients, self.muon.iterations)
        matches = self.muon.scale == "match_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matches else math.sqrt(max(1.0, rows / columns))
        return result.to(x.dtype).mul_(scale)

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        for part in parts:
            part.master.mul_(1.0 - step.lr * decay).sub_(part.grad, alpha=step.lr)
