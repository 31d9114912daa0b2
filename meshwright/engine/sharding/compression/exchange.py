"""The reducer that exchanges compressed pieces.

Each rank compresses what it sends; the rank that a piece is sent to adds up the pieces of all in full precision and,
where all ranks need the whole sum, compresses the result once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.comm.group import Group, Pending
from meshwright.config.comm import ROUNDED, SPARSE, ReduceConfig
from meshwright.device import generator
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.engine.sharding.compression.quantised import Rounding, Signs
from meshwright.engine.sharding.compression.residual import Compressing, finite, wide
from meshwright.engine.sharding.compression.sparse import Sparse
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.spec.layout.params import ParamRecord, stream_seed

AT_ONCE = 1 << 22  # elements that are compressed at once, unless a piece has more


class Codec(Protocol):
    """How pieces [pieces, elements] become messages [pieces, bytes], and back."""

    @property
    def fills_gaps(self) -> bool:
        """Whether zeros arrive as other numbers."""

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor: ...

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor: ...


def codec_of(config: ReduceConfig) -> Codec:
    if config.kind in SPARSE:
        return Sparse(config)
    return Signs(config.block) if config.kind == "onebit" else Rounding(config.kind, config.block)


class ExchangeReducer(Compressing):
    """Sums compressed pieces, element by element."""

    def __init__(self, config: ReduceConfig, seed: int, keeps_sums: bool = True) -> None:
        """With `keeps_sums` what is left out of a sum is kept with it; without, by the rank that makes it, with what it
        leaves out of its own gradients."""
        super().__init__(config, seed)
        self.codec, self._keeps_sums = codec_of(config), keeps_sums
        self._asked: Counter[Bucket] = Counter()
        self._gaps: dict[Bucket, list[tuple[int, int]]] = {}

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        super().prepare(buffers)
        if self.codec.fills_gaps:
            self._gaps = {bucket: list(gaps_of(bucket)) for buffer in self.buffers for bucket in buffer.buckets}
        gathered = [buffer for buffer in self.buffers if buffer.split.replicas > 1 and self._keeps_sums]
        for bucket in (bucket for buffer in gathered for bucket in buffer.buckets if bucket in self.residuals):
            part = (bucket.stop - bucket.start) // bucket.buffer.split.ranks
            self.sum_residuals[bucket] = self.residuals[bucket].new_zeros(part)

    def begin_step(self, step: int, scale: float) -> None:
        super().begin_step(step, scale)
        self._asked.clear()

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if self.is_plain(bucket, group):
            return group.all_reduce(grads, wait=False)
        if bucket.stage:  # the residual was added before the sum over the ranks that share the bucket
            exchange = Exchange(self, bucket, bucket.share[0], grads.to(wide(grads.dtype)), group, anew=False)
        else:
            exchange = Exchange(self, bucket, bucket.start, self.with_residual(bucket, grads), group, anew=True)
        return Gathering(exchange, grads)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        if self.is_plain(bucket, group):
            return group.reduce_scatter(out, grads, wait=False)
        exchange = Exchange(self, bucket, bucket.start, self.with_residual(bucket, grads), group, anew=True)
        return Scattering(exchange, out)

    def encoded_sum(self, bucket: Bucket, start: int, x: Tensor) -> Tensor:
        """Returns the message of a sum [1, elements] that this rank has made; keeps the rest."""
        if (kept := self.sum_residuals.get(bucket)) is None:
            return self.encoded(bucket, start, x, anew=False)
        x.add_(kept, alpha=self.scale)
        message = self.codec.encode(x, None)
        left_out = x - self._decoded(bucket, start, message, x.shape[1], x.dtype)
        kept.copy_(finite(left_out).div_(self.scale))
        return message

    def encoded(self, bucket: Bucket, start: int, x: Tensor, anew: bool) -> Tensor:
        """Returns the messages of `x` [pieces, elements], which begins at `start` of the buffer; keeps the rest."""
        numbers, messages = self._random(bucket, x), []
        for first, rows in few_at_once(x):
            at = start + first * x.shape[1]
            noise = None if numbers is None else torch.empty_like(rows, dtype=torch.float32).uniform_(generator=numbers)
            messages.append(self.codec.encode(rows, noise))
            del noise
            if self.residuals:
                self.keep(bucket, at, rows - self._decoded(bucket, at, messages[-1], x.shape[1], x.dtype), anew)
        return torch.cat(messages)

    def decode_to(self, out: Tensor, bucket: Bucket, start: int, message: Tensor, dtype: torch.dtype) -> None:
        """Sets `out` [pieces, elements], which begins at `start` of the buffer, to the numbers of messages."""
        for first, rows in few_at_once(out):
            some = message[first : first + rows.shape[0]]
            rows.copy_(self._decoded(bucket, start + first * out.shape[1], some, out.shape[1], dtype))

    def sum_of(self, bucket: Bucket, start: int, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns the sum of messages that all are of the same piece."""
        total = torch.zeros(elements, dtype=dtype, device=message.device)
        for first, rows in few_at_once(total.expand(message.shape[0], elements)):
            total += self.codec.decode(message[first : first + rows.shape[0]], elements, dtype).sum(0)
        return self.without_gaps(bucket, start, total)

    def _decoded(self, bucket: Bucket, start: int, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return self.without_gaps(bucket, start, self.codec.decode(message, elements, dtype))

    def without_gaps(self, bucket: Bucket, start: int, x: Tensor) -> Tensor:
        """Zeroes what is no parameter's."""
        flat = x.view(-1)
        for low, high in self._gaps.get(bucket, []):
            flat[max(low - start, 0) : max(high - start, 0)] = 0
        return x

    def _random(self, bucket: Bucket, x: Tensor) -> torch.Generator | None:
        """Random numbers keyed by seed, step, rank and place, never by the order of execution. With error feedback
        rounding needs no chance: nothing is lost."""
        if self.config.feeds_back or self.config.kind not in ROUNDED:
            return None
        self._asked[bucket] += 1
        first, split = bucket.slots[0].record, bucket.buffer.split
        numbers = generator(x.device)
        numbers.manual_seed(
            stream_seed(self.seed, self.step, first.name, self._asked[bucket], split.shard, split.replica, "rounding")
        )
        return numbers


class Exchange:
    """The first half of a sum: each rank gets its piece from all ranks. `start` is where `x`, which becomes ours,
    begins in the buffer."""

    def __init__(
        self, reducer: ExchangeReducer, bucket: Bucket, start: int, x: Tensor, group: Group, anew: bool
    ) -> None:
        self.reducer, self.bucket, self.group = reducer, bucket, group
        self.elements, self.dtype = x.numel() // group.size, x.dtype
        self.start, self.own = start, start + group.index * self.elements
        self._sent = reducer.encoded(bucket, start, x.view(group.size, -1), anew)
        self._found = torch.empty_like(self._sent)
        self._pending: Pending = group.all_to_all(self._found, self._sent, wait=False)

    def sum(self) -> Tensor:
        """Returns the sum of this rank's piece."""
        self._pending.wait()
        return self.reducer.sum_of(self.bucket, self.own, self._found, self.elements, self.dtype)


class Scattering:
    """A sum of which each rank gets its share."""

    def __init__(self, exchange: Exchange, out: Tensor) -> None:
        self._exchange, self._out = exchange, out

    def wait(self) -> None:
        self._out.copy_(self._exchange.sum())


class Gathering:
    """A sum that every rank gets: the summed pieces are compressed again. All ranks read the same messages, so that
    their sums are equal to the bit."""

    def __init__(self, exchange: Exchange, out: Tensor) -> None:
        self._exchange, self._out = exchange, out
        exchange.reducer.begun(self)

    def proceed(self) -> None:
        at = self._exchange
        self._message = at.reducer.encoded_sum(at.bucket, at.own, at.sum()[None])
        self._found = self._message.new_empty(at.group.size, self._message.shape[1])
        self._pending = at.group.all_gather(self._found, self._message, wait=False)

    def wait(self) -> None:
        at = self._exchange
        at.reducer.proceed()
        self._pending.wait()
        at.reducer.decode_to(self._out.view(at.group.size, -1), at.bucket, at.start, self._found, at.dtype)


def few_at_once(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields (number of the first, pieces) of `x` [pieces, elements]: compressing takes several times the memory of
    what is compressed, so not all is compressed at once."""
    rows = max(1, AT_ONCE // x.shape[1])
    for first in range(0, x.shape[0], rows):
        yield first, x[first : first + rows]


def gaps_of(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """Yields the ranges of the buffer that hold no parameter's content: between parameters, and rows of padding. Slots
    may begin before the bucket, or end behind it, where it stands for a part of one."""
    at = bucket.start
    for slot in bucket.slots:
        for low, high in filled_rows(slot.record):
            if at < slot.start + low:
                yield at, min(slot.start + low, bucket.stop)
            at = max(at, slot.start + high)
    if bucket.stop > at:
        yield at, bucket.stop


def filled_rows(record: ParamRecord) -> list[tuple[int, int]]:
    """Returns the ranges of a local tensor's elements that are no padding, which is whole rows."""
    inner = record.numel // record.local_shape[0]
    if any(box.shape[1:] != record.local_shape[1:] for box in record.boxes):
        return [(0, record.numel)]
    return sorted((b.local_start[0] * inner, (b.local_start[0] + b.shape[0]) * inner) for b in record.boxes)
