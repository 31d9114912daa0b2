"""Flat storage of master weights and optimizer states, and the passes of an update over it.

An update of the whole model takes a few fused calls. Each rank updates the shards that it owns. The arithmetic is that
of an update rule (`engine/optim/rule.py`).

fp64 and fp32 weights are updated in place. bf16 and fp16 weights have fp32 masters, which are copied to the weights
after the update. If both are on the device, a bf16 weight is one half of its master, and only the other half, the
remainder, is stored (`engine/sharding/remainders.py`). Updates are computed in fp32 (fp64 for fp64), whatever the dtype
and the place in which the states are stored. The scale of the gradient (loss scale, token count, clipping) is one
divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.memory import OffloadConfig, Place
from meshwright.config.optimizer import OptimizerConfig
from meshwright.device import PRECISION_DTYPES, kind_of
from meshwright.engine.optim.exchange import MatrixExchange
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.optim.rule import MatrixRule, Rule, StateSpec, UpdateStep, rules_of
from meshwright.engine.optim.scaling import Scaling
from meshwright.engine.sharding.buffers import EMA, PARAM, Bucket, FlatBuffer, State
from meshwright.engine.sharding.offload import Prefetcher, StateStore, cut_pieces
from meshwright.engine.sharding.remainders import PairedTensor, Values
from meshwright.kernels import kernels_take
from meshwright.spec.traffic.placement import piece_size

# The elements that are updated at a time if an update needs workspace: for example, if no kernel takes split masters,
# so that they must be joined first.
SLICE = 2**22
# The moving average of the weights, which `optimizer.ema` adds to the states of every rule.
AVERAGE = StateSpec(EMA, wide=True)


class UpdatePart(NamedTuple):
    """The tensors of a range that this rank owns.

    `decay` says whether its first weights decay, and `flips` are the offsets in the range at which that changes.
    `weights` are the model's weights if they are narrower than the masters. A `master` of int16 holds the
    remainders of masters whose other halves are the weights. `average` is the moving average of the weights, if the run
    keeps one.
    """

    decay: bool
    master: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    weights: Tensor | None
    flips: tuple[int, ...] = ()
    average: Tensor | None = None

    def cut(self, low: int, high: int) -> UpdatePart:
        """Return elements low to high. Either all or none of them must decay."""
        states = tuple(state[low:high] for state in self.states)
        weights = None if self.weights is None else self.weights[low:high]
        average = None if self.average is None else self.average[low:high]
        return UpdatePart(self.decay, self.master[low:high], self.grad[low:high], states, weights, average=average)

    def slices(self) -> Iterator[UpdatePart]:
        """Yield the range in slices of at most SLICE elements."""
        for low in range(0, self.master.numel(), SLICE):
            yield self.cut(low, low + SLICE)


class DecayRange(NamedTuple):
    """Elements low to high of this rank's shard of a bucket.

    `decay` says whether the first weights decay, and `flips` are the offsets in the shard at which that changes.
    """

    bucket: Bucket
    low: int
    high: int
    decay: bool
    flips: tuple[int, ...] = ()


class FlatState:
    """The masters of one buffer and the states of its rule, each in a store with one tensor per shard.

    - `in_place`: the model's weights are the masters.
    - `paired`: the weights are one half of the masters, and the first store holds the other half, the remainders.
    - `fused`: one kernel updates everything in the precisions it is stored in. It needs a kernel of every rule. A dry
      run has no device to check the tensors on; then `kernels` says so.
    - `ready`: updates use all stores in place. Otherwise a prefetcher copies them chunk by chunk.
    """

    def __init__(self, buffer: FlatBuffer, rule: Rule, offload: OffloadConfig, kernels: bool, fused: bool) -> None:
        self.buffer, self.rule = buffer, rule
        double = buffer.key.dtype == torch.float64
        self.dtype = torch.float64 if double else torch.float32
        names = (rule.config.master_dtype, rule.config.state_dtype)
        master_dtype, state_dtype = (self.dtype if double else PRECISION_DTYPES[name] for name in names)
        own = [bucket.own_params for bucket in buffer.buckets]
        sizes = [share.numel() for share in own]
        self.in_place = buffer.key.dtype == master_dtype or buffer.key.dtype.itemsize > master_dtype.itemsize

        def new(dtype: torch.dtype) -> StateStore:
            return StateStore(sizes, dtype, buffer.device, offload.optimizer_at, Path(offload.path))

        halves = (buffer.key.dtype, master_dtype) == (torch.bfloat16, torch.float32)
        self.paired = halves and set(offload.places) == {Place.DEVICE}
        new_dtype = torch.int16 if self.paired else master_dtype
        masters = StateStore.existing(own) if self.in_place else new(new_dtype)
        if not self.in_place and not self.paired:
            for master, params in zip(masters.shares, own, strict=True):
                master.copy_(params)
        self.specs = (*rule.states, AVERAGE) if rule.config.ema else rule.states
        self.stores = [masters, *(new(self.dtype if state.wide else state_dtype) for state in self.specs)]
        # The remainders of paired masters are always on the device and need no copy.
        copied = self.stores[1:] if self.paired else self.stores
        all_in_place = all(store.ready_in_place(buffer.device, self.dtype) for store in copied)
        kernel_fits = kernels and not double if own[0].is_meta else kernels_take(*masters.shares, *own, buffer.grads)
        on_device = offload.params_at is Place.DEVICE and all(store.on_device for store in copied)
        self.fused = fused and kernel_fits and on_device
        self.ready = self.fused or (all_in_place and buffer.grads.dtype == self.dtype)
        self._ranges = list(self._find_ranges())
        if not self.ready:
            limit = piece_size(int(offload.buffer_mib * 2**20 // self.dtype.itemsize), sizes)
            self._order = cut_pieces(sizes, list(reversed(range(len(sizes)))), limit)
            self._prefetcher = Prefetcher(copied, buffer.device, self.dtype, limit)

    @property
    def master(self) -> list[Values]:
        """The masters of this rank's shard of each bucket."""
        stored = self.stores[0].shares
        if not self.paired:
            return list(stored)
        return [PairedTensor(b.own_params, rest) for b, rest in zip(self.buffer.buckets, stored, strict=True)]

    @property
    def _adjacent(self) -> bool:
        """True if a range can continue into the next bucket, because buckets are adjacent in memory.

        They are if this rank owns whole buckets and updates use the stores in place. Exceptions are stage 3, whose
        store may be a file with gaps, and gradients that are allocated bucket by bucket.
        """
        split = self.buffer.split
        return self.ready and split.shards == 1 and (split.stage == 2 or not self.buffer.releases_grads)

    def _find_ranges(self) -> Iterator[DecayRange]:
        """Yield ranges of which all or no weights decay.

        They are joined across buckets where possible, so that few fused calls update everything.
        """
        for decay in (True, False):
            runs = self.buffer.runs(slot for slot in self.buffer.slots if slot.record.decay == decay)
            joined: list[DecayRange] = []
            end = -1  # the end of the last range, in the buffer
            for bucket, low, high in runs:
                if self._adjacent and bucket.start + low == end:
                    first = joined[-1].bucket
                    joined[-1] = joined[-1]._replace(high=bucket.start + high - first.start)
                else:
                    joined.append(DecayRange(bucket, low, high, decay))
                end = bucket.start + high
            yield from joined

    def _spans(self) -> list[DecayRange]:
        """Join the ranges where they touch. Usually one remains for each bucket, or one for all of them."""
        spans: list[DecayRange] = []
        end, decays = -1, False  # the end of the last range, and whether its last weights decay
        for current in sorted(self._ranges, key=lambda span: span.bucket.start + span.low):
            begin = current.bucket.start + current.low
            if begin == end and (self._adjacent or current.bucket is spans[-1].bucket):
                last = spans[-1]
                high = begin - last.bucket.start
                flips = last.flips if current.decay == decays else (*last.flips, high)
                spans[-1] = last._replace(high=high + current.high - current.low, flips=flips)
            else:
                spans.append(current)
            end, decays = begin + current.high - current.low, current.decay
        return spans

    @cached_property
    def _parts(self) -> list[tuple[Bucket, UpdatePart]]:
        """The parts to update, created at the first update: gradients without memory can have no views before."""
        return [(span.bucket, self._part(span)) for span in self._ranges]

    @cached_property
    def _joined_parts(self) -> list[tuple[Bucket, UpdatePart]]:
        return [(span.bucket, self._part(span)) for span in self._spans()]

    def _part(self, span: DecayRange) -> UpdatePart:
        bucket, low, high, decay, flips = span
        master, *states = (_from(store.shares[bucket.index], low, high) for store in self.stores)
        weights = None if self.in_place else _from(bucket.own_params, low, high)
        flips = tuple(at - low for at in flips)
        average = states.pop() if self.rule.config.ema else None
        return UpdatePart(decay, master, _from(bucket.own_grads, low, high), tuple(states), weights, flips, average)

    def portions(self, joined: bool = False) -> Iterator[tuple[list[UpdatePart], list[Bucket]]]:
        """Yield the parts to update together, and the buckets that are complete after them.

        One yield usually covers the whole buffer. If other ranks wait for the weights, it covers one bucket, beginning
        with those that forward needs first. If states are copied, it covers one chunk. With `joined`, one part may hold
        both weights that decay and weights that do not.
        """
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
        # If the weights are the masters and are updated in copied chunks, they are complete only after the last chunk
        # has been copied back.
        late = self.in_place and not self.stores[0].ready_in_place(self.buffer.device, self.dtype)
        for piece, copies in self._prefetcher.run(self._order):
            bucket, parts = self.buffer.buckets[piece.share], []
            at = slice(piece.low, piece.high)
            remainders = [self.stores[0].shares[piece.share][at]] if self.paired else []
            master, *states = remainders + copies
            weights = None if self.in_place else bucket.own_params[at]
            grad = bucket.own_grads[at].to(self.dtype)
            average = states.pop() if self.rule.config.ema else None
            whole = UpdatePart(True, master, grad, tuple(states), weights, average=average)
            for _, low, high, decay, _ in (span for span in self._ranges if span.bucket is bucket):
                low, high = max(low, piece.low), min(high, piece.high)
                if low < high:
                    parts.append(whole.cut(low - piece.low, high - piece.low)._replace(decay=decay))
            yield parts, [bucket] if piece.last and not late else []
            # Later passes of a matrix rule read the gradients that this pass wrote, so the converted copy is written
            # back.
            if isinstance(self.rule, MatrixRule) and grad.dtype != bucket.own_grads.dtype:
                bucket.own_grads[at].copy_(grad)
        if late:
            yield [], list(reversed(self.buffer.buckets))


def _from(share: Tensor, low: int, high: int) -> Tensor:
    """Return elements low to high of a shard. Unlike a slice, they may extend into the next shards in memory."""
    return share.as_strided((high - low,), (1,), share.storage_offset() + low)


def _joined(parts: list[UpdatePart]) -> Iterator[list[UpdatePart]]:
    """Yield parts to update together, with complete masters.

    The parts that have complete masters come first, then slices of the others. The master of a slice is joined from the
    two halves; it is split again when the caller asks for the next slice.
    """
    yield [part for part in parts if part.master.dtype != torch.int16]
    for part in (part for part in parts if part.master.dtype == torch.int16):
        # A dry run makes no update, so it needs no memory to join masters in.
        if part.master.is_meta:
            continue
        for piece in part.slices():
            assert piece.weights is not None
            paired = PairedTensor(piece.weights, piece.master)
            master = paired.join()
            yield [piece._replace(master=master, weights=None)]
            paired[:] = master


class FlatOptimizer:
    """The states of all buffers, and their updates. `updated` is called for each bucket with new weights."""

    def __init__(
        self,
        buffers: list[FlatBuffer],
        config: OptimizerConfig,
        updated: Callable[[Bucket], None] = lambda bucket: None,
        offload: OffloadConfig | None = None,
        kernels: bool = False,
        exchange: Callable[[FlatBuffer, MatrixRule], MatrixExchange] | None = None,
    ) -> None:
        """Allocate the states. `exchange` creates the exchange of a buffer whose rule needs whole matrices."""
        self.config, self.updated, rules = config, updated, rules_of(config)
        trained = [buffer for buffer in buffers if buffer.key.trained]
        self.frozen = [buffer for buffer in buffers if not buffer.key.trained]
        offload = offload or OffloadConfig()
        # The kernels do not update an average.
        fused = all(rule.has_kernel for group in rules for rule in group if rule is not None) and not config.ema
        self.states = [
            FlatState(buffer, rules[buffer.key.update.group].of(buffer.key.update), offload, kernels, fused)
            for buffer in trained
        ]
        assert len({state.fused for state in self.states}) < 2
        self._exchanges: dict[FlatState, MatrixExchange] = {}
        for state in self.states:
            if isinstance(state.rule, MatrixRule):
                assert exchange is not None
                self._exchanges[state] = exchange(state.buffer, state.rule)
        self._updates: int | Tensor = 0
        self.averaged = 0  # the number of updates since the moving average of the weights began

    @property
    def updates(self) -> int:
        """The number of updates so far. If the device counts them, reading it makes the host wait for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, value: int) -> None:
        self._updates = value

    def tensors(self) -> Iterator[State | MatrixState]:
        """Yield every state that a checkpoint must hold, the parameters included."""
        for state in self.states:
            yield State(PARAM, state.buffer, state.master)
            for spec, store in zip(state.specs, state.stores[1:], strict=True):
                begins = state.master if spec is AVERAGE else ()
                yield State(spec.name, state.buffer, store.shares, begins=begins)
        yield from self.owned()
        for buffer in self.frozen:
            yield State(PARAM, buffer, [bucket.own_params for bucket in buffer.buckets])

    def owned(self) -> Iterator[MatrixState]:
        """Yield the states of the whole matrices that this rank owns."""
        for exchange in self._exchanges.values():
            yield from (state for state in exchange.states if state.held)

    def publish(self) -> None:
        """Bring the model's weights up to date after other code, such as a load, has set the masters."""
        for state in self.states:
            for bucket, master in zip(state.buffer.buckets, state.stores[0].shares, strict=True):
                if not (state.in_place or state.paired):
                    bucket.own_params.copy_(master)
            for bucket in reversed(state.buffer.buckets):
                self.updated(bucket)

    @property
    def on_device(self) -> bool:
        """True if `step_on_device` can run, which is a fused pass with numbers from the device."""
        return bool(self.states) and all(
            state.fused and kind_of(state.buffer.device).runs_triton for state in self.states
        )

    @torch.no_grad()
    def step_on_device(self, lr: float, scaling: Scaling[Tensor]) -> None:
        """Make one update, or none if `scaling` says so. The device decides, so the host never waits for it."""
        if not isinstance(self._updates, Tensor):
            self._updates = torch.full((), float(self._updates), dtype=torch.float64, device=scaling.norm.device)
        self._updates = self._updates + scaling.updates
        self._fused_step(lr, [scaling.updates.double(), 1.0 / scaling.divisor])

    def _fused_step(self, lr: float, numbers: list[Tensor]) -> None:
        """Make one update with the kernels of the rules. `numbers` are the first two of `Rule.update_by_kernel`."""
        taken: dict[type[Rule], Tensor] = {}
        for state in reversed(self.states):
            rule = state.rule
            # The hyperparameters behind these numbers are the same in all groups.
            if type(rule) not in taken:
                own = [torch.as_tensor(number).to(numbers[0]) for number in rule.kernel_numbers(self._updates)]
                taken[type(rule)] = torch.stack([*numbers, *own]).float()
            for parts, done in state.portions(joined=True):
                for part in parts:
                    rule.update_by_kernel(part, self._lr_of(rule, lr), taken[type(rule)])
                for bucket in done:
                    self.updated(bucket)

    def _lr_of(self, rule: Rule, lr: float) -> float:
        """Return the learning rate of a rule in a step: its own peak, scheduled like the run's."""
        return lr * (rule.config.lr / self.config.lr)

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """Make one update with gradients / divisor."""
        self.updates += 1
        self.averaged += 1
        if self.on_device:
            numbers = torch.tensor([1.0, 1.0 / divisor], dtype=torch.float64, device=self.states[0].buffer.device)
            self._fused_step(lr, list(numbers))
            return
        step = UpdateStep(self.updates, lr, divisor)
        # `transform` replaces the gradients of matrices, so it precedes the updates that read them.
        for state, exchange in self._exchanges.items():
            assert isinstance(state.rule, MatrixRule)
            for parts, _ in state.portions():
                state.rule.direct([part for part in parts if not part.master.is_meta], step)
            exchange.run(partial(state.rule.transform, step=step))
        # Buffers are in the order of backward. In reverse, the weights that forward needs first are complete first.
        for state in reversed(self.states):
            own = step._replace(lr=self._lr_of(state.rule, lr))
            for parts, done in state.portions():
                self._update(state.rule, parts, own)
                for bucket in done:
                    self.updated(bucket)

    def _update(self, rule: Rule, parts: list[UpdatePart], step: UpdateStep) -> None:
        """Update the masters and states of some ranges by a rule, then their average and weights."""
        for group in _joined(parts):
            for decay in (True, False):
                chosen = [part for part in group if part.decay == decay and not part.master.is_meta]
                if chosen:
                    rule.update(chosen, rule.config.weight_decay if decay else 0.0, step)
            for part in group:
                if part.average is not None and not part.master.is_meta:
                    part.average.lerp_(part.master, self._average_weight)
                if part.weights is not None:
                    part.weights.copy_(part.master)

    @property
    def _average_weight(self) -> float:
        """The weight of the newest weights in the moving average.

        The first averages are plain means: a new run's first weights are random, and would stay in it for long.
        """
        return max(1.0 - self.config.ema, 1.0 / self.averaged)
