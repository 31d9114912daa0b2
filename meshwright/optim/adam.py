"""Optimizers on flat buffers: a few fused calls for the whole model, each rank on the shares that it owns.

fp64 and fp32 weights are updated in place; bf16 and fp16 weights have fp32 masters, which are copied over after the
update. The gradient's scale (loss scale, token count, clipping) is one number that the update divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.sections import OptimizerConfig
from meshwright.kernels import fits
from meshwright.sharding.buffers import Bucket, FlatBuffer

MOMENTS = ("exp_avg", "exp_avg_sq")


class Span(NamedTuple):
    """A range of what this rank owns whose weights all decay or all don't. `weights` are the model's, where they are
    narrower than the masters."""

    decay: bool
    master: Tensor
    grad: Tensor
    moments: tuple[Tensor, ...]
    weights: Tensor | None


class FlatState:
    """Masters and moments of one buffer: for each a tensor of this rank's share of each bucket."""

    def __init__(self, buffer: FlatBuffer, moments: int) -> None:
        self.buffer = buffer
        own = [bucket.own_params for bucket in buffer.buckets]
        self.master = own if self.in_place else self._flat()
        if not self.in_place:
            for master, params in zip(self.master, own, strict=True):
                master.copy_(params)
        self.moments = [self._flat() for _ in range(moments)]
        self._spans = [span for decay in (True, False) for span in self._find_spans(decay)]

    @property
    def in_place(self) -> bool:
        """Whether the masters are the model's own weights."""
        return self.buffer.params.dtype == self.buffer.grads.dtype

    def _flat(self) -> list[Tensor]:
        """One zero tensor for all shares, cut into them."""
        sizes = [bucket.own_params.numel() for bucket in self.buffer.buckets]
        return list(torch.zeros(sum(sizes), dtype=self.buffer.grads.dtype, device=self.buffer.device).split(sizes))

    def _find_spans(self, decay: bool) -> Iterator[tuple[Bucket, Span]]:
        """Where this rank owns whole buckets, they lie one behind the other: ranges go on from one into the next."""
        runs = self.buffer.runs(slot for slot in self.buffer.slots if slot.record.decay == decay)
        joined: list[tuple[Bucket, int, int]] = []
        end = -1  # of the last range, in the buffer
        for bucket, low, high in runs:
            if self.buffer.split.shards == 1 and bucket.start + low == end:
                first, begin, _ = joined[-1]
                joined[-1] = (first, begin, bucket.start + high - first.start)
            else:
                joined.append((bucket, low, high))
            end = bucket.start + high
        for bucket, low, high in joined:
            weights = None if self.in_place else _from(bucket.own_params, low, high)
            moments = tuple(_from(moment[bucket.index], low, high) for moment in self.moments)
            master = _from(self.master[bucket.index], low, high)
            yield bucket, Span(decay, master, _from(bucket.own_grads, low, high), moments, weights)

    def spans(self, buckets: Sequence[Bucket]) -> list[Span]:
        chosen = {bucket.index for bucket in buckets}
        return [span for bucket, span in self._spans if bucket.index in chosen]

    def publish(self, bucket: Bucket) -> None:
        """The updated masters become the model's weights, as far as this rank owns them."""
        if not self.in_place:
            bucket.own_params.copy_(self.master[bucket.index])


def _from(share: Tensor, low: int, high: int) -> Tensor:
    """Elements from a share's begin, which may go on into the shares behind it."""
    return share.as_strided((high - low,), (1,), share.storage_offset() + low)


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
        """Whether `step_on_device` can run: a fused pass over float32 masters, with numbers from the device."""
        return self.config.name == "adamw" and all(fits(*s.master, s.buffer.grads) for s in self.states)

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
        for state, buckets in self._portions():
            for span in state.spans(buckets):
                adamw(
                    span.master, span.grad, *span.moments, span.weights, numbers, lr=lr,
                    betas=(c.betas[0], c.betas[1]), eps=c.eps, decay=c.weight_decay if span.decay else 0.0,
                )  # fmt: skip
            for bucket in buckets:
                self.updated(bucket)

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
                self._update(state.spans(buckets), decay, lr, scale)
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

    def _update(self, spans: list[Span], decay: bool, lr: float, scale: Tensor | None) -> None:
        c = self.config
        spans = [span for span in spans if span.decay == decay]
        if not spans:
            return
        weight_decay = c.weight_decay if decay else 0.0
        if c.name == "sgd":
            for span in spans:
                span.master.mul_(1.0 - lr * weight_decay).sub_(span.grad, alpha=lr)
            return
        params, grads = [span.master for span in spans], [span.grad for span in spans]
        first, second = ([span.moments[i] for span in spans] for i in range(2))
        steps = [torch.tensor(float(self.updates), device=params[0].device) for _ in params]
        extra = {} if scale is None else {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}
        torch._fused_adamw_(
            params, grads, first, second, [], steps, lr=lr, beta1=c.betas[0], beta2=c.betas[1],
            weight_decay=weight_decay, eps=c.eps, amsgrad=False, maximize=False, **extra,
        )  # fmt: skip
