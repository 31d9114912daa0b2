"""Optimizers on flat buffers: a few fused calls for the whole model, each rank on the shares that it owns.

fp64 and fp32 weights are updated in place; bf16 and fp16 weights have fp32 masters, which are copied over after the
update. The gradient's scale (loss scale, token count, clipping) is one number that the update divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from meshwright.config.sections import OptimizerConfig
from meshwright.sharding.buffers import Bucket, FlatBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatState:
    """Masters and moments of one buffer, one tensor for this rank's share of each bucket, and the ranges of them that
    decay and those that don't."""

    def __init__(self, buffer: FlatBuffer, moments: int) -> None:
        self.buffer = buffer
        dtype = buffer.grads.dtype
        own = [bucket.own_params for bucket in buffer.buckets]
        self.master = own if buffer.params.dtype == dtype else self._flat(dtype)
        if self.master is not own:
            for master, params in zip(self.master, own, strict=True):
                master.copy_(params)
        self.moments = [self._flat(dtype) for _ in range(moments)]
        decay = buffer.runs(slot for slot in buffer.slots if slot.record.decay)
        rest = buffer.runs(slot for slot in buffer.slots if not slot.record.decay)
        self.runs = [(*run, True) for run in decay] + [(*run, False) for run in rest]

    def _flat(self, dtype: torch.dtype) -> list[Tensor]:
        """One zero tensor for all shares, cut into them."""
        sizes = [bucket.own_params.numel() for bucket in self.buffer.buckets]
        return list(torch.zeros(sum(sizes), dtype=dtype, device=self.buffer.device).split(sizes))

    def pieces(self, tensors: list[Tensor], decay: bool, buckets: Sequence[Bucket]) -> list[Tensor]:
        chosen = {bucket.index for bucket in buckets}
        return [tensors[b.index][low:high] for b, low, high, d in self.runs if d == decay and b.index in chosen]

    def publish(self, bucket: Bucket) -> None:
        """The updated masters become the model's weights, as far as this rank owns them."""
        master = self.master[bucket.index]
        if master is not bucket.own_params:
            bucket.own_params.copy_(master)


class FlatOptimizer:
    """AdamW (or plain SGD, to debug with) over all buffers. `updated` is told of each bucket with new weights."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        config: OptimizerConfig,
        updated: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self.config, self.updated = config, updated
        self.states = [FlatState(buffer, len(MOMENTS) if config.name == "adamw" else 0) for buffer in buffers]
        self.updates = 0

    def tensors(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        """Everything that a run must keep: (what it is, its buffer, this rank's share of each bucket)."""
        for state in self.states:
            yield "param", state.buffer, state.master
            for name, moment in zip(MOMENTS, state.moments, strict=False):
                yield name, state.buffer, moment

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """One update with gradients / divisor."""
        self.updates += 1
        for state, buckets in self._portions():
            dtype = state.buffer.grads.dtype
            if self.config.name == "sgd" or dtype == torch.float64:
                # The fused kernel takes its scale in float32 only.
                torch._foreach_div_([bucket.own_grads for bucket in buckets], divisor)
                scale = None
            else:
                scale = torch.tensor(divisor, dtype=torch.float32, device=state.buffer.device)
            for decay in (True, False):
                self._update(state, buckets, decay, lr, scale)
            self._publish(state, buckets)

    def _portions(self) -> Iterator[tuple[FlatState, list[Bucket]]]:
        """What is updated at once: a whole buffer, or, where other ranks wait for the result, a bucket, those first
        that forward needs first."""
        for state in reversed(self.states):
            if state.buffer.split.shards > 1:
                yield from ((state, [bucket]) for bucket in reversed(state.buffer.buckets))
            else:
                yield state, state.buffer.buckets

    def _publish(self, state: FlatState, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            state.publish(bucket)
            self.updated(bucket)

    @torch.no_grad()
    def publish(self) -> None:
        """After masters were set from outside: the model's weights follow."""
        for state, buckets in self._portions():
            self._publish(state, buckets)

    def _update(self, state: FlatState, buckets: list[Bucket], decay: bool, lr: float, scale: Tensor | None) -> None:
        c = self.config
        params = state.pieces(state.master, decay, buckets)
        grads = state.pieces([bucket.own_grads for bucket in state.buffer.buckets], decay, buckets)
        if not params:
            return
        weight_decay = c.weight_decay if decay else 0.0
        if c.name == "sgd":
            for param, grad in zip(params, grads, strict=True):
                param.mul_(1.0 - lr * weight_decay).sub_(grad, alpha=lr)
            return
        first, second = (state.pieces(moment, decay, buckets) for moment in state.moments)
        steps = [torch.tensor(float(self.updates), device=params[0].device) for _ in params]
        extra = {} if scale is None else {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}
        torch._fused_adamw_(
            params, grads, first, second, [], steps, lr=lr, beta1=c.betas[0], beta2=c.betas[1],
            weight_decay=weight_decay, eps=c.eps, amsgrad=False, maximize=False, **extra,
        )  # fmt: skip
