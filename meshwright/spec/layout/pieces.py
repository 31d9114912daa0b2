"""Attention between arbitrary rows as rectangles and triangles, which fused kernels compute without a mask. No torch.

The rows' numbers and documents determine which keys a query sees. Rows form runs: row numbers of one document that
grow by a constant step, which every order of `rows.py` produces. A run of queries sees a run of keys of the same step
completely, not at all, or as a rectangle and a triangle side by side. If queries only look back over a window, they see
a band of the keys. The band is cut into rectangles and triangles of both orientations, which contain no masked pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshwright.spec.layout.rows import Integers

ALWAYS_ACCEPTED_RUNS = 8  # up to this many runs are always accepted, however short they are


class VisibleBlock(NamedTuple):
    """Queries `top` to `bottom` see keys `left` to `right`, completely or causally.

    If `causal`, the last query sees all of the keys, and each query before it sees one key less than the next one. If
    `backwards` as well, that holds when queries and keys are read in reverse order: the first query sees all keys, and
    each query after it sees one key less, starting from the left.
    """

    top: int
    bottom: int
    left: int
    right: int
    causal: bool
    backwards: bool = False

    @property
    def square(self) -> bool:
        return self.bottom - self.top == self.right - self.left

    @property
    def pairs(self) -> int:
        queries, keys = self.bottom - self.top, self.right - self.left
        return queries * keys - (queries * (queries - 1) // 2 if self.causal else 0)

    def split(self) -> Iterator[VisibleBlock]:
        """Yield the rectangle that all of these queries see and the triangle beside it, or the whole piece if it has
        no such rectangle."""
        if not self.causal or self.square:
            yield self
            return
        if self.backwards:
            middle = self.left + self.bottom - self.top
            yield VisibleBlock(self.top, self.bottom, middle, self.right, False)
            yield self._replace(right=middle)
            return
        middle = self.right - (self.bottom - self.top)
        yield VisibleBlock(self.top, self.bottom, self.left, middle, False)
        yield VisibleBlock(self.top, self.bottom, middle, self.right, True)


class _Run(NamedTuple):
    """Row numbers of one document from `first` to `last` in equal steps, at positions `begin` to `end` of the table."""

    first: int
    last: int
    begin: int
    end: int
    document: int


def usual_step(rows: Integers) -> int:
    """Return the most frequent positive difference between neighbouring rows, or 1 if there is none."""
    steps = np.diff(rows)
    return int(np.bincount(steps[steps > 0]).argmax()) if (steps > 0).any() else 1


def _runs(rows: Integers, documents: Integers | None, step: int) -> list[_Run]:
    """Divide the rows into the longest possible runs of this step. An isolated row becomes a run of length one."""
    continues = np.diff(rows) == step
    if documents is not None:
        continues &= np.diff(documents) == 0
    bounds = [0, *(np.flatnonzero(~continues) + 1).tolist(), len(rows)]
    numbers = np.zeros(len(rows), np.int64) if documents is None else documents
    return [_Run(int(rows[a]), int(rows[b - 1]), a, b, int(numbers[a])) for a, b in pairwise(bounds)]


def pieces(
    queries: Integers, keys: Integers, query_documents: Integers | None = None, key_documents: Integers | None = None,
    window: int = 0,
) -> list[VisibleBlock] | None:  # fmt: skip
    """Return the pieces of causal attention from rows `queries` to rows `keys`.

    A query sees the keys of its document up to its own row number. With a `window`, it sees only the last `window` row
    numbers, its own included. Returns None if most rows are not in runs, as in tables that are not an order of
    `rows.py`. There would then be almost as many pieces as pairs, and a mask is cheaper.
    """
    step = usual_step(queries)
    query_runs = _runs(queries, query_documents, step)
    key_runs = _runs(keys, key_documents, step)
    if 2 * max(len(query_runs), len(key_runs)) > len(queries) + 2 * ALWAYS_ACCEPTED_RUNS:
        return None

    keys_by_document: dict[int, list[_Run]] = defaultdict(list)
    for run in key_runs:
        keys_by_document[run.document].append(run)
    seen: list[VisibleBlock] = []
    for query_run in query_runs:
        for key_run in keys_by_document[query_run.document]:
            for piece in _seen(query_run, key_run, step, window):
                _add(seen, piece)

    # A second pass, because pieces that were joined in the first may join again.
    joined: list[VisibleBlock] = []
    for piece in seen:
        _add(joined, piece)
    return joined


def _seen(q: _Run, k: _Run, step: int, window: int) -> Iterator[VisibleBlock]:
    """Yield the pieces of a run of queries and a run of keys: query i sees keys i + low to i + high of its run."""
    ahead, count, keys = q.first - k.first, q.end - q.begin, k.end - k.begin
    # Key j is visible to query i if its number is at most the query's: j <= i + ahead / step.
    high = ahead // step
    # Without a window, -count puts the lower end of the band before the first key for every query.
    low = (ahead - window) // step + 1 if window else -count
    for piece in _band(count, keys, low, high):
        yield VisibleBlock(
            piece.top + q.begin, piece.bottom + q.begin, piece.left + k.begin, piece.right + k.begin, *piece[4:]
        )


def _band(queries: int, keys: int, low: int, high: int) -> Iterator[VisibleBlock]:
    """Yield the pieces of a band: query i sees keys i + low to i + high, limited to the keys from 0 to `keys`.

    First come the queries that see the first key, then the ones for which both ends of the band move or that see all
    keys, then the ones that see the last key.
    """
    if high < low:
        return
    # Queries outside these bounds see no key.
    top, end = max(0, -high), min(queries, keys - low)
    # Queries before this one see the first key.
    from_first = min(max(top, 1 - low), end)
    # Queries from this one on see the last key.
    to_last = min(max(top, keys - high), end)
    if top < (bottom := min(from_first, to_last)):
        yield VisibleBlock(top, bottom, 0, bottom + high, True)
    if to_last < from_first:
        yield VisibleBlock(to_last, from_first, 0, keys, False)
    # Where both ends move, `width` queries see a parallelogram: a backwards triangle and a causal one to its right.
    width = high - low + 1
    for at in range(from_first, to_last, width):
        bottom = min(at + width, to_last)
        if at + 1 < bottom:
            yield VisibleBlock(at, bottom - 1, at + low, bottom - 1 + low, True, True)
        yield VisibleBlock(at, bottom, bottom - 1 + low, bottom + high, True)
    if (at := max(from_first, to_last)) < end:
        yield VisibleBlock(at, end, at + low, keys, True, True)


def _add(joined: list[VisibleBlock], piece: VisibleBlock) -> None:
    """Append a piece, or join it with the last one if the two form one rectangle or one causal piece."""
    if joined and not (piece.backwards or joined[-1].backwards):
        before = joined[-1]
        same_queries = (before.top, before.bottom) == (piece.top, piece.bottom)
        if same_queries and before.right == piece.left and not before.causal:
            joined[-1] = before._replace(right=piece.right, causal=piece.causal)
            return
        same_keys = (before.left, before.right) == (piece.left, piece.right)
        if same_keys and before.bottom == piece.top and not (before.causal or piece.causal):
            joined[-1] = before._replace(bottom=piece.bottom)
            return
        grows = before.left == piece.left and piece.right - before.right == piece.bottom - piece.top
        if grows and before.bottom == piece.top and before.causal and piece.causal:
            joined[-1] = before._replace(bottom=piece.bottom, right=piece.right)
            return
    joined.append(piece)


def rounds(given: Iterable[VisibleBlock], queries: int, keys: int) -> list[list[VisibleBlock]]:
    """Assign each piece to the first round that it fits into, so that one kernel call computes a round.

    In a round all pieces are causal or none is. No query and no key occurs twice, so that a round's results and
    gradients can be added without a race.
    """
    assigned: list[list[VisibleBlock]] = []
    taken: list[tuple[Any, Any]] = []  # by round, masks of the queries and of the keys that occur in it
    for piece in given:
        rows, columns = slice(piece.top, piece.bottom), slice(piece.left, piece.right)
        for members, (taken_queries, taken_keys) in zip(assigned, taken, strict=True):
            if members[0].causal == piece.causal and not taken_queries[rows].any() and not taken_keys[columns].any():
                break
        else:
            members = []
            taken_queries = np.zeros(queries, bool)
            taken_keys = np.zeros(keys, bool)
            assigned.append(members)
            taken.append((taken_queries, taken_keys))
        members.append(piece)
        taken_queries[rows] = taken_keys[columns] = True
    return assigned
