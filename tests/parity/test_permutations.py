"""Any permutation of the tokens trains like one process, because orders are data rather than code."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from meshwright.spec.layout.rows import ORDERS, RowTable, causal_work
from tests.parity.cases import Case
from tests.parity.launches import data_of, reference_of
from tests.support.oracle import Outcome, Reference, compare_steps, complaints, make_trainer, small_config
from tests.support.ranks import run_ranks


def shuffled(rows: int, ranks: int, lengths: Sequence[int]) -> RowTable:
    """Return equal shares of a random permutation, which differs between samples with different documents. The rows of
    a rank are in no order either.
    """
    order = np.random.default_rng([rows, *lengths]).permutation(rows)
    return RowTable(order.astype(np.int64), np.full(ranks, rows // ranks))


def backwards(rows: int, ranks: int, lengths: Sequence[int]) -> RowTable:
    """Return an order with the last tokens first, so that each of a ring's ranks but the first sees no key of those
    before it.
    """
    return RowTable(np.arange(rows)[::-1].copy(), np.full(ranks, rows // ranks))


PLANTED = {"shuffled": shuffled, "backwards": backwards}
KINDS = {"gather": (), "ring": (), "ulysses": (), "hybrid": (("context.inner", 2),)}


def case_of(kind: str, documents: bool) -> Case:
    keys = (("layout.cp", 4), ("context.kind", kind), ("context.order", "striped"), *KINDS[kind])
    keys += (("train.micro_batch", 2), ("model.kv_heads", 4))
    return Case(1, 1, 1, family="llama", label=kind, extra=keys, data=(("segments", documents),), cp=4)


CASES = [
    ("shuffled", case_of("ring", True)), ("shuffled", case_of("ring", False)), ("shuffled", case_of("gather", True)),
    ("shuffled", case_of("ulysses", False)), ("shuffled", case_of("hybrid", True)),
    ("backwards", case_of("ring", True)),
]  # fmt: skip


def measure(rank: int, world: int, references: list[Reference]) -> list[Outcome]:
    """Compare each case on a rank. The planted order replaces one that the config can name."""
    found = []
    for (order, case), reference in zip(CASES, references, strict=True):
        with mock.patch.dict(ORDERS, {"striped": PLANTED[order]}):
            trainer = make_trainer(small_config(**case.sections("fp64")), rank, world, data_of(case))
            found.append(compare_steps(trainer, reference))
    return found


@pytest.mark.wide
def test_any_permutation_agrees_with_one_process() -> None:
    by_rank = run_ranks(4, measure, [reference_of(case) for _, case in CASES], deadline=300.0)
    for (order, case), outcomes in zip(CASES, zip(*by_rank, strict=True), strict=True):
        assert complaints(outcomes) == [], (order, case.name, dict(case.data))


@pytest.mark.parametrize("order", PLANTED)
def test_the_planted_orders_are_permutations(order: str) -> None:
    table = PLANTED[order](16, 4, [5, 11])
    assert sorted(table.order.tolist()) == list(range(16)) and table.order.tolist() != list(range(16))
    assert table.totals(causal_work(16)).sum() == 16 * 17 // 2
