"""The reducer that exchanges compressed slices of gradients.

Each rank compresses the slices that it sends. The rank that receives a slice from all others adds them up in full
precision and, if all ranks need the whole sum, compresses the result once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.comm.group import Group, Pending
from meshwright.config.comm import GatherConfig, ReduceConfig
from meshwright.device import generator
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.engine.sharding.compression.residual import CompressingReducer, finite, wide
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.plugins import load_object
from meshwright.spec.layout.params import ParamRecord, stream_seed

CHUNK_ELEMENTS = 1 << 22  # the most elements that are compressed at once, unless a single slice has more


class Codec(Protocol):
    """Converts slices [slices, elements] to messages [slices, bytes], and back."""

    @property
    def fills_gaps(self) -> bool:
        """True if zeros are decoded as other numbers."""

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor: ...

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor: ...


def codec_of(config: ReduceConfig | GatherConfig) -> Codec:
    codec: Codec = load_object(config.facts.codec)(config)
    return codec


class ExchangeReducer(CompressingReducer):
    """Sums compressed slices, element by element."""

    def __init__(self, config: ReduceConfig, seed: int, keeps_sums: bool = True) -> None:
        """Prepare for sums with this config.

        With `keeps_sums`, the residual of a sum is stored separately. Without it, the rank that computes a sum adds
        the residual to that of its local gradients.
        """
        super().__init__(config, seed)
        self.codec = codec_of(config)
        self._keeps_sums = keeps_sums
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
        # With ZeRO, `reduce_scatter` has already added the residual and summed over the shards of the bucket.
        if bucket.stage:
            exchange = SliceExchange(self, bucket, bucket.share[0], grads.to(wide(grads.dtype)), group, replaces=False)
        else:
            # The old residual is already part of the sum, so the new one takes its place.
            exchange = SliceExchange(
                self, bucket, bucket.start, self.with_residual(bucket, grads), group, replaces=True
            )
        return GatheredSum(exchange, grads)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        if self.is_plain(bucket, group):
            return group.reduce_scatter(out, grads, wait=False)
        exchange = SliceExchange(self, bucket, bucket.start, self.with_residual(bucket, grads), group, replaces=True)
        return ScatteredSum(exchange, out)

    def encoded_sum(self, bucket: Bucket, start: int, x: Tensor) -> Tensor:
        """Return the message of a sum [1, elements] that this rank has computed, and store the residual."""
        if (residual := self.sum_residuals.get(bucket)) is None:
            return self.encode_slices(bucket, start, x, replaces=False)
        x.add_(residual, alpha=self.scale)
        message = self.codec.encode(x, None)
        left_out = x - self._decode_slice(bucket, start, message, x.shape[1], x.dtype)
        residual.copy_(finite(left_out).div_(self.scale))
        return message

    def encode_slices(self, bucket: Bucket, start: int, x: Tensor, replaces: bool) -> Tensor:
        """Return the messages of `x` [slices, elements], which begins at `start` of the buffer. Store the residual."""
        numbers, messages = self._random(bucket, x), []
        for first, rows in few_at_once(x):
            at = start + first * x.shape[1]
            noise = None if numbers is None else torch.empty_like(rows, dtype=torch.float32).uniform_(generator=numbers)
            messages.append(self.codec.encode(rows, noise))
            # Freed before decoding, which needs memory too.
            del noise
            if self.residuals:
                self.keep(
                    bucket, at, rows - self._decode_slice(bucket, at, messages[-1], x.shape[1], x.dtype), replaces
                )
        return torch.cat(messages)

    def decode_to(self, out: Tensor, bucket: Bucket, start: int, message: Tensor, dtype: torch.dtype) -> None:
        """Decode messages into `out` [slices, elements], which begins at `start` of the buffer."""
        for first, rows in few_at_once(out):
            part = message[first : first + rows.shape[0]]
            rows.copy_(self._decode_slice(bucket, start + first * out.shape[1], part, out.shape[1], dtype))

    def sum_of(self, bucket: Bucket, start: int, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the sum of the messages of one slice from all ranks."""
        total = torch.zeros(elements, dtype=dtype, device=message.device)
        for first, rows in few_at_once(total.expand(message.shape[0], elements)):
            total += self.codec.decode(message[first : first + rows.shape[0]], elements, dtype).sum(0)
        return self.without_gaps(bucket, start, total)

    def _decode_slice(self, bucket: Bucket, start: int, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return self.without_gaps(bucket, start, self.codec.decode(message, elements, dtype))

    def without_gaps(self, bucket: Bucket, start: int, x: Tensor) -> Tensor:
        """Set the elements to zero that belong to no parameter."""
        flat = x.view(-1)
        for low, high in self._gaps.get(bucket, []):
            flat[max(low - start, 0) : max(high - start, 0)] = 0
        return x

    def _random(self, bucket: Bucket, x: Tensor) -> torch.Generator | None:
        """Return random numbers for rounding, or None if rounding is not stochastic.

        They are keyed by seed, step, rank and bucket, never by the order of execution. With error feedback the nearest
        code is used: no error is lost, so rounding need not be unbiased.
        """
        if self.config.feeds_back or not self.config.facts.rounds:
            return None
        self._asked[bucket] += 1
        first, split = bucket.slots[0].record, bucket.buffer.split
        numbers = generator(x.device)
        numbers.manual_seed(
            stream_seed(self.seed, self.step, first.name, self._asked[bucket], split.shard, split.replica, "rounding")
        )
        return numbers


class SliceExchange:
    """The first half of a sum: each rank receives its slice from all ranks.

    `start` is the offset of `x` in the buffer. The exchange owns `x` and may overwrite it.
    """

    def __init__(
        self, reducer: ExchangeReducer, bucket: Bucket, start: int, x: Tensor, group: Group, replaces: bool
    ) -> None:
        self.reducer, self.bucket, self.group = reducer, bucket, group
        self.elements = x.numel() // group.size
        self.dtype = x.dtype
        self.start = start
        self.own = start + group.index * self.elements
        self._sent = reducer.encode_slices(bucket, start, x.view(group.size, -1), replaces)
        self._received = torch.empty_like(self._sent)
        self._pending: Pending = group.all_to_all(self._received, self._sent, wait=False)

    def sum(self) -> Tensor:
        """Wait for the messages, and return the sum of this rank's slice."""
        self._pending.wait()
        return self.reducer.sum_of(self.bucket, self.own, self._received, self.elements, self.dtype)


class ScatteredSum:
    """A sum of which each rank gets its shard."""

    def __init__(self, exchange: SliceExchange, out: Tensor) -> None:
        self._exchange, self._out = exchange, out

    def wait(self) -> None:
        self._out.copy_(self._exchange.sum())


class GatheredSum:
    """A sum that every rank gets: the summed slices are compressed again and all-gathered.

    All ranks decode the same messages, so that their sums are equal bit for bit.
    """

    def __init__(self, exchange: SliceExchange, out: Tensor) -> None:
        self._exchange, self._out = exchange, out
        exchange.reducer.register(self)

    def proceed(self) -> None:
        ours = self._exchange
        self._message = ours.reducer.encoded_sum(ours.bucket, ours.own, ours.sum()[None])
        self._received = self._message.new_empty(ours.group.size, self._message.shape[1])
        self._pending = ours.group.all_gather(self._received, self._message, wait=False)

    def wait(self) -> None:
        ours = self._exchange
        ours.reducer.proceed()
        self._pending.wait()
        ours.reducer.decode_to(self._out.view(ours.group.size, -1), ours.bucket, ours.start, self._received, ours.dtype)


def few_at_once(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first slice, slices) of `x` [slices, elements] in groups of at most AT_ONCE elements.

    Compressing needs several times the memory of its input, so the whole of `x` is never compressed at once.
    """
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for first in range(0, x.shape[0], rows):
        yield first, x[first : first + rows]


def gaps_of(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the buffer without content of a parameter: between parameters, and padded rows.

    Slots may begin before the bucket or end after it, if the bucket represents a fragment of a shard.
    """
    at = bucket.start
    for slot in bucket.slots:
        for low, high in filled_rows(slot.record):
            if at < slot.start + low:
                yield at, min(slot.start + low, bucket.stop)
            at = max(at, slot.start + high)
    if bucket.stop > at:
        yield at, bucket.stop


def filled_rows(record: ParamRecord) -> list[tuple[int, int]]:
    """Return the ranges of a local tensor's elements that are not padding. Only whole rows can be padding."""
    inner = record.numel // record.local_shape[0]
    if any(box.shape[1:] != record.local_shape[1:] for box in record.boxes):
        return [(0, record.numel)]
    return sorted((b.local_start[0] * inner, (b.local_start[0] + b.shape[0]) * inner) for b in record.boxes)
