"""The mapping of rows of our tensors to rows of the tensors in Hugging Face files ("theirs"). No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from meshwright.config.sections import ModelConfig


@dataclass(frozen=True)
class SourceRows:
    """A run of `count` rows of our tensor from row `start` on, which their tensor `source` holds.

    There, the run is row `source_start` and every `step`-th row after it.
    """

    start: int
    count: int
    source: str
    source_start: int
    step: int = 1

    @property
    def theirs(self) -> slice:
        """The rows of this run in their tensor."""
        return slice(self.source_start, self.source_start + (self.count - 1) * self.step + 1, self.step)

    def of_ours(self, low: int, high: int) -> SourceRows | None:
        """Return the part of this run inside rows [low, high) of our tensor; None if it is empty."""
        return self._part(low - self.start, high - self.start)

    def of_theirs(self, low: int, high: int) -> SourceRows | None:
        """Return the part of this run inside rows [low, high) of their tensor; None if it is empty."""
        # The negated floor divisions round up: the first row of the run at or after `low`, and at or after `high`.
        return self._part(-((self.source_start - low) // self.step), -((self.source_start - high) // self.step))

    def _part(self, first: int, last: int) -> SourceRows | None:
        # Numbers within the run, limited to its rows.
        first, last = max(0, first), min(self.count, last)
        if first >= last:
            return None
        at = self.source_start + first * self.step
        return replace(self, start=self.start + first, count=last - first, source_start=at)


@dataclass(frozen=True)
class TensorMapping:
    """One of our global tensors as runs of rows of their tensors.

    With `transposed`, its rows are columns of theirs. With `stacked`, it holds one matrix per expert, and rows are
    counted through all of them.
    """

    shape: tuple[int, ...]
    runs: tuple[SourceRows, ...]
    transposed: bool = False
    stacked: bool = False
    wide: bool = False  # stored in float32 at least, whatever the precision of the others

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[2:] if self.stacked else self.shape[1:]

    def sources(self) -> dict[str, list[SourceRows]]:
        """Return the runs by the name of their tensor."""
        by_source: dict[str, list[SourceRows]] = {}
        for run in self.runs:
            by_source.setdefault(run.source, []).append(run)
        return by_source

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: (sum(run.count for run in runs), *self.tail) for name, runs in self.sources().items()}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}

    def corner(self, row: int) -> tuple[int, ...]:
        """Return the first corner of a row in our tensor."""
        first = divmod(row, self.shape[1]) if self.stacked else (row,)
        return (*first, *(0 for _ in self.tail))

    def row_ranges(self, start: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows that contain the rectangle of our tensor that begins at `start`, in its order."""
        if not self.stacked:
            yield start[0], start[0] + shape[0]
            return
        rows = self.shape[1]
        for expert in range(start[0], start[0] + shape[0]):
            yield expert * rows + start[1], expert * rows + start[1] + shape[1]

    @property
    def rows(self) -> int:
        return prod(self.shape[: len(self.shape) - len(self.tail)])


def in_order(counts: Sequence[int], sources: Sequence[str], first: int = 0) -> list[SourceRows]:
    """Map our rows from `first` on to whole tensors of theirs, one after another."""
    starts = accumulate(counts, initial=first)
    return [SourceRows(*run, 0) for run in zip(starts, counts, sources, strict=False)]


def by_head(model: ModelConfig, source: str) -> list[SourceRows]:
    """Map our rows to theirs if theirs are interleaved by key-value head.

    Ours are all queries, all keys and all values. Theirs are, for each key-value head, its queries, its key and its
    value.
    """
    d, queries = model.head_dim, model.heads // model.kv_heads
    runs = []
    for group in range(model.kv_heads):
        at = group * (queries + 2) * d
        runs.append(SourceRows(group * queries * d, queries * d, source, at))
        for part in range(2):
            ours = (model.heads + part * model.kv_heads + group) * d
            runs.append(SourceRows(ours, d, source, at + (queries + part) * d))
    return sorted(runs, key=lambda run: run.start)


def heads_in_pairs(model: ModelConfig, sources: Sequence[str]) -> list[SourceRows]:
    """Map our rows, which are all queries, all keys and all values, to three tensors of theirs.

    In queries and keys, the first rows of a head are rotated in pairs. A pair is in two halves of the head in our
    tensors, and side by side in theirs.
    """
    d, half = model.head_dim, model.rotary_dim // 2
    runs: list[SourceRows] = []
    at = 0
    for source, heads in zip(sources, (model.heads, model.kv_heads, model.kv_heads), strict=True):
        for first in range(0, heads * d, d):
            rotated = 2 * half if source != sources[-1] else 0
            runs += [SourceRows(at + first + n * half, half, source, first + n, 2) for n in range(2) if rotated]
            runs.append(SourceRows(at + first + rotated, d - rotated, source, first + rotated))
        at += heads * d
    return [run for run in runs if run.count]


def in_pairs(rows: int, head: int, rope: int, source: str) -> list[SourceRows]:
    """Map heads of `head` rows each, whose last `rope` rows are rotated in pairs.

    A pair is in two halves of these rows in our tensors, and side by side in theirs.
    """
    half = rope // 2
    runs = []
    for first in range(0, rows, head):
        rotated = first + head - rope
        runs.append(SourceRows(first, head - rope, source, first))
        runs += [SourceRows(rotated + n * half, half, source, rotated + n, 2) for n in range(2)]
    return runs
