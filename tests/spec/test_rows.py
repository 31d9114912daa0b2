"""Row tables against definitions by counting."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.layout.rows import (
    ORDERS,
    RowTable,
    balance,
    by_documents,
    by_key,
    causal_work,
    contiguous,
    even_out,
    stripe,
    zigzag,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@st.composite
def tables(draw: st.DrawFn, rows: int, ranks: int) -> RowTable:
    """Draw one of the orders, or any assignment of rows to ranks in any local order."""
    kind = draw(st.sampled_from([contiguous, stripe, zigzag, None]))
    if kind is not None:
        return kind(rows, ranks)
    keys = draw(st.lists(st.integers(0, ranks - 1), min_size=rows, max_size=rows))
    counts = np.bincount(np.array(keys, np.int64), minlength=ranks)
    return RowTable(np.array(draw(st.permutations(range(rows))), np.int64), counts)


@st.composite
def two_tables(draw: st.DrawFn) -> tuple[RowTable, RowTable]:
    rows, ranks = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    return draw(tables(rows, ranks)), draw(tables(rows, ranks))


@given(two_tables())
def test_a_table_holds_every_row_once_and_its_inverse_is_one(both: tuple[RowTable, RowTable]) -> None:
    for table in both:
        held = [table.rows_of(rank).tolist() for rank in range(table.ranks)]
        every = list(range(len(table.order)))
        assert sorted(row for rows in held for row in rows) == every
        assert table.order[table.inverse].tolist() == table.inverse[table.order].tolist() == every
        assert [len(rows) for rows in held] == table.counts.tolist()
        assert all(table.owners[row] == rank for rank, rows in enumerate(held) for row in rows)


@given(st.integers(1, 12), st.integers(1, 20))
def test_zigzag_balances_causal_attention_exactly(ranks: int, part: int) -> None:
    rows = 2 * ranks * part
    table, work = zigzag(rows, ranks), causal_work(rows)
    assert table.totals(work).tolist() == [rows * (rows + 1) // (2 * ranks)] * ranks
    assert balance(table.totals(work)) == balance(table.counts) == 1.0
    for rank in range(ranks):
        parts = sorted({int(row) // part for row in table.rows_of(rank)})
        assert parts == [rank, 2 * ranks - 1 - rank]


def test_known_balances() -> None:
    work = causal_work(4096)
    assert balance(contiguous(4096, 8).totals(work)) == pytest.approx((1.875 * 4096 + 1) / 4097)
    assert balance(stripe(4096, 8).totals(work)) == pytest.approx(4104 / 4097)


@given(LENGTHS, st.integers(1, 6))
def test_documents_are_cut_by_their_own_zigzag(lengths: list[int], ranks: int) -> None:
    table, work = by_documents(lengths, ranks), causal_work(sum(lengths), lengths)
    assert sorted(table.order.tolist()) == list(range(sum(lengths)))
    begin = 0
    for length in lengths:
        assert work[begin : begin + length].tolist() == list(range(1, length + 1))
        counts = np.bincount(table.owners[begin : begin + length], minlength=ranks)
        assert counts.max() - counts.min() <= 2, "each of a rank's two parts may have one row more"
        if length % (2 * ranks) == 0:
            alone = np.bincount(table.owners[begin : begin + length], work[begin : begin + length], ranks)
            assert len(set(alone.tolist())) == 1
        begin += length


def test_many_short_documents_spread_over_all_ranks() -> None:
    for length in (1, 3, 16, 17):
        lengths = [length] * 1000
        table = by_documents(lengths, 8)
        assert balance(table.counts) < 1.01
        assert balance(table.totals(causal_work(sum(lengths), lengths))) < 1.01


@given(two_tables())
def test_evening_moves_only_what_is_too_much(both: tuple[RowTable, RowTable]) -> None:
    """Every row occurs once, counts are equal, rows ascend, and a rank keeps as many of its rows as it may."""
    table = both[0]
    if len(table.order) % table.ranks:
        with pytest.raises(AssertionError, match="can't be divided evenly"):
            even_out(table)
        return
    even = even_out(table)
    each = len(table.order) // table.ranks
    assert sorted(even.order.tolist()) == list(range(len(table.order))) and set(even.counts.tolist()) == {each}
    for rank in range(table.ranks):
        held = even.rows_of(rank).tolist()
        assert held == sorted(held)
        assert len(set(held) & set(table.rows_of(rank).tolist())) == min(each, int(table.counts[rank]))


@given(st.integers(1, 6), st.integers(1, 8), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_every_order_deals_every_row_in_equal_shares(ranks: int, part: int, documents: list[int]) -> None:
    """Documents may have any length, and may be longer than a rank's share."""
    rows = 2 * ranks * part
    ends = np.minimum(np.cumsum(documents), rows)
    lengths = [int(n) for n in np.diff([0, *ends, rows]) if n]
    for order in ORDERS.values():
        table = order(rows, ranks, lengths)
        assert sorted(table.order.tolist()) == list(range(rows))
        assert table.counts.tolist() == [rows // ranks] * ranks


def test_orders_by_hand() -> None:
    held = {name: [order(8, 2, [5, 3]).rows_of(rank).tolist() for rank in (0, 1)] for name, order in ORDERS.items()}
    assert held == {
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "documents": [[0, 3, 4, 5], [1, 2, 6, 7]],
    }
    together = ORDERS["documents"](4096, 8, [1000, 3000, 96])
    assert balance(together.totals(causal_work(4096, [1000, 3000, 96]))) < 1.01
    assert balance(ORDERS["zigzag"](4096, 8, []).totals(causal_work(4096, [1000, 3000, 96]))) > 1.05


@given(st.lists(st.integers(0, 11), max_size=60), st.sampled_from([(12, 1), (4, 3), (3, 4), (1, 12)]))
def test_sorting_by_key_is_stable(experts: list[int], cut: tuple[int, int]) -> None:
    ranks, per_rank = cut
    table = by_key(experts, ranks, per_rank)
    assert table.order.tolist() == sorted(range(len(experts)), key=lambda row: experts[row])
    for rank in range(ranks):
        assert {experts[row] // per_rank for row in table.rows_of(rank)} <= {rank}


def test_a_million_rows_are_quick() -> None:
    begin = time.process_time()
    rows = 1 << 20
    table = by_documents([rows // 1024] * 1024, 16)
    assert balance(table.totals(causal_work(rows))) == 1.0
    assert time.process_time() - begin < 3.0
