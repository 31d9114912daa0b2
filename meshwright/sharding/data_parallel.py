"""Data parallelism on contiguous buffers: gradients reduced bucket by bucket while backward is still running.

How many contributions a parameter gets from one micro-batch is learned in the first step (a shared weight gets
several), so that later a bucket is known to be complete the moment its last contribution arrives. Buckets are
launched in one fixed order on every rank. How a bucket is reduced over the data axes is one replaceable function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.comm.group import Group, Pending
from meshwright.comm.mesh import Mesh
from meshwright.nn.weight_grad import Sink
from meshwright.sharding.buffers import Bucket, FlatBuffer, Slot, build_buffers

NORM_PIECE = 1 << 15

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
    ) -> None:
        self.mesh, self.reduce = mesh, reduce
        modules = list(modules)
        data_axes = {"dp-cp": mesh.data.size}
        self.buffers, slots = build_buffers(modules, data_axes, bucket_mib)
        self._expected: dict[int, int] = {}
        self._learned = False
        self._micro_batches = 0
        self._pending: list[Pending] = []
        self._launched = 0
        self._waiting: list[int] = []
        # Buckets that are summed over data axes alone can go while backward runs; the others wait for its end.
        self._early = [(b, bucket) for b in self.buffers if not b.key.partial for bucket in b.buckets]
        self._early_index = {(id(b), bucket.index): i for i, (b, bucket) in enumerate(self._early)}
        for buffer in self.buffers:
            for slot in buffer.slots:
                slot.sink = Sink(buffer.grad_of(slot), partial(self._arrived, buffer, slot))
                hook = partial(_take_gradient, slot.sink)
                slot.parameter.register_post_accumulate_grad_hook(hook)
        for module in modules:
            _attach_sinks(module, slots)

    def begin(self, micro_batches: int) -> None:
        """Before the first micro-batch of a step."""
        self._micro_batches = micro_batches
        self._pending, self._launched = [], 0
        self._waiting = [len(bucket.slots) for _, bucket in self._early]
        for buffer in self.buffers:
            for slot in buffer.slots:
                slot.sink.reset()

    def _arrived(self, buffer: FlatBuffer, slot: Slot, sink: Sink) -> None:
        index = self._early_index.get((id(buffer), slot.bucket))
        if index is None or not self._learned:
            return
        expected = self._expected.get(id(slot), 0) * self._micro_batches
        if sink.contributions == expected:
            self._waiting[index] -= 1
            while self._launched < len(self._early) and self._waiting[self._launched] <= 0:
                self._launch(*self._early[self._launched])
        assert sink.contributions <= expected or index >= self._launched, (
            f"a gradient of {slot.name} came after its bucket was reduced"
        )

    def _launch(self, buffer: FlatBuffer, bucket: Bucket) -> None:
        group = self.mesh.group(buffer.key.data_axes)
        with self.mesh.ledger.phase("reduce"), self.mesh.ledger.layer(None):
            self._pending.append(self.reduce(buffer.grads[bucket.start : bucket.stop], group))
        self._launched += 1

    def finish(self) -> None:
        """After the last backward: reduces what is left, over the further axes first, and waits for all of it."""
        for buffer in self.buffers:
            for slot in buffer.slots:
                if slot.sink.fresh:
                    slot.sink.view.zero_()
        while self._launched < len(self._early):
            self._launch(*self._early[self._launched])
        with self.mesh.ledger.phase("reduce"):
            for buffer in self.buffers:
                if buffer.key.partial:
                    self._reduce_partial(buffer)
        for pending in self._pending:
            pending.wait()
        self._pending = []
        if not self._learned:
            self._learn()

    def _reduce_partial(self, buffer: FlatBuffer) -> None:
        for axis in buffer.key.partial:
            self.mesh.group(axis).all_reduce(buffer.grads)
        group = self.mesh.group(buffer.key.data_axes)
        self._pending += [self.reduce(buffer.grads[b.start : b.stop], group) for b in buffer.buckets]

    def _learn(self) -> None:
        for buffer in self.buffers:
            for slot in buffer.slots:
                each, rest = divmod(slot.sink.contributions, self._micro_batches)
                self._expected[id(slot)] = each if not rest else -1
        self._learned = True

    def holds_first(self, slot: Slot) -> bool:
        """Whether this rank, or a data-parallel copy of it, is the first that holds this content."""
        return all(self.mesh.group(axis).index <= 0 for axis in slot.record.copies)

    def counts(self, slot: Slot) -> bool:
        """Whether this rank is the one that counts `slot` in sums over all parameters (each exactly once)."""
        return self.mesh.data.index <= 0 and self.holds_first(slot)

    @torch.no_grad()
    def square_sum(self) -> Tensor:
        """Sum of squares of the reduced gradients that this rank counts, float64 for fp64 and else float32."""
        pieces = [
            buffer.grads[start:stop]
            for buffer in self.buffers
            for start, stop in buffer.runs(s for s in buffer.slots if self.counts(s))
        ]
        device = self.buffers[0].grads.device
        if not pieces:
            return torch.zeros((), dtype=torch.float64, device=device)
        if device.type == "cpu":  # whose kernel adds up one by one in float32: short pieces keep it exact
            pieces = [part for piece in pieces for part in piece.split(NORM_PIECE)]
            norms = torch._foreach_norm(pieces)
        else:
            norms = [torch.linalg.vector_norm(piece) for piece in pieces]
        return torch.stack(list(norms)).double().square().sum()


def _take_gradient(sink: Sink, parameter: Tensor) -> None:
    """For gradients that come through autograd: into the flat buffer, and away with the temporary."""
    grad = parameter.grad
    parameter.grad = None
    if grad is not None:
        sink.add(grad)


def _attach_sinks(module: nn.Module, slots: dict[int, Slot]) -> None:
    """Layers that add their own weight gradients (they have `sinks`) get the views to add to."""
    for layer in module.modules():
        sinks = getattr(layer, "sinks", None)
        if isinstance(sinks, dict):
            for name, parameter in layer.named_parameters(recurse=False):
                if id(parameter) in slots and name == "weight":
                    sinks[name] = slots[id(parameter)].sink.view


