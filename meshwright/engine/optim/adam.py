"""AdamW (Loshchilov and Hutter, 2017): the mean gradient over the root of the mean square, with decoupled decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.engine.optim.rule import Rule, StateSpec, UpdateStep

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.engine.optim.flat import UpdatePart


class AdamW(Rule):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = p (1 - lr wd) - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) +
    eps)."""

    states = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))
    has_kernel = True

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        import torch

        c = self.config
        params, grads = [part.master for part in parts], [part.grad for part in parts]
        extra = {}
        # The fused kernel takes its scale in float32 only, which would lose digits of float64 gradients.
        if grads[0].dtype == torch.float64:
            torch._foreach_div_(grads, step.divisor)
        else:
            scale = torch.tensor(step.divisor, dtype=torch.float32, device=grads[0].device)
            extra = {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}
        first, second = ([part.states[i] for part in parts] for i in range(2))
        steps = [torch.tensor(float(step.number), device=params[0].device) for _ in params]
        torch._fused_adamw_(
            params, grads, first, second, [], steps, lr=step.lr, beta1=c.betas[0], beta2=c.betas[1],
            weight_decay=decay, eps=c.eps, amsgrad=False, maximize=False, **extra,
        )  # fmt: skip

    def kernel_numbers(self, updates: Any) -> list[Any]:
        return [1.0 - beta**updates for beta in self.config.betas]

    def update_by_kernel(self, part: UpdatePart, lr: float, numbers: Tensor) -> None:
        from meshwright.kernels.adamw import adamw

        c = self.config
        first, second = part.states
        adamw(
            part.master, part.grad, first, second, part.weights, numbers, lr=lr, betas=(c.betas[0], c.betas[1]),
            eps=c.eps, decay=c.weight_decay, decays=part.decay, flips=part.flips,
        )  # fmt: skip
