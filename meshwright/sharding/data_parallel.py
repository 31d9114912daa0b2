"""Data parallelism on contiguous buffers, for every ZeRO stage: gradients reduced bucket by bucket while backward is
still running, weights gathered before they are needed.

Without ZeRO every rank owns whole buckets, and a bucket is summed once a step, as soon as its last contribution has
come. How many contributions a parameter gets from one micro-batch is learned in the first step (a shared weight gets
several). Buckets are launched in one fixed order on every rank.
Stage 1: a rank owns its share of each bucket, so the sum is scattered, and after the update the weights are gathered.
Stage 2: whole gradients exist for one micro-batch only: a bucket is scattered once a micro-batch and added up there.
Stage 3: whole weights exist while a unit uses them: see `weights`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwright.comm.group import Group, Pending
from meshwright.comm.mesh import Mesh
from meshwright.config.sections import ZeroConfig
from meshwright.errors import UserError
from meshwright.nn.weight_grad import Sink
from meshwright.sharding.buffers import Bucket, Slot, build_buffers
from meshwright.sharding.placement import Split, divided
from meshwright.sharding.weights import Weights, find_units, number_units

NORM_PIECE = 1 << 15
IN_FLIGHT = 1  # reductions under way beside the one that was just launched, where gradients are scattered each time

Reduce = Callable[[Tensor, Group], Pending]


def all_reduce_bucket(grads: Tensor, group: Group) -> Pending:
    return group.all_reduce(grads, wait=False)


class DataParallel:
    """The gradients of one rank's chunks, from the first contribution of a step to the reduced sum."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        mesh: Mesh,
        bucket_mib: float = 25.0,
        reduce: Reduce = all_reduce_bucket,
        zero: ZeroConfig | None = None,
        grad_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """`seed` draws the parameters that have no memory yet."""
        self.mesh, self.reduce = mesh, reduce
        modules, zero = list(modules), zero or ZeroConfig()
        self.stage, shard_axes, replica_axes = divided(mesh.layout, zero)
        if self.stage and reduce is not all_reduce_bucket:
            raise UserError(f"a reduction of one's own needs zero.stage=0, not {self.stage}: change one of them")
        self.shards = mesh.group(shard_axes) if shard_axes else mesh.alone
        self.replicas = mesh.group(replica_axes) if replica_axes else mesh.alone
        stage = self.stage
        places = ((group.size, max(0, group.index)) for group in (self.shards, self.replicas))
        split = Split(stage, *(number for place in places for number in place))
        units = find_units(modules)
        numbers, at = number_units(units), (zero.offload.params, Path(zero.offload.path))
        self.buffers, slots = build_buffers(modules, {"dp-cp": split}, bucket_mib, numbers, grad_dtype, at, seed)
        self.buckets = [bucket for buffer in self.buffers for bucket in buffer.buckets]
        self._device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        self.weights = Weights(units, slots, self.buffers, self.shards, mesh.ledger, stage)
        self._expected: dict[int, int] = {}
        self._learned = False
        self._micro_batches = 0
        self._pending: list[Pending] = []
        self._launched = 0
        self._waiting: list[int] = []
        self._index = {id(bucket): i for i, bucket in enumerate(self.buckets)}
        for buffer in self.buffers:
            for slot in buffer.slots:
                bucket = buffer.buckets[slot.bucket]
                if stage >= 2:
                    slot.sink = Sink(slot.grad, partial(self._came_in, bucket), partial(self._prepare, bucket))
                else:
                    slot.sink = Sink(slot.grad, partial(self._arrived, bucket, slot))
                slot.parameter.register_post_accumulate_grad_hook(partial(_take_gradient, slot.sink))
        layers = [_attach_sinks(module, slots) for module in modules]
        # Stage 2 and 3. A bucket is complete when all of a micro-batch's contributions have come: one from each layer
        # that adds its own, else one from autograd.
        uses: dict[int, int] = {}
        for parameter in (id(p) for found in layers for p in found):
            uses[parameter] = uses.get(parameter, 0) + 1
        self._whole = [sum(uses.get(id(slot.parameter), 1) for slot in bucket.slots) for bucket in self.buckets]
        self._came = [0] * len(self.buckets)
        self._added = [False] * len(self.buckets)
        self._flying: deque[tuple[Bucket, Pending, Tensor | None]] = deque()
        # What a module that is not ours uses may depend on the data, and ranks must launch alike: its buckets go after
        # a micro-batch's last backward that can fill them.
        self._late: dict[int, int] = {}
        for unit in (unit for unit in units if unit.whole_chunk):
            for bucket in unit.buckets:
                at = self._index[id(bucket)]
                self._late[at] = min(unit.chunk, self._late.get(at, unit.chunk))

    def begin(self, micro_batches: int) -> None:
        """Before the first micro-batch of a step."""
        self._micro_batches = micro_batches
        self._pending, self._launched = [], 0
        self._waiting = [len(bucket.slots) for bucket in self.buckets]
        self._came = [0] * len(self.buckets)
        self._added = [False] * len(self.buckets)
        for buffer in self.buffers:
            for slot in buffer.slots:
                slot.sink.reset()

    # Stages 0 and 1: once a step.

    def _arrived(self, bucket: Bucket, slot: Slot, sink: Sink) -> None:
        if not self._learned:
            return
        index = self._index[id(bucket)]
        expected = self._expected.get(id(slot), 0) * self._micro_batches
        if sink.contributions == expected:
            self._waiting[index] -= 1
            while self._launched < len(self.buckets) and self._waiting[self._launched] <= 0:
                self._launch()
        assert sink.contributions <= expected or index >= self._launched, (
            f"a gradient of {slot.name} came after its bucket was reduced"
        )

    def _launch(self) -> None:
        """Begins the reduction of the next bucket: over the ranks that share it, or, where each holds it whole, over
        all of them."""
        bucket = self.buckets[self._launched]
        with self.mesh.ledger.phase("reduce"), self.mesh.ledger.layer(None):
            if self.stage:
                self._pending.append(self.shards.reduce_scatter(bucket.own_grads, bucket.grads.tensor, wait=False))
            else:
                self._pending.append(self.reduce(bucket.grads.tensor, self.replicas))
        self._launched += 1

    def _finish_whole(self) -> None:
        for buffer in self.buffers:
            for slot in buffer.slots:
                if slot.sink.fresh:
                    slot.sink.view.zero_()
        while self._launched < len(self.buckets):
            self._launch()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        if not self._learned:
            self._learn()

    def _learn(self) -> None:
        for buffer in self.buffers:
            for slot in buffer.slots:
                each, rest = divmod(slot.sink.contributions, self._micro_batches)
                self._expected[id(slot)] = each if not rest else -1
        self._learned = True

    # Stages 2 and 3: once a micro-batch.

    def _prepare(self, bucket: Bucket) -> None:
        """Before a contribution: there is memory for the whole gradient, and it is not being reduced."""
        while any(other is bucket for other, _, _ in self._flying):
            self._land()
        if not bucket.grads.held:
            bucket.grads.take()
            bucket.zero_gaps()

    def _came_in(self, bucket: Bucket, sink: Sink) -> None:
        index = self._index[id(bucket)]
        assert bucket.grads.held, "a gradient was written where there is no memory"
        self._came[index] += 1
        if self._came[index] == self._whole[index] and index not in self._late:
            self._scatter(bucket)

    def _scatter(self, bucket: Bucket) -> None:
        """Begins the reduction of what has come to a bucket. The first of a step goes where the sum is kept."""
        index = self._index[id(bucket)]
        for slot in bucket.slots:
            if slot.sink.fresh:
                slot.sink.view.zero_()
            slot.sink.fresh = True
        part = torch.empty_like(bucket.own_grads) if self._added[index] else None
        with self.mesh.ledger.phase("reduce"), self.mesh.ledger.layer(None):
            out = bucket.own_grads if part is None else part
            self._flying.append((bucket, self.shards.reduce_scatter(out, bucket.grads.tensor, wait=False), part))
        self._came[index], self._added[index] = 0, True
        while len(self._flying) > 1 + IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        bucket, pending, part = self._flying.popleft()
        pending.wait()
        bucket.grads.give()
        if part is not None:
            bucket.own_grads.add_(part)

    def gather(self, chunk: int, work: str) -> None:
        self.weights.begin(chunk, work)

    def free(self, chunk: int) -> None:
        self.weights.end(chunk)

    def add_up(self, chunk: int) -> None:
        """After a backward: all that was launched has been added up and its memory given back."""
        for index, last in self._late.items():
            if last == chunk:
                self._prepare(self.buckets[index])
                self._scatter(self.buckets[index])
        self._land_all()

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _finish_scattered(self) -> None:
        for index, bucket in enumerate(self.buckets):
            if self._came[index]:
                self._scatter(bucket)
        self._land_all()
        for index, bucket in enumerate(self.buckets):
            if not self._added[index]:
                bucket.own_grads.zero_()

    # All stages.

    def finish(self) -> None:
        """After the last backward: reduces what is left, and the owned shares over the further axes."""
        self._finish_scattered() if self.stage >= 2 else self._finish_whole()
        with self.mesh.ledger.phase("reduce"):
            if self.stage:
                self._sum_over([self.replicas], self.buckets)
            for buffer in self.buffers:
                self._sum_over([self.mesh.group(axis) for axis in buffer.key.partial], buffer.buckets)

    def _sum_over(self, groups: list[Group], buckets: list[Bucket]) -> None:
        for group in groups:
            pending = [group.all_reduce(bucket.own_grads, wait=False) for bucket in buckets]
            for one in pending:
                one.wait()

    def holds_first(self, slot: Slot) -> bool:
        """Whether this rank, or a data-parallel copy of it, is the first that holds this content."""
        return all(self.mesh.group(axis).index <= 0 for axis in slot.record.copies)

    def counts(self, slot: Slot) -> bool:
        """Whether this rank counts what it owns of `slot` in sums over all parameters (each element exactly once)."""
        return self.replicas.index <= 0 and self.holds_first(slot)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Sum of squares of the reduced gradients that this rank counts, float64 for fp64 and else float32."""
        pieces = [
            bucket.own_grads[start:stop]
            for buffer in self.buffers
            for bucket, start, stop in buffer.runs(s for s in buffer.slots if self.counts(s))
        ]
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        narrow = [piece for piece in pieces if piece.element_size() == 2]
        others = [piece for piece in pieces if piece.element_size() > 2]
        sums = [_square_sum(part, wide) for part, wide in ((narrow, torch.float32), (others, None)) if part]
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def _square_sum(pieces: list[Tensor], wide: torch.dtype | None) -> Tensor:
    if pieces[0].device.type == "cpu":  # whose kernel adds up one by one in float32: short pieces keep it exact
        pieces = [part for piece in pieces for part in piece.split(NORM_PIECE)]
        norms = torch._foreach_norm(pieces, dtype=wide)
    else:
        norms = [torch.linalg.vector_norm(piece, dtype=wide) for piece in pieces]
    return torch.stack(list(norms)).double().square().sum()


def _take_gradient(sink: Sink, parameter: Tensor) -> None:
    """For gradients that come through autograd: into the flat buffer, and away with the temporary."""
    grad = parameter.grad
    parameter.grad = None
    if grad is not None:
        sink.add(grad)


def _attach_sinks(module: nn.Module, slots: dict[int, Slot]) -> list[nn.Parameter]:
    """Layers that add their own weight gradients (they have `sinks`) get the views to add to; their weights."""
    found = []
    for layer in module.modules():
        sinks = getattr(layer, "sinks", None)
        if isinstance(sinks, dict):
            for name, parameter in layer.named_parameters(recurse=False):
                if id(parameter) in slots and name == "weight":
                    sinks[name] = slots[id(parameter)].sink.view
                    found.append(parameter)
    return found
