"""Storage of masters and states in flat buffers, and the passes of an update over them: a few fused calls for the whole
model, each rank on the shares that it owns. The arithmetic is the rule's (`engine/optim/rule.py`).

fp64 and fp32 weights are updated in place; bf16 and fp16 weights have fp32 masters, which are copied over after the
update. Where both are on the device, a bf16 weight is one half of its master and the states hold the other
(`engine/sharding/remainders.py`). Updates are computed in fp32 (fp64 for fp64), whatever the states are stored in,
and wherever. The gradient's scale (loss scale, token count, clipping) is one number that the update divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.optimizer import OptimizerConfig
from meshwright.config.sections import OffloadConfig
from meshwright.device import PRECISION_DTYPES
from meshwright.engine.optim.exchange import MatrixExchange
from meshwright.engine.optim.rule import MatrixRule, Rule, UpdateStep, rules_of
from meshwright.engine.optim.scaling import Scaling
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer, State
from meshwright.engine.sharding.offload import Prefetcher, StateStore, cut_pieces
from meshwright.engine.sharding.remainders import PairedTensor, Values
from meshwright.kernels import kernels_take
from meshwright.spec.traffic.placement import piece_size

# Elements that are updated at a time where an update needs memory of its own, as for masters that are joined because
# no kernel takes them as they are stored.
SLICE = 2**22


class UpdatePart(NamedTuple):
    """The tensors of a range that this rank owns. `decay` says whether its first weights decay, and `flips` where that
    changes (counted from the range's begin). `weights` are the model's own weights, where they are narrower than the
    masters; masters of int16 are the weights' remainders."""

    decay: bool
    master: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    weights: Tensor | None
    flips: tuple[int, ...] = ()

    def cut(self, low: int, high: int) -> UpdatePart:
        """Return elements low to high, which must all decay or all not."""
        states = tuple(state[low:high] for state in self.states)
        weights = None if self.weights is None else self.weights[low:high]
        return UpdatePart(self.decay, self.master[low:high], self.grad[low:high], states, weights)

    def slices(self) -> Iterator[UpdatePart]:
        """Yield the range in slices of at most SLICE elements."""
        for low in range(0, self.master.numel(), SLICE):
            yield self.cut(low, low + SLICE)


class DecayRange(NamedTuple):
    """Elements low to high of this rank's share of a bucket. The first weights decay or don't, as `decay` says, and
    those at each of `flips` are the first for which that changes."""

    bucket: Bucket
    low: int
    high: int
    decay: bool
    flips: tuple[int, ...] = ()


class FlatState:
    """The masters of one buffer and the states that its rule keeps. Each is a store with one tensor per bucket, of this
    rank's share of it. `in_place` says that the model's own weights are the masters, `paired` that they are one half of
    them and the first store holds the remainders; `fused` that one kernel updates everything in the precisions it is
    stored in (where a dry run has no device, `kernels` says that it would); `ready` that updates use all stores as they
    are; else a prefetcher copies them in pieces."""

    def __init__(self, buffer: FlatBuffer, rule: Rule, offload: OffloadConfig, kernels: bool) -> None:
        self.buffer, self.rule = buffer, rule
        double = buffer.key.dtype == torch.float64
        self.dtype = torch.float64 if double else torch.float32
        names = (rule.config.master_dtype, rule.config.state_dtype)
        master_dtype, state_dtype = (self.dtype if double else PRECISION_DTYPES[name] for name in names)
        own = [bucket.own_params for bucket in buffer.buckets]
        sizes = [share.numel() for share in own]
        self.in_place = buffer.key.dtype == master_dtype or buffer.key.dtype.itemsize > master_dtype.itemsize

        def new(dtype: torch.dtype) -> StateStore:
            return StateStore(sizes, dtype, buffer.device, offload.optimizer, Path(offload.path))

        halves = (buffer.key.dtype, master_dtype) == (torch.bfloat16, torch.float32)
        self.paired = halves and offload.optimizer == offload.params == "none"
        masters = StateStore.existing(own) if self.in_place else new(torch.int16 if self.paired else master_dtype)
        if not self.in_place and not self.paired:
            for master, params in zip(masters.shares, own, strict=True):
                master.copy_(params)
        self.stores = [masters, *(new(self.dtype if state.wide else state_dtype) for state in rule.states)]
        brought = self.stores[1:] if self.paired else self.stores
        alike = all(store.ready_in_place(buffer.device, self.dtype) for store in brought)
        taken = kernels and not double if own[0].is_meta else kernels_take(*masters.shares, *own, buffer.grads)
        stays = offload.params == "none" and all(store.on_device for store in brought)
        self.fused = rule.has_kernel and taken and stays
        self.ready = self.fused or (alike and buffer.grads.dtype == self.dtype)
        self._ranges = list(self._find_ranges())
        if not self.ready:
            limit = piece_size(int(offload.buffer_mib * 2**20 // self.dtype.itemsize), sizes)
            self._order = cut_pieces(sizes, list(reversed(range(len(sizes)))), limit)
            self._prefetcher = Prefetcher(brought, buffer.device, self.dtype, limit)

    @property
    def master(self) -> list[Values]:
        """The masters of each share."""
        stored = self.stores[0].shares
        if not self.paired:
            return list(stored)
        return [PairedTensor(b.own_params, rest) for b, rest in zip(self.buffer.buckets, stored, strict=True)]

    @property
    def _adjacent(self) -> bool:
        """Whether a range can continue into the next bucket. Where this rank owns whole buckets and the states are
        ready in place, the buckets are adjacent in memory (except in stage 3, whose store may be a file with gaps, and
        where the gradients of each bucket have memory of their own)."""
        split = self.buffer.split
        return self.ready and split.shards == 1 and (split.stage == 2 or not self.buffer.releases_grads)

    def _find_ranges(self) -> Iterator[DecayRange]:
        """Yields the ranges whose weights all decay or all don't, joined across buckets where possible, so that few
        fused calls update everything."""
        for decay in (True, False):
            runs = self.buffer.runs(slot for slot in self.buffer.slots if slot.record.decay == decay)
            joined: list[DecayRange] = []
            end = -1  # of the last one, in the buffer
            for bucket, low, high in runs:
                if self._adjacent and bucket.start + low == end:
                    first = joined[-1].bucket
                    joined[-1] = joined[-1]._replace(high=bucket.start + high - first.start)
                else:
                    joined.append(DecayRange(bucket, low, high, decay))
                end = bucket.start + high
            yield from joined

    def _spans(self) -> list[DecayRange]:
        """The same ranges, joined where they touch: as a rule one for each bucket, or for all of them."""
        spans: list[DecayRange] = []
        end, decays = -1, False  # of the last one
        for found in sorted(self._ranges, key=lambda found: found.bucket.start + found.low):
            begin = found.bucket.start + found.low
            if begin == end and (self._adjacent or found.bucket is spans[-1].bucket):
                last = spans[-1]
                high = begin - last.bucket.start
                flips = last.flips if found.decay == decays else (*last.flips, high)
                spans[-1] = last._replace(high=high + found.high - found.low, flips=flips)
            else:
                spans.append(found)
            end, decays = begin + found.high - found.low, found.decay
        return spans

    @cached_property
    def _parts(self) -> list[tuple[Bucket, UpdatePart]]:
        """What is updated, found when the first update asks: no view can be taken of gradients without memory."""
        return [(found.bucket, self._part(found)) for found in self._ranges]

    @cached_property
    def _joined_parts(self) -> list[tuple[Bucket, UpdatePart]]:
        return [(found.bucket, self._part(found)) for found in self._spans()]

    def _part(self, found: DecayRange) -> UpdatePart:
        bucket, low, high, decay, flips = found
        master, *states = (_from(store.shares[bucket.index], low, high) for store in self.stores)
        weights = None if self.in_place else _from(bucket.own_params, low, high)
        flips = tuple(at - low for at in flips)
        return UpdatePart(decay, master, _from(bucket.own_grads, low, high), tuple(states), weights, flips)

    def portions(self, joined: bool = False) -> Iterator[tuple[list[UpdatePart], list[Bucket]]]:
        """Yields what is updated at once, and the buckets that are complete after it: the whole buffer; or, where other
        ranks wait for the weights, one bucket, beginning with those that forward needs first; or one piece. Parts that
        are `joined` hold weights that decay and others."""
        if not self.ready:
            yield from self._prefetched()
            return
        parts = self._joined_parts if joined else self._parts
        if self.buffer.split.shards == 1:
            yield [part for _, part in parts], self.buffer.buckets
        else:
            for bucket in reversed(self.buffer.buckets):
                yield [part for owner, part in parts if owner is bucket], [bucket]

    def _prefetched(self) -> Iterator[tuple[list[UpdatePart], list[Bucket]]]:
        # Weights that are themselves updated in copied pieces are complete only when the last has been copied back.
        late = self.in_place and not self.stores[0].ready_in_place(self.buffer.device, self.dtype)
        for piece, brought in self._prefetcher.run(self._order):
            bucket, parts = self.buffer.buckets[piece.share], []
            at = slice(piece.low, piece.high)
            kept = [self.stores[0].shares[piece.share][at]] if self.paired else []
            master, *states = kept + brought
            weights = None if self.in_place else bucket.own_params[at]
            grad = bucket.own_grads[at].to(self.dtype)
            whole = UpdatePart(True, master, grad, tuple(states), weights)
            for _, low, high, decay, _ in (found for found in self._ranges if found.bucket is bucket):
                low, high = max(low, piece.low), min(high, piece.high)
                if low < high:
                    parts.append(whole.cut(low - piece.low, high - piece.low)._replace(decay=decay))
            yield parts, [bucket] if piece.last and not late else []
            if isinstance(self.rule, MatrixRule) and grad.dtype != bucket.own_grads.dtype:
                bucket.own_grads[at].copy_(grad)  # its passes hand gradients on
        if late:
            yield [], list(reversed(self.buffer.buckets))


def _from(share: Tensor, low: int, high: int) -> Tensor:
    """Returns elements low to high of a share. Unlike a slice, they may reach into the next shares in memory."""
    return share.as_strided((high - low,), (1,), share.storage_offset() + low)


def _joined(parts: list[UpdatePart]) -> Iterator[list[UpdatePart]]:
    """Yields what is updated at once, with masters in full: first the parts that have them, and then the others in
    slices. A slice is joined from weights and remainders, which are set when the next one is asked for."""
    yield [part for part in parts if part.master.dtype != torch.int16]
    for part in (part for part in parts if part.master.dtype == torch.int16):
        if part.master.is_meta:
            continue  # a dry run's update joins nothing in memory
        for piece in part.slices():
            assert piece.weights is not None
            paired = PairedTensor(piece.weights, piece.master)
            master = paired.join()
            yield [piece._replace(master=master, weights=None)]
            paired[:] = master


class FlatOptimizer:
    """The states of all buffers and their updates. `updated` is called for each bucket with new weights."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        config: OptimizerConfig,
        updated: Callable[[Bucket], None] = lambda bucket: None,
        offload: OffloadConfig | None = None,
        kernels: bool = False,
        exchange: Callable[[FlatBuffer, MatrixRule], MatrixExchange] | None = None,
    ) -> None:
        """`exchange` makes what brings whole matrices to one rank each, for a rule that needs them."""
        self.rules, self.updated = rules_of(config), updated
        trained = [buffer for buffer in buffers if buffer.key.trained]
        self.frozen = [buffer for buffer in buffers if not buffer.key.trained]
        offload = offload or OffloadConfig()
        self.states = [FlatState(buffer, self._rule_of(buffer), offload, kernels) for buffer in trained]
        assert len({state.fused for state in self.states}) < 2
        self._exchanges: dict[FlatState, MatrixExchange] = {}
        for state in self.states:
            if isinstance(state.rule, MatrixRule):
                assert exchange is not None
                self._exchanges[state] = exchange(state.buffer, state.rule)
        self._updates: int | Tensor = 0

    def _rule_of(self, buffer: FlatBuffer) -> Rule:
        if not buffer.key.matrices:
            return self.rules.elements
        assert self.rules.matrices is not None
        return self.rules.matrices

    @property
    def updates(self) -> int:
        """Updates made so far; on a device that counts them itself, reading this waits for it."""
        return int(self._updates)

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates = value

    def tensors(self) -> Iterator[State]:
        """Yields every state that a checkpoint must hold."""
        for state in self.states:
            yield State("param", state.buffer, state.master)
            for spec, store in zip(state.rule.states, state.stores[1:], strict=True):
                yield State(spec.name, state.buffer, store.shares)
        for buffer in self.frozen:
            yield State("param", buffer, [bucket.own_params for bucket in buffer.buckets])

    def publish(self) -> None:
        """Brings the model's weights up to date after a load has set the masters."""
        for state in self.states:
            for bucket, master in zip(state.buffer.buckets, state.stores[0].shares, strict=True):
                if not (state.in_place or state.paired):
                    bucket.own_params.copy_(master)
            for bucket in reversed(state.buffer.buckets):
                self.updated(bucket)

    @property
    def on_device(self) -> bool:
        """Whether `step_on_device` can run: a fused pass with numbers from the device."""
        return bool(self.states) and all(state.fused and state.buffer.grads.is_cuda for state in self.states)

    @torch.no_grad()
    def step_on_device(self, lr: float, scaling: Scaling[Tensor]) -> None:
        """Makes one update, or none if `scaling` says so. The device decides which, so the host never waits for it."""
        if not isinstance(self._updates, Tensor):
            self._updates = torch.full((), float(self._updates), dtype=torch.float64, device=scaling.norm.device)
        self._updates = self._updates + scaling.updates
        numbers = [scaling.updates.double(), 1.0 / scaling.divisor, *self.rules.elements.kernel_numbers(self._updates)]
        self._fused_step(lr, torch.stack(numbers).float())

    def _fused_step(self, lr: float, numbers: Tensor) -> None:
        """Makes an update by the rule's kernel."""
        for state in reversed(self.states):
            for parts, done in state.portions(joined=True):
                for part in parts:
                    state.rule.update_by_kernel(part, lr, numbers)
                for bucket in done:
                    self.updated(bucket)

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """Makes one update with gradients / divisor."""
        self.updates += 1
        if self.on_device:
            numbers = [1.0, 1.0 / divisor, *self.rules.elements.kernel_numbers(self.updates)]
            self._fused_step(lr, torch.tensor(numbers, device=self.states[0].buffer.device))
            return
        step = UpdateStep(self.updates, lr, divisor)
        for state, exchange in self._exchanges.items():
            assert isinstance(state.rule, MatrixRule)
            for parts, _ in state.portions():
                state.rule.direct([part for part in parts if not part.master.is_meta], step)
            exchange.run(state.rule.transform)
        for state in reversed(self.states):
            for parts, done in state.portions():
                self._update(state.rule, parts, step)
                for bucket in done:
                    self.updated(bucket)

    def _update(self, rule: Rule, parts: list[UpdatePart], step: UpdateStep) -> None:
        """Updates some ranges by a rule, and the weights that stand for them."""
        for whole in _joined(parts):
            for decay in (True, False):
                chosen = [part for part in whole if part.decay == decay and not part.master.is_meta]
                if chosen:
                    rule.update(chosen, rule.config.weight_decay if decay else 0.0, step)
            for part in whole:
                if part.weights is not None:
                    part.weights.copy_(part.master)
