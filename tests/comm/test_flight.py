"""The flight record when the host runs ahead of the device. Events that are not reached simulate the device."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch

from meshwright.comm.flight import FlightRecord, RecordedCall
from meshwright.comm.hang import explain
from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import Watchdog
from meshwright.device import Device
from meshwright.device_kinds import DEVICE_KINDS, DeviceEntry
from meshwright.spec.layout import Layout


class Event:
    """A mark in a device's stream."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


def launch(flight: FlightRecord, op: str = "all_reduce", layer: int = 0, reached: bool = False) -> RecordedCall:
    """Launch a call over tp and make the stream wait for it, as `Group` does."""
    call = flight.begin(RecordedCall("tp:0", "tp", op, "forward", layer, 64, (0, 1)))
    call.event = Event(reached)
    flight.end(call)
    return call


def stuck_at_first(calls: int, first: str = "all_reduce", **sizes: int) -> FlightRecord:
    flight = FlightRecord(**sizes)
    for number in range(calls):
        launch(flight, first if number == 0 else "all_reduce", layer=number // 4)
    return flight


@pytest.mark.parametrize("calls", [1, 64, 65, 300, 5000])
def test_the_call_that_holds_up_the_device_is_kept(calls: int) -> None:
    flight = stuck_at_first(calls)
    held = flight.blocking_call()
    assert held is not None and (held.number, held.layer) == (1, 0)
    assert len(flight.unreached) <= 4096 and len(flight.last) == min(calls, 64)
    assert [call.number for call in flight.around("tp:0", 1)] == list(range(1, min(calls, 5) + 1))
    assert [call.number for call in flight.last] == list(range(max(0, calls - 64) + 1, calls + 1))


def test_calls_that_the_device_has_passed_are_forgotten_and_their_events_used_again() -> None:
    flight = FlightRecord(keep=4)
    calls = [launch(flight) for _ in range(20)]
    assert len(flight.unreached) == 16
    for call in calls[:18]:
        call.event.reached = True
    launch(flight)
    assert not flight.unreached and [call.number for call in flight.passed] == list(range(10, 18))
    assert len(flight.spare_events) == 17 and all(event.reached for event in flight.spare_events)
    held = flight.blocking_call()
    assert held is calls[18], "17 is the oldest of the last four, and was reached"
    assert [call.number for call in flight.around("tp:0", 19)] == [15, 16, 17, 18, 19, 20, 21]


def test_a_call_that_is_waited_for_late_is_watched() -> None:
    """The call is a sum of gradients that is launched early and waited for after many other calls."""
    flight = FlightRecord(keep=4)
    early = flight.begin(RecordedCall("dp:0", "dp", "all_reduce", "reduce", None, 64, (0, 1)))
    early.since = None
    for _ in range(10):
        launch(flight, reached=True)
    assert flight.blocking_call() is None and early not in flight.last
    early.since, early.event = early.started, Event()
    flight.end(early)
    assert flight.blocking_call() is early
    early.event.reached = True
    launch(flight, reached=True)
    assert flight.blocking_call() is None and early in flight.passed


def test_a_group_may_begin_while_its_numbers_are_copied() -> None:
    """The main thread begins the first call of a group between the two reads of the watchdog."""
    flight = FlightRecord()
    held = launch(flight)
    late = RecordedCall("new:0", "new", "all_reduce", "forward", None, 8, (0, 1), number=1)
    late.started = held.started + 1.0
    flight.last.append(late)
    assert flight.calls_begun(held)["new:0"] == 0


def state_of(rank: int, flight: FlightRecord, asked: tuple[str, int] | None = None) -> dict[str, Any]:
    """Return the state that a rank publishes, in the form in which JSON brings it to another rank."""
    mesh = Mesh(Layout(world=1), 0)
    mesh.rank, mesh.flight = rank, flight
    watchdog = Watchdog(mesh, 5.0, None, Device("cpu"))
    watchdog._asked = asked
    state: dict[str, Any] = json.loads(json.dumps(watchdog.state()))
    return state


def explanation(flights: list[FlightRecord], rank: int = 0) -> str:
    held = flights[rank].blocking_call()
    assert held is not None
    states = {r: state_of(r, flight, (held.group, held.number)) for r, flight in enumerate(flights)}
    return explain(held.to_plain(), rank, 5.0, states.get)


def test_ranks_that_disagree_long_before_the_last_call() -> None:
    text = explanation([stuck_at_first(300), stuck_at_first(300, "all_gather")])
    assert "all_reduce number 1 over tp (forward, layer 0, 64 bytes) did not end within 5 s on ranks [0, 1]" in text
    called = "all_gather number 1 over tp (forward, layer 0, 64 bytes)"
    assert text.endswith(f"rank 1 has called {called} there, so the ranks disagree")


def test_ranks_that_disagree_where_one_of_them_came_further() -> None:
    """NCCL may end a call of two sizes on one rank, which then waits in the next call."""
    here, there = stuck_at_first(300), FlightRecord()
    launch(there, "all_gather", reached=True)
    for _ in range(299):
        launch(there)
    assert explanation([here, there]).endswith("there, so the ranks disagree")


def test_where_nobody_disagrees_the_network_is_stuck() -> None:
    text = explanation([stuck_at_first(300), stuck_at_first(300)])
    assert text.endswith("every rank of it arrived, so the network or a device is probably stuck")


def test_two_orders_of_calls_that_the_hosts_have_all_launched() -> None:
    """Each device waits in its first call, which is the other device's second call."""
    flights = [FlightRecord(), FlightRecord()]
    for flight, axes in zip(flights, (("tp", "dp"), ("dp", "tp")), strict=True):
        for axis in axes:
            call = flight.begin(RecordedCall(f"{axis}:0", axis, "all_reduce", "forward", 0, 64, (0, 1)))
            call.event = Event()
            flight.end(call)
        for _ in range(200):
            launch(flight)
    text = explanation(flights)
    assert text.startswith("all_reduce number 1 over tp")
    assert "rank 1 did not arrive: it waits in all_reduce number 1 over dp" in text
    assert "the ranks wait for each other, so they make their calls in different orders" in text


def test_transfers_and_uneven_exchanges_of_rows_do_not_disagree() -> None:
    def call(op: str, payload: int, peer: int | None) -> dict[str, Any]:
        return {"op": op, "group": "x:0", "axis": "x", "number": 1, "ranks": [0, 1], "peer": peer, "phase": "forward",
                "layer": None, "payload": payload}  # fmt: skip

    for here, there in [
        (call("send", 8, 1), call("receive", 8, 0)), (call("receive", 8, 1), call("send", 8, 0)),
        (call("all_to_all", 8, None), call("all_to_all", 24, None)), (call("shift", 8, None), call("shift", 8, None)),
    ]:  # fmt: skip
        states = {rank: {"numbers": {"x:0": 1}, "holding": c, "last": [c]} for rank, c in enumerate((here, there))}
        assert explain(here, 0, 5.0, states.get).endswith("the network or a device is probably stuck"), here["op"]
        states[1]["last"] = [there | {"op": "broadcast"}]
        assert explain(here, 0, 5.0, states.get).endswith("so the ranks disagree"), here["op"]


def test_the_watchdog_s_threads_use_the_rank_s_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only threads that have selected the device may query an event. Others would create a context on the first
    device.
    """
    names = {"meshwright-watchdog-timer", "meshwright-watchdog-listener"}
    chosen: dict[str, int] = {}
    asked: list[str] = []
    looked = threading.Event()

    class Module:
        @staticmethod
        def set_device(index: int) -> None:
            chosen[threading.current_thread().name] = index

    class Asked(Event):
        def query(self) -> bool:
            asked.append(threading.current_thread().name)
            if names <= set(asked):
                looked.set()
            return True

    class Store:
        """A store with no more than the counter of signs and the record of ranks that left."""

        def add(self, key: str, amount: int) -> int:
            return 2 if key.endswith("left") else 0

        def set(self, key: str, value: str) -> None:
            return None

    # A kind of device that torch can name, but that no test machine has.
    monkeypatch.setattr(torch, "mtia", Module)
    monkeypatch.setitem(DEVICE_KINDS, "mtia", DeviceEntry("meshwright.device:Accelerator", "gloo"))
    mesh = Mesh(Layout(world=1), 0)
    watchdog = Watchdog(mesh, 0.0, None, Device("mtia", 3))
    watchdog.world, watchdog.interval, watchdog._store = 2, 0.01, Store()  # type: ignore[assignment]
    call = launch(mesh.flight)
    call.event = Asked()
    # A rank compiles, so both threads look at the calls and neither raises an alarm.
    watchdog._compiled = float("inf")
    with watchdog:
        assert looked.wait(20.0)
    assert names <= set(asked) and {chosen.get(name) for name in names} == {3}
