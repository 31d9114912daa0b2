"""Meshwright's own sums never deadlock under the rules of NCCL, whose sends wait for their receives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm import group as group_module
from meshwright.comm.group import Group, Pending
from meshwright.lab.algorithms import ALGORITHMS, rounds_of
from meshwright.lab.reducers import AlgorithmReducer, GatherToOne
from meshwright.spec.layout.layout import mesh_width
from tests.lab.rendezvous import Deadlock, Transport

SIZES = (2, 3, 4, 5, 6, 8)
CASES = [
    (kind, size, node_size)
    for kind in ALGORITHMS for size in SIZES for node_size in (1, 2, 3, 4, 8)
    if (kind != "halving_doubling" or size in (2, 4, 8)) and (node_size <= size or node_size == 8)
]  # fmt: skip


def summed(monkeypatch: pytest.MonkeyPatch, size: int, reducer: Any, op: str) -> None:
    """Sum distinct integers over `size` ranks and compare the result on each rank."""
    transport = Transport(size)
    monkeypatch.setattr(group_module, "dist", transport.dist)
    inputs = [torch.arange(size * 3, dtype=torch.float64) * 10**rank for rank in range(size)]
    true = torch.stack(inputs).sum(0)

    def body(group: Group) -> Tensor:
        grads, out = inputs[group.index].clone(), torch.empty(3, dtype=torch.float64)
        if op == "all_reduce":
            reducer.all_reduce(None, grads, group).wait()
            return grads
        reducer.reduce_scatter(None, out, grads, group).wait()
        return out

    for place, found in enumerate(transport.run(body)):
        assert torch.equal(found, true if op == "all_reduce" else true.view(size, -1)[place])


@pytest.mark.parametrize(("kind", "size", "node_size"), CASES)
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_no_algorithm_locks(monkeypatch: pytest.MonkeyPatch, kind: str, size: int, node_size: int, op: str) -> None:
    summed(monkeypatch, size, AlgorithmReducer(kind, node_size), op)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_none_locks_where_a_ring_goes_by_switches(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    summed(monkeypatch, 8, AlgorithmReducer(kind, 2, switches=[1, 0, 1, 0]), "all_reduce")


@pytest.mark.parametrize("size", SIZES)
def test_the_naive_sum_does_not_lock(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    summed(monkeypatch, size, GatherToOne(), "all_reduce")


class Both:
    def __init__(self, pendings: list[Pending]) -> None:
        self.pendings = pendings

    def wait(self) -> None:
        for pending in self.pendings:
            pending.wait()


def unbatched(group: Group, sent: Tensor, to: int, found: Tensor, source: int) -> Both:
    """Send and receive in separate calls. Of two ranks that send to each other, the first sends first."""
    calls = [lambda: group.send(sent, to), lambda: group.receive(found, source)]
    if to == source and group.index > to:
        calls.reverse()
    return Both([call() for call in calls])


def longest_ring(kind: str, size: int, node_size: int) -> int:
    """Return the number of ranks in the longest ring of an algorithm, or 2 if it exchanges only in pairs."""
    if kind == "halving_doubling":
        return 2
    on_node = size if node_size > size else 1
    if size % node_size == 0:
        on_node = node_size
    width = {"mesh": mesh_width(size), "hierarchical": on_node}.get(kind, 1)
    return max(width, size // width)


@pytest.mark.parametrize(("kind", "size", "node_size"), CASES)
def test_unbatched_sends_lock_in_every_ring_of_three(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: int, node_size: int
) -> None:
    monkeypatch.setattr(Group, "exchange", unbatched)
    reducer = AlgorithmReducer(kind, node_size)
    if longest_ring(kind, size, node_size) <= 2:
        summed(monkeypatch, size, reducer, "all_reduce")
    else:
        with pytest.raises(Deadlock):
            summed(monkeypatch, size, reducer, "all_reduce")


@pytest.mark.parametrize(("kind", "size", "node_size"), CASES)
def test_every_rank_takes_part_in_every_round(kind: str, size: int, node_size: int) -> None:
    """NCCL creates the communicator in the first batch of a group, which needs all ranks for that."""
    for place in range(size):
        for each, _ in rounds_of(kind, size, place, "all_reduce", node_size):
            assert each.sent and each.received


def test_an_exchange_leaves_out_empty_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank only sends and the second only receives. Then neither does anything."""
    transport = Transport(2)
    monkeypatch.setattr(group_module, "dist", transport.dist)
    empty = torch.empty(0)

    def body(group: Group) -> tuple[list[float], int, int]:
        found = torch.zeros(2)
        sent = torch.ones(2)
        ends = (sent, 1, empty, 1) if group.index == 0 else (empty, 0, found, 0)
        group.exchange(*ends).wait()
        group.exchange(empty, 1 - group.index, empty, 1 - group.index).wait()
        (totals,) = group.ledger.entries.values()
        return found.tolist(), totals.payload_bytes, group.flight.numbers[group.label]

    assert transport.run(body) == [([0.0, 0.0], 8, 2), ([1.0, 1.0], 0, 2)]
