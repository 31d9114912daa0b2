"""Where the rows of our tensors are in the tensors of a Hugging Face file. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from meshwright.config.sections import ModelConfig


@dataclass(frozen=True)
class SourceRows:
    """`count` rows of our tensor from row `start` on, which their tensor `source` holds: its row `source_start` and
    every `step`-th row after it."""

    start: int
    count: int
    source: str
    source_start: int
    step: int = 1

    @property
    def theirs(self) -> slice:
        """The rows of their tensor."""
        return slice(self.source_start, self.source_start + (self.count - 1) * self.step + 1, self.step)

    def of_ours(self, low: int, high: int) -> SourceRows | None:
        """Return the part of this run that lies in rows [low, high) of our tensor."""
        return self._part(low - self.start, high - self.start)

    def of_theirs(self, low: int, high: int) -> SourceRows | None:
        """Return the part of this run that lies in rows [low, high) of their tensor."""
        return self._part(-((self.source_start - low) // self.step), -((self.source_start - high) // self.step))

    def _part(self, first: int, last: int) -> SourceRows | None:
        first, last = max(0, first), min(self.count, last)
        if first >= last:
            return None
        at = self.source_start + first * self.step
        return replace(self, start=self.start + first, count=last - first, source_start=at)


@dataclass(frozen=True)
class Mapped:
    """One of our global tensors in their names. With `transposed`, its rows are columns of theirs. With `stacked`, it
    holds one matrix for each expert, and rows are counted through all of them."""

    shape: tuple[int, ...]
    runs: tuple[SourceRows, ...]
    transposed: bool = False
    stacked: bool = False
    wide: bool = False  # in float32 at least, whatever the others are in

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[2:] if self.stacked else self.shape[1:]

    def sources(self) -> dict[str, list[SourceRows]]:
        """Return the runs of each of their tensors."""
        found: dict[str, list[SourceRows]] = {}
        for run in self.runs:
            found.setdefault(run.source, []).append(run)
        return found

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: (sum(run.count for run in runs), *self.tail) for name, runs in self.sources().items()}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}

    def corner(self, row: int) -> tuple[int, ...]:
        """Return where a row begins in our tensor."""
        first = divmod(row, self.shape[1]) if self.stacked else (row,)
        return (*first, *(0 for _ in self.tail))

    def row_ranges(self, start: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of rows that the rectangle of our tensor at `start` lies in, in its order."""
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
    return [SourceRows(*each, 0) for each in zip(starts, counts, sources, strict=False)]


def by_head(model: ModelConfig, source: str) -> list[SourceRows]:
    """Map our rows, which are all queries, all keys and all values, to theirs: query, key and value of head 0, of head
    1, ..."""
    heads, d = model.heads, model.head_dim
    return [
        SourceRows((part * heads + head) * d, d, source, (head * 3 + part) * d)
        for part in range(3)
        for head in range(heads)
    ]


def heads_in_pairs(model: ModelConfig, sources: Sequence[str]) -> list[SourceRows]:
    """Map our rows, which are all queries, all keys and all values, to three tensors of theirs. Of the heads of the
    first two the first rows turn, in pairs that lie in two halves here, and side by side there."""
    d, half, runs, at = model.head_dim, model.rotary_dim // 2, list[SourceRows](), 0
    for source, heads in zip(sources, (model.heads, model.kv_heads, model.kv_heads), strict=True):
        for first in range(0, heads * d, d):
            turned = 2 * half if source != sources[-1] else 0
            runs += [SourceRows(at + first + n * half, half, source, first + n, 2) for n in range(2) if turned]
            runs.append(SourceRows(at + first + turned, d - turned, source, first + turned))
        at += heads * d
    return [run for run in runs if run.count]


def in_pairs(rows: int, head: int, rope: int, source: str) -> list[SourceRows]:
    """Map heads of `head` rows each whose last `rope` rows turn with the position. A pair that turns together lies in
    two halves here, and side by side there."""
    half, runs = rope // 2, []
    for first in range(0, rows, head):
        turned = first + head - rope
        runs.append(SourceRows(first, head - rope, source, first))
        runs += [SourceRows(turned + n * half, half, source, turned + n, 2) for n in range(2)]
    return runs
