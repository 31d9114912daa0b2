"""Pieces of attention cover the scores that a mask would allow, exactly and once, for every order and any documents."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from meshwright.spec.layout.pieces import VisibleBlock, pieces, rounds
from meshwright.spec.layout.rows import ORDERS, RowTable


def drawn(given: list[VisibleBlock], queries: int, keys: int) -> np.ndarray[Any, Any]:
    """Count how often each pair of a query and a key is in a piece."""
    counts = np.zeros((queries, keys), np.int64)
    for piece in given:
        for part in piece.split():
            shape = (part.bottom - part.top, part.right - part.left)
            assert min(shape) > 0 and (part.square or not part.causal)
            seen = np.tri(*shape, dtype=np.int64) if part.causal else np.ones(shape, np.int64)
            counts[part.top : part.bottom, part.left : part.right] += seen[::-1, ::-1] if part.backwards else seen
    return counts


def cases(order: str) -> list[tuple[int, RowTable, np.ndarray[Any, Any] | None]]:
    draw, found = random.Random(order), []
    for _ in range(60):
        ranks = draw.choice([1, 2, 4, 8])
        rows, lengths = 2 * ranks * draw.randint(1, 12), []
        while sum(lengths) < rows:
            lengths.append(min(draw.randint(1, rows), rows - sum(lengths)))
        numbers = np.repeat(np.arange(len(lengths)), lengths) if draw.random() < 0.6 else None
        found.append((ranks, ORDERS[order](rows, ranks, lengths), numbers))
    return found


@pytest.mark.parametrize("window", [0, 1, 3, 7, 40])
@pytest.mark.parametrize("order", ORDERS)
def test_pieces_cover_what_is_visible_once(order: str, window: int) -> None:
    """The keys are those of each rank, and those of all rows. All rows are in their natural order, or in the ranks'
    order if they are striped.
    """
    unsaid = total = 0
    for ranks, table, numbers in cases(order):
        every = table.order if order == "striped" else np.arange(len(table.order))
        for queries in map(table.rows_of, range(ranks)):
            for keys in [*map(table.rows_of, range(ranks)), every]:
                documents = [None if numbers is None else numbers[x] for x in (queries, keys)]
                found, total = pieces(queries, keys, *documents, window), total + 1  # type: ignore[call-arg]
                if found is None:
                    unsaid += 1
                    continue
                seen = keys[None] <= queries[:, None]
                if window:
                    seen &= keys[None] > queries[:, None] - window
                if numbers is not None:
                    seen &= numbers[keys][None] == numbers[queries][:, None]
                np.testing.assert_array_equal(drawn(found, *seen.shape), seen)
                assert sum(piece.pairs for piece in found) == seen.sum()
                dealt = rounds(found, *seen.shape)
                assert sorted(sum(dealt, [])) == sorted(found)
                for members in dealt:
                    assert len({piece.causal for piece in members}) == 1
                    for begin, end in (("top", "bottom"), ("left", "right")):
                        spans = sorted((getattr(piece, begin), getattr(piece, end)) for piece in members)
                        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "one occurs twice"
    assert unsaid < total / 10, "pieces hardly ever fail to say it"


def test_each_step_of_a_zigzag_ring_is_one_piece() -> None:
    table = ORDERS["zigzag"](64, 4, [64])
    found = [pieces(table.rows_of(1), table.rows_of(rank)) for rank in range(4)]
    assert found == [
        [VisibleBlock(0, 16, 0, 8, False)], [VisibleBlock(0, 16, 0, 16, True)],
        [VisibleBlock(8, 16, 0, 16, False)], [VisibleBlock(8, 16, 0, 16, False)],
    ]  # fmt: skip
    assert pieces(table.rows_of(1), np.arange(64)) == [
        VisibleBlock(0, 8, 0, 16, True),
        VisibleBlock(8, 16, 0, 56, True),
    ]


def test_a_window_is_two_triangles_for_each_of_its_lengths() -> None:
    assert pieces(np.arange(12), np.arange(12), window=4) == [
        VisibleBlock(0, 4, 0, 4, True),
        VisibleBlock(4, 7, 1, 4, True, True), VisibleBlock(4, 8, 4, 8, True),
        VisibleBlock(8, 11, 5, 8, True, True), VisibleBlock(8, 12, 8, 12, True),
    ]  # fmt: skip


def test_rows_without_runs_are_left_to_a_mask() -> None:
    rows = np.random.default_rng(1).permutation(256)
    assert pieces(rows[:128], rows[128:]) is None
