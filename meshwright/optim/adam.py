"""Optimizers on flat buffers: a few fused calls for the whole model.

fp64 and fp32 weights are updated in place; bf16 and fp16 weights have fp32 masters, which are copied over after the
update. The gradient's scale (loss scale, token count, clipping) is one number that the update divides by.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.config.sections import OptimizerConfig
from meshwright.kernels import fits
from meshwright.sharding.buffers import FlatBuffer


class FlatState:
    """Masters and moments of one buffer, and the ranges that decay and those that don't."""

    def __init__(self, buffer: FlatBuffer, moments: int) -> None:
        self.buffer = buffer
        same = buffer.params.dtype == buffer.grads.dtype
        self.master = buffer.params if same else buffer.params.to(buffer.grads.dtype)
        self.moments = [torch.zeros_like(self.master) for _ in range(moments)]
        decay = buffer.runs(slot for slot in buffer.slots if slot.record.decay)
        rest = buffer.runs(slot for slot in buffer.slots if not slot.record.decay)
        self.runs = [(a, b, True) for a, b in decay] + [(a, b, False) for a, b in rest]

    def pieces(self, tensor: Tensor, decay: bool) -> list[Tensor]:
        return [tensor[a:b] for a, b, d in self.runs if d == decay]

    @property
    def low(self) -> Tensor | None:
        """The model's weights, where they are narrower than the masters."""
        return None if self.master is self.buffer.params else self.buffer.params

    def publish(self) -> None:
        """The updated masters become the model's weights."""
        if self.master is not self.buffer.params:
            self.buffer.params.copy_(self.master)


class FlatOptimizer:
    """AdamW (or plain SGD, to debug with) over all buffers."""

    def __init__(self, buffers: list[FlatBuffer], config: OptimizerConfig) -> None:
        self.config = config
        self.states = [FlatState(buffer, 2 if config.name == "adamw" else 0) for buffer in buffers]
        self._updates: int | Tensor = 0

    @property
    def updates(self) -> int:
        """Updates made so far; on a device that counts them itself, reading this waits for it."""
        return int(self._updates)

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates = value

    @property
    def on_device(self) -> bool:
        """Whether `step_on_device` can run: one pass over float32 masters that takes its numbers from the device."""
        return self.config.name == "adamw" and all(fits(state.master, state.buffer.grads) for state in self.states)

    @torch.no_grad()
    def step_on_device(self, lr: float, sums: Tensor, weight: float, clip: float) -> None:
        """One update from the summed (loss, tokens, squared norm) of this step, or none if the norm is not finite. The
        host never learns which, and never waits."""
        from meshwright.kernels.adamw import adamw

        c = self.config
        if not isinstance(self._updates, Tensor):
            self._updates = torch.full((), float(self._updates), dtype=torch.float64, device=sums.device)
        tokens, squares = sums[1].clamp(min=1.0), sums[2]
        divisor = weight * tokens
        norm = squares.sqrt() / divisor
        finite = torch.isfinite(norm)
        if clip:
            divisor = divisor * (norm / clip).clamp(min=1.0)
        self._updates = self._updates + finite
        corrections = [1.0 - beta**self._updates for beta in c.betas]
        numbers = torch.stack([finite.double(), 1.0 / divisor, *corrections]).float()
        for state in self.states:
            for start, stop, decay in state.runs:
                low = None if state.low is None else state.low[start:stop]
                adamw(
                    state.master[start:stop], state.buffer.grads[start:stop], *(m[start:stop] for m in state.moments),
                    low, numbers, lr=lr, betas=(c.betas[0], c.betas[1]), eps=c.eps,
                    decay=c.weight_decay if decay else 0.0,
                )  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, FlatBuffer, Tensor]]:
        """Every flat tensor that a run must keep: (what it is, its buffer, the tensor)."""
        for state in self.states:
            yield "param", state.buffer, state.master
            for name, moment in zip(("exp_avg", "exp_avg_sq"), state.moments, strict=False):
                yield name, state.buffer, moment

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """One update with gradients / divisor."""
        self.updates += 1
        for state in self.states:
            grads = state.buffer.grads
            if self.config.name == "sgd" or grads.dtype == torch.float64:
                # The fused kernel takes its scale in float32 only.
                grads.div_(divisor)
                scale = None
            else:
                scale = torch.tensor(divisor, dtype=torch.float32, device=grads.device)
            for decay in (True, False):
                self._update(state, decay, lr, scale)
            state.publish()

    def _update(self, state: FlatState, decay: bool, lr: float, scale: Tensor | None) -> None:
        c = self.config
        params, grads = state.pieces(state.master, decay), state.pieces(state.buffer.grads, decay)
        if not params:
            return
        weight_decay = c.weight_decay if decay else 0.0
        if c.name == "sgd":
            for param, grad in zip(params, grads, strict=True):
                param.mul_(1.0 - lr * weight_decay).sub_(grad, alpha=lr)
            return
        first, second = (state.pieces(moment, decay) for moment in state.moments)
        steps = [torch.tensor(float(self.updates), device=params[0].device) for _ in params]
        extra = {} if scale is None else {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}
        torch._fused_adamw_(
            params, grads, first, second, [], steps, lr=lr, beta1=c.betas[0], beta2=c.betas[1],
            weight_decay=weight_decay, eps=c.eps, amsgrad=False, maximize=False, **extra,
        )  # fmt: skip
