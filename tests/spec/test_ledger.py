"""The counts of the ledger: payload and wire bytes of every op, by phase, axis and layer, inside a node and beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.flight import FlightRecord, RecordedCall
from meshwright.comm.group import DONE, CommError, Group
from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.traffic.ledger import OPERATIONS, CallTotals, Ledger, LedgerEntry, wire_bytes
from tests.support.ranks import run_ranks


def test_wire_of_a_thousand_bytes_over_four() -> None:
    assert {op: wire_bytes(op, 1000, 4) for op in OPERATIONS} == {
        "all_reduce": 1500, "all_gather": 750, "reduce_scatter": 750, "all_to_all": 750, "broadcast": 1000,
        "send": 1000,
    }  # fmt: skip


@given(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 1 << 40), st.integers(2, 4096))
def test_wire_is_between_half_and_twice_the_payload(op: str, shares: int, size: int) -> None:
    payload = shares * size
    assert payload // 2 <= wire_bytes(op, payload, size) < max(1, 2 * payload)
    if op == "all_reduce":  # it is a reduce_scatter and an all_gather
        halves = wire_bytes("reduce_scatter", payload, size) + wire_bytes("all_gather", payload, size)
        assert wire_bytes(op, payload, size) == halves


def test_phases_and_layers_nest_and_survive_errors() -> None:
    ledger = Ledger()
    ledger.record("world", "all_reduce", 8, 2)
    with pytest.raises(KeyError), ledger.phase("forward"), ledger.layer(3):
        ledger.record("tp", "all_gather", 64, 4)
        with ledger.phase("data"), ledger.layer(None):
            ledger.record("tp", "broadcast", 16, 4, crosses_node=True)
        ledger.record("tp", "all_gather", 64, 4)
        raise KeyError
    assert (ledger.current_phase, ledger.current_layer) == ("startup", None)
    assert ledger.entries == {
        LedgerEntry("startup", "world", "all_reduce", None, False): CallTotals(1, 8, 8),
        LedgerEntry("forward", "tp", "all_gather", 3, False): CallTotals(2, 128, 96),
        LedgerEntry("data", "tp", "broadcast", None, True): CallTotals(1, 16, 16),
    }
    assert ledger.totals() == {"tp": CallTotals(3, 144, 112)}
    assert ledger.totals("op").keys() == {"all_gather", "broadcast"}, "startup belongs to no step"
    assert ledger.totals("layer")["3"].calls == 2
    ledger.clear()
    assert ledger.entries == {}


def test_a_group_of_one_records_nothing() -> None:
    ledger, flight = Ledger(), FlightRecord()
    group = Group("tp", (3,), 3, None, ledger, flight)
    x, out = torch.arange(4.0), torch.zeros(4)
    assert group.all_reduce(x) is DONE and group.broadcast(x) is DONE
    assert group.all_gather(out, x) is DONE and torch.equal(out, x)
    assert group.reduce_scatter(out, 2 * x) is DONE and torch.equal(out, 2 * x)
    assert not ledger.entries and not flight.last


def test_the_flight_record_keeps_the_last_and_numbers_by_group() -> None:
    flight = FlightRecord(keep=3)
    calls = [flight.begin(RecordedCall(group, "dp", "all_reduce", "reduce", None, 4, (0, 1))) for group in "aabab"]
    assert [call.number for call in calls] == [1, 2, 1, 3, 2] and len(flight.last) == 3
    assert flight.blocking_call() is calls[0] and flight.blocking_call(longer_than=60.0) is None
    calls[0].since = None  # launched, and no thread waits for it
    assert flight.blocking_call() is calls[1]
    for call in calls:
        assert flight.end(call) >= 0.0
    assert flight.blocking_call() is None and not flight.open


class _Event:
    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


def test_on_an_accelerator_a_call_holds_until_the_stream_has_passed_it() -> None:
    flight = FlightRecord(keep=2)
    first, second = (flight.begin(RecordedCall("tp", "tp", "all_reduce", "forward", 0, 4)) for _ in range(2))
    first.event, second.event = _Event(True), _Event(False)
    flight.end(first)
    flight.end(second)
    assert flight.blocking_call() is second
    third = flight.begin(RecordedCall("tp", "tp", "all_reduce", "forward", 0, 4))
    assert first.event is None and flight.spare_events, "the event of a forgotten call is used again"
    second.event.reached = True
    assert flight.blocking_call() is third


class _Failing:
    def __init__(self, text: str) -> None:
        self.text = text

    def wait(self) -> None:
        raise RuntimeError(self.text)


def test_an_error_of_torch_becomes_a_sentence_that_names_the_call() -> None:
    flight = FlightRecord()
    group = Group("dp", (1, 3), 3, None, Ledger(), flight)
    gone = _Failing("Connection closed by peer [::1]:9\nmore")
    pending = group._call("receive", torch.zeros(4), lambda later: gone, peer=1)
    with pytest.raises(CommError) as caught:
        pending.wait()
    assert str(caught.value) == (
        "receive number 1 over dp from rank 1 (startup, 16 bytes) of ranks [1, 3] failed on rank 3: "
        "another rank has probably stopped (Connection closed by peer [::1]:9)"
    )
    assert caught.value.lost
    with pytest.raises(CommError, match="failed on rank 3: torch refused it [(]Invalid scalar type[)]") as refused:
        group._call("all_reduce", torch.zeros(4), lambda later: _Failing("Invalid scalar type").wait())
    assert not refused.value.lost
    for words in ("NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)",
                  "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error",
                  "NCCL communicator was closed"):  # fmt: skip
        with pytest.raises(CommError, match="another rank has probably stopped") as caught:
            group._call("all_reduce", torch.zeros(4), lambda later, words=words: _Failing(words).wait())
        assert caught.value.lost
    assert not flight.open and flight.blocking_call() is None


def test_a_call_that_is_waited_for_at_once_is_one_call_of_torch_s() -> None:
    """torch runs such a call on the stream that computes. Any other call is asynchronous."""
    group, given = Group("dp", (0, 1), 0, None, Ledger(), FlightRecord()), list[bool]()

    class Work:
        def wait(self) -> None:
            return None

    def launch(later: bool) -> Work | None:
        given.append(later)
        return Work() if later else None

    assert group._call("all_reduce", torch.zeros(4), launch, wait=True) is DONE and not group.flight.open
    pending = group._call("all_reduce", torch.zeros(4), launch)
    assert given == [False, True] and len(group.flight.open) == 1
    pending.wait()
    (totals,) = group.ledger.entries.values()
    assert totals.calls == 2 and totals.seconds > 0.0 and not group.flight.open
    with pytest.raises(CommError, match="all_reduce number 3 over dp .* torch refused it"):
        group._call("all_reduce", torch.zeros(4), lambda later: _Failing("Invalid").wait(), wait=True)
    assert not group.flight.open


def test_counts_follow_the_ledger_s_phases_layers_and_clear() -> None:
    group = Group("dp", (0, 1), 0, None, Ledger(), FlightRecord())
    ledger = group.ledger

    def call(op: str = "all_reduce") -> None:
        group._call(op, torch.zeros(4), lambda later: None, wait=True)

    for _ in range(2):
        with ledger.phase("forward"), ledger.layer(1):
            call()
            call()
            call("broadcast")
        with ledger.phase("backward"):
            call()
        counts = {(entry.phase, entry.op, entry.layer): totals.calls for entry, totals in ledger.entries.items()}
        assert counts == {
            ("forward", "all_reduce", 1): 2, ("forward", "broadcast", 1): 1, ("backward", "all_reduce", None): 1
        }  # fmt: skip
        ledger.clear()
        assert not ledger.entries


def every_op(rank: int, world: int) -> Any:
    """Make calls on 4 ranks with tp 2, pp 2 and nodes of two: tp stays in its node, and pp and world leave it."""
    mesh = Mesh(Layout(world=world, tp=2, pp=2, node_size=2), rank)
    tp, pp = mesh.tp, mesh.pp
    x, double = torch.full((6,), float(rank)), torch.zeros(12)
    with mesh.ledger.phase("forward"), mesh.ledger.layer(5):
        tp.all_reduce(x.clone())
        tp.all_gather(double, x)
        tp.reduce_scatter(x.clone(), double)
        tp.broadcast(x.clone(), 1)
        tp.all_to_all(parts := torch.zeros(6), torch.arange(6.0) + 10 * rank)
    with mesh.ledger.phase("backward"):
        pending = pp.send(x, 1) if pp.index == 0 else pp.receive(x, 0)
        pending.wait()
        pending.wait()  # a second wait does nothing
    mesh.world.all_reduce(torch.zeros(3, dtype=torch.int64))
    entries = {tuple(entry): (t.calls, t.payload_bytes, t.wire_bytes) for entry, t in mesh.ledger.entries.items()}
    return entries, dict(mesh.flight.numbers), len(mesh.flight.open), x.tolist(), parts.tolist()


def test_every_op_on_four_ranks() -> None:
    for rank, (entries, numbers, still_open, x, parts) in enumerate(run_ranks(4, every_op)):
        assert {entry[2]: counts for entry, counts in entries.items() if entry[0] == "forward"} == {
            "all_reduce": (1, 24, 24), "all_gather": (1, 48, 24), "reduce_scatter": (1, 48, 24),
            "broadcast": (1, 24, 24), "all_to_all": (1, 24, 12),
        }  # fmt: skip
        assert {entry[3:] for entry in entries if entry[0] == "forward"} == {(5, False)}
        sender = rank < 2
        assert entries.get(("backward", "pp", "send", None, True)) == ((1, 24, 24) if sender else None)
        assert not any(entry[2] == "receive" for entry in entries)
        assert entries["startup", "world", "all_reduce", None, True] == (1, 24, 36)
        first = rank % 2
        assert numbers[f"pp:{first} {first}>{first + 2}"] == 1, "both ends number a message alike"
        assert x == [float(first)] * 6
        pair = (rank - first, rank - first + 1)
        assert parts == [10.0 * r + 3 * first + n for r in pair for n in range(3)], "each rank's part for this one"
        assert still_open == 0
