"""Micro-batches for a rank: which samples, read ahead by one rank of each tensor-parallel group and broadcast to it."""

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
from meshwright.spec.model.description import CONTEXT_DOCUMENTS, CONTEXT_ROWS, WHO_SEES_WHOM, on_host


class Dataset(Protocol):
    """Sample n of a run, for any n: a pure function of the seed and n."""

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]: ...


class Picked:
    """The samples of a dataset with these numbers. Those behind, which fill up the last round of the ranks, have no
    loss."""

    def __init__(self, dataset: Dataset, numbers: Sequence[int]) -> None:
        self.dataset, self.numbers = dataset, numbers

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        if n < len(self.numbers):
            return self.dataset.sample(self.numbers[n])
        found = self.dataset.sample(self.numbers[0])
        return found | {"loss_mask": np.zeros_like(found["loss_mask"])}


def by_source(dataset: Dataset, samples: int) -> dict[str, list[int]]:
    """The numbers of the first samples by where they come from, if the dataset says that (`source_of`)."""
    found: dict[str, list[int]] = {}
    source_of = getattr(dataset, "source_of", lambda n: "")
    for n in range(samples):
        found.setdefault(source_of(n), []).append(n)
    return found


def sample_ids(consumed: int, micro_batch: int, size: int, dp_rank: int, dp: int) -> range:
    """The samples of one micro-batch of one data-parallel rank, in the step that begins at `consumed`."""
    first = consumed + (micro_batch * dp + dp_rank) * size
    return range(first, first + size)


def rows_of_rank(
    sample: Mapping[str, np.ndarray[Any, Any]], order: str, rank: int, ranks: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the rows of a sample that one of the ranks that share it holds, and of all rows, in the order of the
    ranks, their numbers and documents."""
    rows = len(sample["tokens"])
    segments = sample.get("segments")
    starts = [0] if segments is None else [0, *np.flatnonzero(np.diff(segments)) + 1]
    table = ORDERS[order](rows, ranks, np.diff([*starts, rows]).tolist())
    cut = {name: x[table.held(rank)] if np.shape(x)[:1] == (rows,) else x for name, x in sample.items()}
    cut[CONTEXT_ROWS] = table.order
    if segments is not None:
        cut[CONTEXT_DOCUMENTS] = segments[table.order]
    return cut


class Read(NamedTuple):
    """One micro-batch in host memory: the fields of each dtype as one tensor, and what the loss's terms count in it."""

    packed: dict[torch.dtype, Tensor]
    counts: Mapping[str, float]


class MicroBatches:
    """Loads what this rank's chunks need; `fields` are the names of the batch's tensors that they read.

    Samples are read, packed and pinned by the `reader`'s one thread, in `of_step` a micro-batch ahead; the copy to the
    device and the broadcast happen in `load`, on the caller's thread, in the order in which all ranks call it. An error
    in reading is raised by the `load` that asks for what could not be read.
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
        self.sends, self._exchanged = ctx.mesh.tp.index <= 0, 0
        self.counts_terms = ctx.mesh.is_first("tp", "cp") and ctx.pp_rank == ctx.layout.first_and_last[0]
        self._coming: dict[tuple[int, int], Future[Read]] = {}
        # One broadcast per dtype: fields of one dtype travel packed.
        self.packs: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
        for name, array in sorted(self._own_rows(dataset.sample(0)).items()):
            if fields is None or name in fields:
                value = torch.as_tensor(array)
                self.packs.setdefault(value.dtype, []).append((name, tuple(value.shape)))
        # One tp rank reads and the others get a broadcast. The host needs some fields to plan attention: a rank that
        # had them on its device alone would wait there for all work before, so every rank reads those by itself.
        known = {name for pack in self.packs.values() for name, _ in pack}
        self.reads = self.sends or bool(known & WHO_SEES_WHOM)

    def load(self, consumed: int, micro_batch: int) -> dict[str, Tensor]:
        """A micro-batch of the step that begins at sample `consumed`, on the device."""
        if not self.packs:
            return {}
        ctx, tp = self.ctx, self.ctx.mesh.tp
        if self.reads:
            # What was read for another step was read in vain: the run went on from elsewhere.
            self._coming = {key: read for key, read in self._coming.items() if key[0] == consumed}
            packs = self._ask(consumed, micro_batch).result().packed
            del self._coming[consumed, micro_batch]
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
                    if name in WHO_SEES_WHOM:
                        batch[on_host(name)] = part.view(self.size, *shape)
        return batch

    def of_step(self, consumed: int, count: int, following: int | None = None) -> Callable[[int], dict[str, Tensor]]:
        """`load` for the `count` micro-batches of a step, which begins to read the next one each time: after the last
        the first of the step that begins at `following`."""

        def batch(micro_batch: int) -> dict[str, Tensor]:
            found = self.load(consumed, micro_batch)
            step, coming = (consumed, micro_batch + 1) if micro_batch + 1 < count else (following, 0)
            if step is not None and self.reads and self.packs:
                self._ask(step, coming)
            return found

        return batch

    def counts(self, consumed: int, micro_batches: int) -> Mapping[str, float]:
        """What the loss's terms count in this data-parallel rank's samples of a step; nothing on ranks that leave that
        to another one. What is read for it is kept for `load`."""
        found: Counter[str] = Counter()
        if self.counts_terms:
            for read in [self._ask(consumed, i) for i in range(micro_batches)]:
                found.update(read.result().counts)
            if not self.packs:
                self._coming = {}
        return found

    def exchange(self, by: int) -> None:
        """From now on a data-parallel rank reads the samples of the one so many places after it."""
        self._exchanged, self._coming = by, {}

    def _ask(self, consumed: int, micro_batch: int) -> Future[Read]:
        key = (consumed, micro_batch)
        if key not in self._coming:
            self._coming[key] = self.reader.submit(self._read, consumed, micro_batch)
        return self._coming[key]

    def _own_rows(self, sample: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """A sample or, where ranks share sequences, this rank's rows of it and the numbers of all ranks' rows."""
        tokens = self.ctx.mesh.tokens
        if tokens.alone:
            return sample
        return rows_of_rank(sample, self.ctx.config.context.order, tokens.index, tokens.size)

    def _read(self, consumed: int, micro_batch: int) -> Read:
        readers = self.ctx.mesh.samples
        place = (readers.index + self._exchanged) % readers.size if self._exchanged else readers.index
        ids = sample_ids(consumed, micro_batch, self.size, place, readers.size)
        whole = [self.dataset.sample(n) for n in ids]
        samples = [self._own_rows(sample) for sample in whole]
        packed: dict[torch.dtype, Tensor] = {}
        for dtype, fields in self.packs.items():
            parts = [np.stack([s[name] for s in samples]).reshape(-1) for name, _ in fields]
            packed[dtype] = self.ctx.device.pin(torch.from_numpy(np.concatenate(parts)))
        counts: Counter[str] = Counter()
        if self.loss_counts is not None:
            for sample in whole:  # one of the ranks that share it counts for all
                counts.update(self.loss_counts(sample))
        return Read(packed, counts)
