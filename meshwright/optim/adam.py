"""Optimizers on flat buffers: a few fused calls for the whole model, each rank on the shares that it owns.

fp64 and fp32 weights are updated in place; bf16 and fp16 weights have fp32 masters, which are copied over after the
update. Updates are computed in fp32 (fp64 for fp64), whatever the states are kept in and wherever they live. The
gradient's scale (loss scale, token count, clipping) is one number that the update divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.sections import OffloadConfig, OptimizerConfig
from meshwright.device import DTYPES
from meshwright.kernels import fits
from meshwright.sharding.buffers import Bucket, FlatBuffer, State
from meshwright.sharding.homes import Kept, Pieces, pieces
from meshwright.sharding.placement import piece_size

MOMENTS = ("exp_avg", "exp_avg_sq")


class Span(NamedTuple):
    """A range of what this rank owns whose weights all decay or all don't. `weights` are the model's, where they are
    narrower than the masters."""

    decay: bool
    master: Tensor
    grad: Tensor
    moments: tuple[Tensor, ...]
    weights: Tensor | None


class Run(NamedTuple):
    """Elements low to high, from the begin of a bucket's share, that all decay or all don't."""

    bucket: Bucket
    low: int
    high: int
    decay: bool


class FlatState:
    """Masters and moments of one buffer: for each a tensor of this rank's share of each bucket."""

    def __init__(self, buffer: FlatBuffer, config: OptimizerConfig, offload: OffloadConfig) -> None:
        self.buffer = buffer
        double = buffer.key.dtype == torch.float64
        self.dtype = torch.float64 if double else torch.float32
        names = (config.master_dtype, config.state_dtype)
        master_dtype, state_dtype = (self.dtype if double else DTYPES[name] for name in names)
        own = [bucket.own_params for bucket in buffer.buckets]
        sizes = [share.numel() for share in own]
        # The masters are the model's own weights where these are as wide.
        self.in_place = buffer.key.dtype == master_dtype or buffer.key.dtype.itemsize > master_dtype.itemsize

        def new(dtype: torch.dtype) -> Kept:
            return Kept(sizes, dtype, buffer.device, offload.optimizer, Path(offload.path))

        self.kinds = [Kept.of(own) if self.in_place else new(master_dtype)]
        if not self.in_place:
            for master, params in zip(self.master, own, strict=True):
                master.copy_(params)
        self.kinds += [new(state_dtype) for _ in MOMENTS if config.name == "adamw"]
        here = (kind.is_at_hand(buffer.device, self.dtype) for kind in self.kinds)
        self.at_hand = buffer.grads.dtype == self.dtype and all(here)
        self._runs = list(self._find_runs())
        if self.at_hand:
            self._spans = [(run.bucket, self._span(run)) for run in self._runs]
        else:
            most = piece_size(int(offload.buffer_mib * 2**20 // self.dtype.itemsize), sizes)
            self._order = pieces(sizes, list(reversed(range(len(sizes)))), most)
            self._pieces = Pieces(self.kinds, buffer.device, self.dtype, most)

    @property
    def master(self) -> list[Tensor]:
        return self.kinds[0].shares

    @property
    def moments(self) -> list[list[Tensor]]:
        return [kind.shares for kind in self.kinds[1:]]

    def _find_runs(self) -> Iterator[Run]:
        """Where this rank owns whole buckets and all is at hand, they lie one behind the other (but in stage 3, where a
        file has gaps): a run goes on from one into the next, and there are few of them."""
        split = self.buffer.split
        for decay in (True, False):
            runs = self.buffer.runs(slot for slot in self.buffer.slots if slot.record.decay == decay)
            joined: list[Run] = []
            end = -1  # of the last one, in the buffer
            for bucket, low, high in runs:
                if self.at_hand and split.shards == 1 and split.stage < 3 and bucket.start + low == end:
                    first = joined[-1].bucket
                    joined[-1] = joined[-1]._replace(high=bucket.start + high - first.start)
                else:
                    joined.append(Run(bucket, low, high, decay))
                end = bucket.start + high
            yield from joined

    def _span(self, run: Run) -> Span:
        bucket, low, high, decay = run
        master, *moments = (_from(kind.shares[bucket.index], low, high) for kind in self.kinds)
        weights = None if self.in_place else _from(bucket.own_params, low, high)
        return Span(decay, master, _from(bucket.own_grads, low, high), tuple(moments), weights)

    def portions(self) -> Iterator[tuple[list[Span], list[Bucket]]]:
        """What is updated at once, and the buckets that are done with it: the whole buffer, or, where other ranks wait
        for the result, a bucket, those first that forward needs first; or what fits into the room for pieces."""
        if not self.at_hand:
            yield from self._brought()
        elif self.buffer.split.shards == 1:
            yield [span for _, span in self._spans], self.buffer.buckets
        else:
            for bucket in reversed(self.buffer.buckets):
                yield [span for owner, span in self._spans if owner is bucket], [bucket]

    def _brought(self) -> Iterator[tuple[list[Span], list[Bucket]]]:
        # Weights that are updated in pieces of their own are where they belong only when the last has been taken back.
        late = self.in_place and not self.kinds[0].is_at_hand(self.buffer.device, self.dtype)
        for piece, (master, *moments) in self._pieces.run(self._order):
            bucket, spans = self.buffer.buckets[piece.share], []
            grad = bucket.own_grads[piece.low : piece.high].to(self.dtype)
            for _, low, high, decay in (run for run in self._runs if run.bucket is bucket):
                low, high = max(low, piece.low), min(high, piece.high)
                if low < high:
                    at = slice(low - piece.low, high - piece.low)
                    weights = None if self.in_place else bucket.own_params[low:high]
                    spans.append(Span(decay, master[at], grad[at], tuple(m[at] for m in moments), weights))
            yield spans, [bucket] if piece.last and not late else []
        if late:
            yield [], list(reversed(self.buffer.buckets))

    def publish(self) -> None:
        """After masters were set from outside: the model's weights follow, as far as this rank owns them."""
        if not self.in_place:
            for bucket, master in zip(self.buffer.buckets, self.master, strict=True):
                bucket.own_params.copy_(master)


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
        offload: OffloadConfig | None = None,
    ) -> None:
        self.config, self.updated = config, updated
        trained = [buffer for buffer in buffers if buffer.key.trained]
        self.frozen = [buffer for buffer in buffers if not buffer.key.trained]
        self.states = [FlatState(buffer, config, offload or OffloadConfig()) for buffer in trained]
        self._updates: int | Tensor = 0

    @property
    def updates(self) -> int:
        """Updates made so far; on a device that counts them itself, reading this waits for it."""
        return int(self._updates)

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates = value

    def tensors(self) -> Iterator[State]:
        """Everything that a run must keep."""
        for state in self.states:
            for name, kind in zip(("param", *MOMENTS), state.kinds, strict=False):
                yield State(name, state.buffer, kind.shares)
        for buffer in self.frozen:
            yield State("param", buffer, [bucket.own_params for bucket in buffer.buckets])

    def publish(self) -> None:
        """After masters were set from outside: the model's weights follow."""
        for state in self.states:
            state.publish()
            for bucket in reversed(state.buffer.buckets):
                self.updated(bucket)

    @property
    def on_device(self) -> bool:
        """Whether `step_on_device` can run: a fused pass over float32 masters, with numbers from the device."""
        return self.config.name == "adamw" and bool(self.states) and all(
            state.at_hand and fits(*state.master, state.buffer.buckets[0].own_params, state.buffer.grads)
            for state in self.states
        )  # fmt: skip

    @torch.no_grad()
    def step_on_device(self, lr: float, sums: Tensor, weight: float, clip: float) -> None:
        """One update from the summed (loss, tokens, squared norm) of this step, or none if the norm is not finite or no
        token counted. The host never learns which, and never waits."""
        from meshwright.kernels.adamw import adamw

        c = self.config
        if not isinstance(self._updates, Tensor):
            self._updates = torch.full((), float(self._updates), dtype=torch.float64, device=sums.device)
        tokens, squares = sums[1], sums[2]
        divisor = weight * (tokens + (tokens == 0))
        norm = squares.sqrt() / divisor
        finite = torch.isfinite(norm) & ((tokens > 0) | (squares != 0))
        if clip:
            divisor = divisor * (norm / clip).clamp(min=1.0)
        self._updates = self._updates + finite
        corrections = [1.0 - beta**self._updates for beta in c.betas]
        numbers = torch.stack([finite.double(), 1.0 / divisor, *corrections]).float()
        for spans, done in self._portions():
            for span in spans:
                first, second = span.moments
                adamw(
                    span.master, span.grad, first, second, span.weights, numbers, lr=lr,
                    betas=(c.betas[0], c.betas[1]), eps=c.eps, decay=c.weight_decay if span.decay else 0.0,
                )  # fmt: skip
            for bucket in done:
                self.updated(bucket)

    def _portions(self) -> Iterator[tuple[list[Span], list[Bucket]]]:
        for state in reversed(self.states):
            yield from state.portions()

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """One update with gradients / divisor."""
        self.updates += 1
        for spans, done in self._portions():
            for decay in (True, False):
                self._update([span for span in spans if span.decay == decay], decay, lr, divisor)
            for span in spans:
                if span.weights is not None:
                    span.weights.copy_(span.master)
            for bucket in done:
                self.updated(bucket)

    def _update(self, spans: Sequence[Span], decay: bool, lr: float, divisor: float) -> None:
        if not spans:
            return
        c = self.config
        weight_decay = c.weight_decay if decay else 0.0
        params, grads = [span.master for span in spans], [span.grad for span in spans]
        extra = {}
        if c.name == "sgd" or grads[0].dtype == torch.float64:  # the fused kernel takes its scale in float32 only
            torch._foreach_div_(grads, divisor)
        else:
            scale = torch.tensor(divisor, dtype=torch.float32, device=grads[0].device)
            extra = {"grad_scale": scale, "found_inf": torch.zeros_like(scale)}
        if c.name == "sgd":
            torch._foreach_mul_(params, 1.0 - lr * weight_decay)
            torch._foreach_sub_(params, grads, alpha=lr)
            return
        first, second = ([span.moments[i] for span in spans] for i in range(2))
        steps = [torch.tensor(float(self.updates), device=params[0].device) for _ in params]
        torch._fused_adamw_(
            params, grads, first, second, [], steps, lr=lr, beta1=c.betas[0], beta2=c.betas[1],
            weight_decay=weight_decay, eps=c.eps, amsgrad=False, maximize=False, **extra,
        )  # fmt: skip
