"""SOAP (Vyas et al., 2024, arXiv 2409.11321): Adam in the eigenbases of Shampoo's preconditioners; AdamW elsewhere.

    M = b1 M + (1 - b1) G    L = b2 L + (1 - b2) G G^T    R = b2 R + (1 - b2) G^T G
    every few steps: P = orthonormalised(L P), Q = orthonormalised(R Q)
    V = b2 V + (1 - b2) (P^T G Q)^2    N = P^T M Q / (1 - b1^t) / (sqrt(V / (1 - b2^t)) + eps)
    W = W (1 - lr wd) - lr P N Q^T

The bases P and Q begin as the identity, and the first step iterates FIRST times. Starting from eigenvectors as the
authors do would depend on rounding, and so on the layout: the vectors of equal eigenvalues, such as those of the zeros
of a gradient of low rank, are arbitrary. For the same reason each iteration multiplies by L + d I with a small d, which
has the same eigenvectors and no zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.engine.optim.adam import AdamW
from meshwright.engine.optim.rule import MatrixRule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.engine.optim.flat import UpdatePart

FIRST = 4  # iterations of the first step
# d, relative to the mean of the eigenvalues. The largest eigenvalue may be thousands of times the mean, so that
# rounding in fp32 would hide much smaller ones from the iteration anyway.
SHIFT = 1e-3


class AdamWBesideSoap(AdamW):
    """AdamW for all parameters that are not matrices of blocks. Its states don't share names with AdamW's."""

    states = (StateSpec("soap_exp_avg"), StateSpec("soap_exp_avg_sq"))
    has_kernel = False


class Soap(MatrixRule):
    """The update rule of matrices. A side longer than `optimizer.soap.max_side` keeps the identity as its basis."""

    others = AdamWBesideSoap

    def matrix_states(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        left, right = ((side, side) if self._has_basis(side) else (0, 0) for side in (rows, columns))
        return {
            "soap_momentum": (rows, columns), "soap_second": (rows, columns), "soap_left": left, "soap_right": right,
            "soap_left_basis": left, "soap_right_basis": right,
        }  # fmt: skip

    def _has_basis(self, side: int) -> bool:
        return side <= self.config.soap.max_side

    def matrix_flops(self, rows: int, columns: int) -> float:
        flops = 0.0
        for side in (side for side in (rows, columns) if self._has_basis(side)):
            # A gradient's square and three products with the basis, and sometimes an iteration: a product of squares
            # and Householder's factorisation, 4/3 n^3 for its factors and as much for the basis.
            flops += 4 * 2.0 * side * rows * columns + (2 + 8 / 3) * side**3 / self.config.soap.every
        return flops

    def matrix_bytes(self, rows: int, columns: int, element: int) -> float:
        held = sum(side**2 for side in (rows, columns) if self._has_basis(side))
        # The stacked states, three rotated matrices, and the workspace of one iteration.
        return (5.0 * rows * columns + 2 * held + 3 * max(rows, columns) ** 2) * max(4, element)

    def direct(self, parts: Sequence[UpdatePart], step: UpdateStep) -> None:
        for part in parts:
            part.grad.div_(step.divisor)

    def transform(self, x: Tensor, states: Sequence[Tensor], step: UpdateStep) -> Tensor:
        beta1, beta2 = self.config.betas
        momentum, second, left, right, left_basis, right_basis = states
        grad = x.to(momentum.dtype)
        momentum.lerp_(grad, 1.0 - beta1)
        sides = ((left, left_basis, grad), (right, right_basis, grad.mT))
        for factor, basis, rows in sides:
            if factor.numel():
                factor.lerp_(rows @ rows.mT, 1.0 - beta2)
                if (step.number - 1) % self.config.soap.every == 0:
                    basis.copy_(_iterated(factor, basis, FIRST if step.number == 1 else 1))
        turned, mean = (_rotated(each, left_basis.mT, right_basis) for each in (grad, momentum))
        second.lerp_(turned.square_(), 1.0 - beta2)
        root = (second / (1.0 - beta2**step.number)).sqrt_().add_(self.config.eps)
        return _rotated(mean.div_(root).div_(1.0 - beta1**step.number), left_basis, right_basis.mT)

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        for part in parts:
            part.master.mul_(1.0 - step.lr * decay).sub_(part.grad, alpha=step.lr)


def _iterated(factor: Tensor, basis: Tensor, times: int) -> Tensor:
    """Return the basis after this many orthogonal iterations."""
    import torch

    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
    # Dividing by the mean keeps tiny numbers from underflowing.
    shifted = factor / mean.clamp_min(torch.finfo(factor.dtype).tiny) + SHIFT * identity
    basis = _or_identity(basis)
    for _ in range(times):
        basis = torch.linalg.qr(shifted @ basis).Q
    return basis


def _or_identity(basis: Tensor) -> Tensor:
    """Return the basis, or the identity for one of zeros, as a new state is."""
    import torch

    is_set = basis.ne(0).any(dim=-1, keepdim=True).any(dim=-2, keepdim=True)
    return torch.where(is_set, basis, torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device))


def _rotated(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return left x right. An empty basis stands for the identity."""
    x = _or_identity(left) @ x if left.numel() else x.clone()
    return x @ _or_identity(right) if right.numel() else x
