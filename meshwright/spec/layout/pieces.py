"""Attention between any rows as rectangles and triangles, which fused kernels compute without a mask. No torch.

Which keys a query sees follows from the rows' numbers and documents. Rows lie in runs: row numbers of one document that
grow by an equal step, as every order of `rows.py` deals them. What a run of queries sees of a run of keys of the same
step is all of it, nothing, or a rectangle and a triangle side by side. Where a query looks back over a window only, it
is a band, which is cut into triangles of both kinds, and rectangles, without a pair that is not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshwright.spec.layout.rows import Integers

FEW = 8  # runs that are always taken, however short they are


class Piece(NamedTuple):
    """Queries `top` to `bottom` see keys `left` to `right`: all of them or, if causal, the last query sees all and each
    one before it a key less than the next. `backwards`: that is so when queries and keys are read from their ends, so
    that the first query sees all keys, and each one after it a key less, from the left."""

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

    def split(self) -> Iterator[Piece]:
        """Yields the rectangle that all of these queries see, and the triangle beside it."""
        if not self.causal or self.square:
            yield self
            return
        if self.backwards:
            middle = self.left + self.bottom - self.top
            yield Piece(self.top, self.bottom, middle, self.right, False)
            yield self._replace(right=middle)
            return
        middle = self.right - (self.bottom - self.top)
        yield Piece(self.top, self.bottom, self.left, middle, False)
        yield Piece(self.top, self.bottom, middle, self.right, True)


class _Run(NamedTuple):
    """Rows of one document from `first` to `last` in equal steps, which lie at places `begin` to `end`."""

    first: int
    last: int
    begin: int
    end: int
    document: int


def usual_step(rows: Integers) -> int:
    """Returns the step by which rows mostly grow."""
    steps = np.diff(rows)
    return int(np.bincount(steps[steps > 0]).argmax()) if (steps > 0).any() else 1


def _runs(rows: Integers, documents: Integers | None, step: int) -> list[_Run]:
    """Returns the rows as runs of this step, as long as they can be; a row that is in none is one of its own."""
    goes_on = np.diff(rows) == step
    if documents is not None:
        goes_on &= np.diff(documents) == 0
    bounds = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(rows)]
    numbers = np.zeros(len(rows), np.int64) if documents is None else documents
    return [_Run(int(rows[a]), int(rows[b - 1]), a, b, int(numbers[a])) for a, b in pairwise(bounds)]


def pieces(
    queries: Integers, keys: Integers, query_documents: Integers | None = None, key_documents: Integers | None = None,
    window: int = 0,
) -> list[Piece] | None:  # fmt: skip
    """Returns what rows `queries` see of rows `keys`: those up to their own number; with a `window`, as many numbers,
    their own included. None where the rows hardly lie in runs, as in tables that are no
    order of `rows.py`: then there would be as many pieces as pairs, and a mask says it better."""
    step = usual_step(queries)
    at, to = _runs(queries, query_documents, step), _runs(keys, key_documents, step)
    if 2 * max(len(at), len(to)) > len(queries) + 2 * FEW:
        return None
    by_document: dict[int, list[_Run]] = defaultdict(list)
    for run in to:
        by_document[run.document].append(run)
    found: list[Piece] = []
    for q in at:
        for k in by_document[q.document]:
            for piece in _seen(q, k, step, window):
                _add(found, piece)
    joined: list[Piece] = []
    for piece in found:  # what was joined may join again
        _add(joined, piece)
    return joined


def _seen(q: _Run, k: _Run, step: int, window: int) -> Iterator[Piece]:
    """Yields what a run of queries sees of a run of keys: query i sees keys i + low to i + high of the run."""
    ahead, count, keys = q.first - k.first, q.end - q.begin, k.end - k.begin
    high = ahead // step
    low = (ahead - window) // step + 1 if window else -count
    for piece in _band(count, keys, low, high):
        yield Piece(
            piece.top + q.begin, piece.bottom + q.begin, piece.left + k.begin, piece.right + k.begin, *piece[4:]
        )


def _band(queries: int, keys: int, low: int, high: int) -> Iterator[Piece]:
    """Yields the pieces of a band: query i sees keys i + low to i + high, of those from 0 to `keys`. First come the
    queries that see from the first key on, then those in whose sight both ends move, or neither, then those that see to
    the last key."""
    if high < low:
        return
    top, end = max(0, -high), min(queries, keys - low)  # others see none
    from_first = min(max(top, 1 - low), end)  # queries before it see from the first key on
    to_last = min(max(top, keys - high), end)  # from it on, they see the last key
    if top < (bottom := min(from_first, to_last)):
        yield Piece(top, bottom, 0, bottom + high, True)
    if to_last < from_first:
        yield Piece(to_last, from_first, 0, keys, False)
    width = high - low + 1
    for at in range(from_first, to_last, width):
        bottom = min(at + width, to_last)
        if at + 1 < bottom:
            yield Piece(at, bottom - 1, at + low, bottom - 1 + low, True, True)
        yield Piece(at, bottom, bottom - 1 + low, bottom + high, True)
    if (at := max(from_first, to_last)) < end:
        yield Piece(at, end, at + low, keys, True, True)


def _add(found: list[Piece], piece: Piece) -> None:
    """Appends a piece, or joins it with the one before if the two are one rectangle or one causal piece."""
    if found and not (piece.backwards or found[-1].backwards):
        before = found[-1]
        same_queries = (before.top, before.bottom) == (piece.top, piece.bottom)
        if same_queries and before.right == piece.left and not before.causal:
            found[-1] = before._replace(right=piece.right, causal=piece.causal)
            return
        same_keys = (before.left, before.right) == (piece.left, piece.right)
        if same_keys and before.bottom == piece.top and not (before.causal or piece.causal):
            found[-1] = before._replace(bottom=piece.bottom)
            return
        grows = before.left == piece.left and piece.right - before.right == piece.bottom - piece.top
        if grows and before.bottom == piece.top and before.causal and piece.causal:
            found[-1] = before._replace(bottom=piece.bottom, right=piece.right)
            return
    found.append(piece)


def rounds(given: Iterable[Piece], queries: int, keys: int) -> list[list[Piece]]:
    """Deals pieces to as few rounds as come: in a round all are causal or none is, and no query and no key occurs
    twice, so that one call computes it and its results can be added without a race."""
    found: list[list[Piece]] = []
    taken: list[tuple[Any, Any]] = []  # by round, which queries and which keys occur
    for piece in given:
        at, to = slice(piece.top, piece.bottom), slice(piece.left, piece.right)
        for members, (tops, lefts) in zip(found, taken, strict=True):
            if members[0].causal == piece.causal and not tops[at].any() and not lefts[to].any():
                break
        else:
            members, tops, lefts = [], np.zeros(queries, bool), np.zeros(keys, bool)
            found.append(members)
            taken.append((tops, lefts))
        members.append(piece)
        tops[at] = lefts[to] = True
    return found
