"""The two schedules of reductions: once per step (ZeRO stages 0 and 1) or once per micro-batch (stages 2 and 3).

Both count the contributions to a bucket and launch its reduction when the last one has arrived, while backward still
runs. All ranks must launch in the same order, so the order depends on nothing that could differ between ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from meshwright.engine.sharding.buffers import Bucket, Slot
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.nn.weight_grad import Sink, SinkTable

# The reductions in flight in addition to the one just launched, if gradients are scattered once per micro-batch.
IN_FLIGHT = 1

# A function that begins to reduce a bucket's gradients and writes this rank's part of the sum to the given tensor.
Launch = Callable[[Bucket, Tensor], PendingReduction]


class OncePerStep:
    """Reduces each bucket once per step (stages 0 and 1).

    The first step shows how many contributions a parameter gets per micro-batch (a shared weight gets several). Buckets
    are launched in a fixed order; without `overlaps`, after the last backward. If a buffer releases gradients, `begin`
    releases those of the previous step.
    """

    def __init__(self, buckets: Sequence[Bucket], launch: Launch, overlaps: bool = True) -> None:
        self.buckets = list(buckets)
        self._launch = launch
        self._overlaps = overlaps
        self._index = {id(bucket): i for i, bucket in enumerate(self.buckets)}
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._expected: dict[int, int] = {}  # contributions per micro-batch by the slot's id, once known
        self._micro_batches = 0
        self._pending: list[PendingReduction] = []
        self._launched = 0
        self._waiting: list[int] = []

    def sink(self, sinks: SinkTable, bucket: Bucket, slot: Slot) -> Sink:
        return sinks.add(slot.grad, partial(self._on_gradient, bucket, slot), bucket.allocate_grads)

    def begin(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._pending, self._launched = [], 0
        self._waiting = [len(bucket.slots) for bucket in self.buckets]
        for bucket in self.buckets:
            if bucket.buffer.releases_grads:
                bucket.grads.release()

    def _on_gradient(self, bucket: Bucket, slot: Slot, sink: Sink) -> None:
        if not self._expected or not self._overlaps:
            return
        index = self._index[id(bucket)]
        expected = self._expected[id(slot)] * self._micro_batches
        if sink.contributions == expected:
            self._waiting[index] -= 1
            while self._launched < len(self.buckets) and self._waiting[self._launched] <= 0:
                self._launch_next()
        assert sink.contributions <= expected or index >= self._launched, (
            f"a gradient of {slot.name} came after its bucket was reduced"
        )

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        self._pending.append(self._launch(bucket, bucket.own_grads))
        self._launched += 1

    def finish(self) -> None:
        for bucket in self.buckets:
            bucket.allocate_grads()
        for slot in self._slots:
            # No contribution arrived, so the view still holds the gradient of the previous step.
            if slot.sink.fresh:
                slot.sink.view.zero_()
        while self._launched < len(self.buckets):
            self._launch_next()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        if not self._expected:
            for slot in self._slots:
                # -1 never matches: a parameter whose contributions vary is reduced in `finish`.
                per_micro_batch, rest = divmod(slot.sink.contributions, self._micro_batches)
                self._expected[id(slot)] = per_micro_batch if not rest else -1


class EveryMicroBatch:
    """Reduces each bucket once per micro-batch (stages 2 and 3), after which its whole gradients are released.

    A bucket is complete when all contributions of a micro-batch have arrived. `uses` has their number per parameter, by
    its id (1 if not listed).

    A user's module may use different parameters depending on the data, so its buckets wait for the end of a backward:
    of their unit in stage 3 (`end_unit`), or else of a chunk. `late` has, by the bucket's id, the chunk whose backward
    is the last that can contribute to it.
    """

    def __init__(
        self, buckets: Sequence[Bucket], launch: Launch, uses: Mapping[int, int], late: Mapping[int, int],
        overlaps: bool = True,
    ) -> None:  # fmt: skip
        self.buckets = list(buckets)
        self._launch = launch
        self._most = 1 + IN_FLIGHT if overlaps else 0
        self._index = {id(bucket): i for i, bucket in enumerate(self.buckets)}
        self._late = {index: late[at] for at, index in self._index.items() if at in late}
        self._expected = [sum(uses.get(id(slot.parameter), 1) for slot in bucket.slots) for bucket in self.buckets]
        self._ended: set[int] = set()  # the late buckets that were reduced in the current backward
        self._in_flight: deque[tuple[Bucket, PendingReduction, Tensor | None]] = deque()
        self.begin(0)

    def sink(self, sinks: SinkTable, bucket: Bucket, slot: Slot) -> Sink:
        return sinks.add(slot.grad, partial(self._on_gradient, bucket), partial(self._prepare, bucket))

    def begin(self, micro_batches: int) -> None:
        self._arrivals = [0] * len(self.buckets)
        self._has_sum = [False] * len(self.buckets)

    def _prepare(self, bucket: Bucket) -> None:
        """Make sure before a contribution that the whole gradient has memory and is not being reduced."""
        while any(other is bucket for other, _, _ in self._in_flight):
            self._finish_oldest()
        bucket.allocate_grads()

    def _on_gradient(self, bucket: Bucket, sink: Sink) -> None:
        index = self._index[id(bucket)]
        assert bucket.grads.allocated, "a gradient was written where there is no memory"
        self._arrivals[index] += 1
        self._ended.discard(index)
        if self._arrivals[index] == self._expected[index] and index not in self._late:
            self._scatter(bucket)

    def _scatter(self, bucket: Bucket) -> None:
        """Begin to reduce the gradients that have arrived in a bucket.

        The first reduction of a step writes directly to the tensor of the sum; later ones are added to it.
        """
        index = self._index[id(bucket)]
        for slot in bucket.slots:
            # A parameter without a contribution still holds values of an earlier micro-batch.
            if slot.sink.fresh:
                slot.sink.view.zero_()
            slot.sink.fresh = True
        part = torch.empty_like(bucket.own_grads) if self._has_sum[index] else None
        pending = self._launch(bucket, bucket.own_grads if part is None else part)
        self._in_flight.append((bucket, pending, part))
        self._arrivals[index], self._has_sum[index] = 0, True
        while len(self._in_flight) > self._most:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        bucket, pending, part = self._in_flight.popleft()
        pending.wait()
        bucket.grads.release()
        if part is not None:
            bucket.own_grads.add_(part)

    def end_backward(self, chunk: int) -> None:
        """Finish all launched reductions and release their memory, after a chunk's backward."""
        own = [index for index, last in self._late.items() if last == chunk]
        for index in own:
            if index not in self._ended:
                self._prepare(self.buckets[index])
                self._scatter(self.buckets[index])
        self._ended -= set(own)
        self._finish_all()

    def end_unit(self, buckets: Sequence[Bucket], unit: object = None) -> None:
        """Begin to reduce a unit's late buckets after its backward, in the same order on every rank.

        Contributions that arrive later, as for a unit that is used twice, are reduced by another call.
        """
        for bucket in buckets:
            index = self._index.get(id(bucket))
            if index in self._late:
                assert index is not None
                self._prepare(bucket)
                self._scatter(bucket)
                self._ended.add(index)

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def finish(self) -> None:
        for index, bucket in enumerate(self.buckets):
            if self._arrivals[index]:
                self._scatter(bucket)
        self._finish_all()
        for index, bucket in enumerate(self.buckets):
            if not self._has_sum[index]:
                bucket.own_grads.zero_()
