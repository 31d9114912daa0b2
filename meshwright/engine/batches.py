"""The micro-batches of a rank.

One rank of each tensor-parallel group reads the samples ahead of their use and broadcasts them to the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from meshwright.engine.context import Context
from meshwright.models.stage import LossCounts
from meshwright.spec.layout.rows import ORDERS
from meshwright.spec.model.description import CONTEXT_DOCUMENTS, CONTEXT_ROWS, VISIBILITY_FIELDS, on_host


class Dataset(Protocol):
    """A source of samples. Sample n of a run is a pure function of the seed and n, for any n."""

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]: ...


class SampleSubset:
    """The samples of a dataset with the given numbers.

    Samples beyond them, which pad the last round of the ranks, have no loss.
    """

    def __init__(self, dataset: Dataset, numbers: Sequence[int]) -> None:
        self.dataset, self.numbers = dataset, numbers

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        if n < len(self.numbers):
            return self.dataset.sample(self.numbers[n])
        sample = self.dataset.sample(self.numbers[0])
        return sample | {"loss_mask": np.zeros_like(sample["loss_mask"])}


def by_source(dataset: Dataset, samples: int) -> dict[str, list[int]]:
    """Group the numbers of the first samples by their source file, if the dataset has `source_of`."""
    numbers: dict[str, list[int]] = {}
    source_of = getattr(dataset, "source_of", lambda n: "")
    for n in range(samples):
        numbers.setdefault(source_of(n), []).append(n)
    return numbers


def sample_ids(consumed: int, micro_batch: int, size: int, dp_rank: int, dp: int) -> range:
    """Return the samples of one micro-batch of one data-parallel rank, in the step that begins at `consumed`."""
    first = consumed + (micro_batch * dp + dp_rank) * size
    return range(first, first + size)


def rows_of_rank(
    sample: Mapping[str, np.ndarray[Any, Any]], order: str, rank: int, ranks: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the rows of a sample that one of the ranks that share it holds.

    The result also has the numbers (CONTEXT_ROWS) and documents (CONTEXT_DOCUMENTS) of the rows of all ranks, in the
    order of the ranks.
    """
    rows = len(sample["tokens"])
    segments = sample.get("segments")
    starts = [0] if segments is None else [0, *np.flatnonzero(np.diff(segments)) + 1]
    table = ORDERS[order](rows, ranks, np.diff([*starts, rows]).tolist())
    cut = {name: x[table.rows_of(rank)] if np.shape(x)[:1] == (rows,) else x for name, x in sample.items()}
    cut[CONTEXT_ROWS] = table.order
    if segments is not None:
        cut[CONTEXT_DOCUMENTS] = segments[table.order]
    return cut


class PackedBatch(NamedTuple):
    """One micro-batch in host memory: one packed tensor per dtype, and the counts of the loss's terms."""

    packed: dict[torch.dtype, Tensor]
    counts: Mapping[str, float]


class MicroBatches:
    """Loads the micro-batches of this rank's chunks. `fields` are the names of the batch's tensors that they read.

    The one thread of `reader` reads, packs and pins samples; with `of_step` it is a micro-batch ahead. `load` copies to
    the device and broadcasts on the caller's thread, since all ranks must communicate in the same order. An error in
    reading is raised by the `load` of that micro-batch.
    """

    def __init__(
        self,
        ctx: Context,
        dataset: Dataset,
        fields: set[str] | None,
        reader: ThreadPoolExecutor,
        loss_counts: LossCounts | None = None,
    ) -> None:
        self.ctx, self.dataset, self.reader, self.loss_counts = ctx, dataset, reader, loss_counts
        self.size = ctx.config.train.micro_batch
        self.sends = ctx.mesh.tp.index <= 0
        self._exchanged = 0
        self.counts_terms = ctx.mesh.is_first("tp", "cp") and ctx.pp_rank == ctx.layout.first_and_last[0]
        self._pending_reads: dict[tuple[int, int], Future[PackedBatch]] = {}
        # Fields of one dtype are packed, so that there is one broadcast per dtype.
        self.packs: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
        for name, array in sorted(self._own_rows(dataset.sample(0)).items()):
            if fields is None or name in fields:
                value = torch.as_tensor(array)
                self.packs.setdefault(value.dtype, []).append((name, tuple(value.shape)))
        # One tp rank reads, and the others receive a broadcast. But the host needs some fields to plan attention. To
        # copy them from the device, a rank would wait for all earlier work on it, so every rank reads these itself.
        known = {name for pack in self.packs.values() for name, _ in pack}
        self.reads = self.sends or bool(known & VISIBILITY_FIELDS)

    def load(self, consumed: int, micro_batch: int) -> dict[str, Tensor]:
        """Return a micro-batch of the step that begins at sample `consumed`, on the device."""
        if not self.packs:
            return {}
        ctx, tp = self.ctx, self.ctx.mesh.tp
        if self.reads:
            # Micro-batches that were read ahead for another step are stale: the run was rolled back meanwhile.
            self._pending_reads = {key: read for key, read in self._pending_reads.items() if key[0] == consumed}
            packs = self._ask(consumed, micro_batch).result().packed
            del self._pending_reads[consumed, micro_batch]
        batch: dict[str, Tensor] = {}
        for dtype, fields in self.packs.items():
            sizes = [self.size * int(np.prod(shape)) for _, shape in fields]
            if self.sends:
                packed = ctx.device.upload_pinned(packs[dtype])
            else:
                packed = torch.empty(sum(sizes), dtype=dtype, device=ctx.device.torch)
            tp.broadcast(packed)
            for (name, shape), part in zip(fields, packed.split(sizes), strict=True):
                batch[name] = part.view(self.size, *shape)
            if self.reads:
                for (name, shape), part in zip(fields, packs[dtype].split(sizes), strict=True):
                    if name in VISIBILITY_FIELDS:
                        batch[on_host(name)] = part.view(self.size, *shape)
        return batch

    def of_step(self, consumed: int, count: int, following: int | None = None) -> Callable[[int], dict[str, Tensor]]:
        """Return a `load` for the `count` micro-batches of a step that also begins to read the next micro-batch.

        After the last one that is the first micro-batch of the step that begins at `following`, if given.
        """

        def batch(micro_batch: int) -> dict[str, Tensor]:
            loaded = self.load(consumed, micro_batch)
            step, ahead = (consumed, micro_batch + 1) if micro_batch + 1 < count else (following, 0)
            if step is not None and self.reads and self.packs:
                self._ask(step, ahead)
            return loaded

        return batch

    def counts(self, consumed: int, micro_batches: int) -> Mapping[str, float]:
        """Return the counts of the loss's terms in this data-parallel rank's samples of a step.

        Only one rank of each tp and cp group and of each pipeline counts; the others return nothing. The micro-batches
        that are read for it are kept for `load`.
        """
        counts: Counter[str] = Counter()
        if self.counts_terms:
            for read in [self._ask(consumed, i) for i in range(micro_batches)]:
                counts.update(read.result().counts)
            # `load` returns at once on a rank that reads no fields, so it would never release them.
            if not self.packs:
                self._pending_reads = {}
        return counts

    def exchange(self, by: int) -> None:
        """Let each data-parallel rank read the samples of the rank `by` places after it from now on."""
        self._exchanged, self._pending_reads = by, {}

    def _ask(self, consumed: int, micro_batch: int) -> Future[PackedBatch]:
        key = (consumed, micro_batch)
        if key not in self._pending_reads:
            self._pending_reads[key] = self.reader.submit(self._read, consumed, micro_batch)
        return self._pending_reads[key]

    def _own_rows(self, sample: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Return a sample or, if ranks share sequences, this rank's rows of it and the numbers of all ranks' rows."""
        tokens = self.ctx.mesh.tokens
        if tokens.alone:
            return sample
        return rows_of_rank(sample, self.ctx.config.context.order, tokens.index, tokens.size)

    def _read(self, consumed: int, micro_batch: int) -> PackedBatch:
        readers = self.ctx.mesh.samples
        position = (readers.index + self._exchanged) % readers.size if self._exchanged else readers.index
        ids = sample_ids(consumed, micro_batch, self.size, position, readers.size)
        whole = [self.dataset.sample(n) for n in ids]
        samples = [self._own_rows(sample) for sample in whole]
        packed: dict[torch.dtype, Tensor] = {}
        for dtype, fields in self.packs.items():
            parts = [np.stack([s[name] for s in samples]).reshape(-1) for name, _ in fields]
            packed[dtype] = self.ctx.device.pin(torch.from_numpy(np.concatenate(parts)))
        counts: Counter[str] = Counter()
        if self.loss_counts is not None:
            # Whole samples are counted, not this rank's rows: one of the ranks that share a sample counts for all.
            for sample in whole:
                counts.update(self.loss_counts(sample))
        return PackedBatch(packed, counts)
