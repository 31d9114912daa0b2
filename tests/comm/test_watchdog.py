"""A hang ends on every rank with one message, which names the call and the ranks that did not arrive at it."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import watchdog
from meshwright.comm.flight import RecordedCall
from meshwright.comm.hang import explain
from meshwright.comm.mesh import COMPILING_S, Mesh, call_limit
from meshwright.comm.watchdog import EXIT_CODE, Watchdog, is_compiling, open_store
from meshwright.device import Device
from meshwright.spec.layout import Layout
from tests.comm.hanging import Ended, run_hanging

TIMEOUT = 2.0
CPU = Device("cpu")
OUTSIDE = r"it is outside any collective, in comm/test_watchdog.py:\d+"


def message(ends: list[Ended]) -> str:
    """Return the only message that the ranks of a run printed."""
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("meshwright: ")]
    assert len(lines) == 1, "\n".join(end.stderr for end in ends)
    return lines[0]


def warm(mesh: Mesh) -> None:
    mesh.world.all_reduce(torch.ones(1))


def asleep(mesh: Mesh, sleeper: int) -> None:
    warm(mesh)
    if mesh.rank == sleeper:
        time.sleep(60)
    with mesh.ledger.phase("reduce"):
        mesh.world.all_reduce(torch.ones(256))


def test_a_rank_that_sleeps_is_named_with_its_place(tmp_path: Path) -> None:
    ends = run_hanging(4, asleep, tmp_path, 2, timeout=TIMEOUT)
    text = message(ends)
    assert "all_reduce number 2 over world (reduce, 1024 bytes) did not end within 2 s on ranks [0, 1, 3]" in text
    assert re.search(rf"; rank 2 did not arrive: {OUTSIDE} asleep", text)
    assert [end.code for end in ends] == [EXIT_CODE] * 4
    assert all(end.seconds >= TIMEOUT for end in ends), ends
    records = {rank: json.loads((tmp_path / f"flight/rank-{rank}.json").read_text()) for rank in range(4)}
    assert records[2]["holding"] is None and records[0]["holding"]["number"] == 2
    assert [call["op"] for call in records[1]["last"]] == ["all_reduce", "all_reduce"]


def asleep_without_a_disk(mesh: Mesh) -> None:
    watchdog.DISK_S = 0.2
    asleep(mesh, 1)


def test_a_disk_that_does_not_answer_keeps_no_rank_from_its_end(tmp_path: Path) -> None:
    """Nothing reads these FIFOs, so opening one for writing blocks forever."""
    (tmp_path / "flight").mkdir()
    for name in ("rank-0.json", "rank-1.json", "hang.json"):
        os.mkfifo(tmp_path / "flight" / name)
    ends = run_hanging(2, asleep_without_a_disk, tmp_path, timeout=TIMEOUT)
    assert "did not end within 2 s on rank 0; rank 1 did not arrive" in message(ends)
    assert [end.code for end in ends] == [EXIT_CODE] * 2


def test_a_thread_that_never_lets_others_run_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer arranges that the process is ended late, and cancels this when the watch ends."""
    armed: list[float] = []

    def arm(seconds: float, exit: bool, file: int) -> None:
        assert exit and file == 2
        armed.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(0.0))
    watch = Watchdog(Mesh(Layout(1), 0), 10.0, None, CPU)
    watch._stopping.set()
    watch._time()
    assert armed == [3 * 10.0 + COMPILING_S + watchdog.BACKSTOP_S, 0.0]
    assert armed[0] > call_limit(10.0).total_seconds(), "torch's own limit comes first"


def stopped(mesh: Mesh, victim: int) -> None:
    warm(mesh)
    if mesh.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.world.all_reduce(torch.ones(4))


def test_a_stopped_rank_does_not_answer(tmp_path: Path) -> None:
    ends = run_hanging(3, stopped, tmp_path, 1, timeout=TIMEOUT, stopped=1)
    text = message(ends)
    assert "on ranks [0, 2]; rank 1 did not arrive: it does not answer (stopped or dead)" in text
    assert [ends[0].code, ends[2].code] == [EXIT_CODE] * 2


def test_a_stopped_rank_that_keeps_the_store_is_named_by_all_others(tmp_path: Path) -> None:
    ends = run_hanging(3, stopped, tmp_path, 0, timeout=TIMEOUT, stopped=0)
    for end in ends[1:]:
        assert end.code == EXIT_CODE
        assert "all_reduce number 2 over world" in end.stderr and "of ranks [0, 1, 2]" in end.stderr
        assert "rank 0, which keeps the ranks' store, does not answer (stopped or dead)" in end.stderr


def stopped_while_another_leaves(mesh: Mesh) -> None:
    """Stop rank 0, and end rank 2 as its watchdog would, just before rank 1's own limit."""
    warm(mesh)
    if mesh.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if mesh.rank == 2:
        time.sleep(2.0)
        os._exit(EXIT_CODE)
    mesh.world.all_reduce(torch.ones(4))


@pytest.mark.wide
def test_a_stopped_keeper_of_the_store_is_named_also_where_the_call_fails_first(tmp_path: Path) -> None:
    end = run_hanging(3, stopped_while_another_leaves, tmp_path, timeout=20.0, stopped=0)[1]
    assert end.code == EXIT_CODE, end
    assert "all_reduce number 2 over world" in end.stderr and "another rank has probably stopped" in end.stderr
    assert "rank 0, which keeps the ranks' store, does not answer (stopped or dead)" in end.stderr


def crossed(mesh: Mesh) -> None:
    # The mesh gives world the process group of tp, which has the same ranks. In one group the two calls would match.
    mesh.world.process_group = dist.new_group()
    warm(mesh)
    first, second = (mesh.tp, mesh.world) if mesh.rank == 0 else (mesh.world, mesh.tp)
    first.all_reduce(torch.ones(8))
    second.all_reduce(torch.ones(8))


def test_two_orders_of_the_same_calls(tmp_path: Path) -> None:
    ends = run_hanging(2, crossed, tmp_path, timeout=TIMEOUT, tp=2)
    text = message(ends)
    tp, world = "all_reduce number 1 over tp (startup, 32 bytes)", "all_reduce number 2 over world (startup, 32 bytes)"
    here, there, other = (tp, world, 1) if text.startswith(f"meshwright: {tp}") else (world, tp, 0)
    assert f"{here} did not end within 2 s on rank {1 - other}; " in text
    assert f"; rank {other} did not arrive: it waits in {there}" in text
    assert "the ranks wait for each other, so they make their calls in different orders" in text
    assert [end.code for end in ends] == [EXIT_CODE] * 2


def unsent(mesh: Mesh) -> None:
    warm(mesh)
    x = torch.ones(16)
    if mesh.rank == 1:
        with mesh.ledger.phase("forward"):
            mesh.pp.receive(x, 0).wait()
            mesh.pp.receive(x, 0).wait()
    else:
        mesh.pp.send(x, 1).wait()
        time.sleep(60)


def test_a_receive_that_nobody_sends_to(tmp_path: Path) -> None:
    ends = run_hanging(2, unsent, tmp_path, timeout=TIMEOUT, pp=2)
    text = message(ends)
    assert "receive number 2 over pp from rank 0 (forward, 64 bytes) did not end within 2 s on rank 1; " in text
    assert re.search(rf"rank 0 did not arrive with the matching send: {OUTSIDE} unsent", text)
    assert [end.code for end in ends] == [EXIT_CODE] * 2


def behind(mesh: Mesh) -> None:
    """Let rank 3 sleep. Rank 2 waits for it over tp, ranks 0 and 1 wait for both over world."""
    warm(mesh)
    if mesh.rank == 3:
        time.sleep(60)
    mesh.tp.all_reduce(torch.ones(2))
    mesh.world.all_reduce(torch.ones(2))


@pytest.mark.wide
def test_whoever_notices_first_the_last_cause_is_named(tmp_path: Path) -> None:
    text = message(run_hanging(4, behind, tmp_path, timeout=TIMEOUT, tp=2))
    assert re.search(rf"rank 3 did not arrive: {OUTSIDE} behind", text)
    assert "wait for each other" not in text


def slow(mesh: Mesh) -> None:
    """Make calls and pauses that are each shorter than the timeout, but longer in total. An early receive stays
    open.
    """
    warm(mesh)
    x = torch.ones(4)
    early = mesh.pp.receive(x, 0) if mesh.rank == 1 else None
    for _ in range(3):
        time.sleep(2.0 if mesh.rank else 0.0)
        mesh.world.all_reduce(torch.ones(4))
    if mesh.rank == 0:
        mesh.pp.send(x, 1).wait()
    if early:
        time.sleep(5.0)
        early.wait()


@pytest.mark.wide
def test_no_false_alarm_on_a_slow_run(tmp_path: Path) -> None:
    ends = run_hanging(2, slow, tmp_path, timeout=4.0, pp=2)
    assert [(end.code, end.stderr) for end in ends] == [(0, "")] * 2
    assert not (tmp_path / "flight").exists()


def compiles(mesh: Mesh, folder: str, seconds: float, stops: bool) -> None:
    """Let rank 1 reach the call late because it compiles. The compiler takes `seconds`, or stops the process."""
    warm(mesh)
    begun = Path(folder) / "begun"

    def slow_compiler(graph: Any, inputs: Any) -> Any:
        begun.touch()
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(seconds)
        return graph.forward

    if mesh.rank == 1:
        torch.compile(lambda x: x + 1, backend=slow_compiler)(torch.ones(2))
    while not begun.exists():
        time.sleep(0.02)
    mesh.world.all_reduce(torch.ones(4))


@pytest.mark.wide
def test_no_alarm_while_a_rank_compiles(tmp_path: Path) -> None:
    ends = run_hanging(3, compiles, tmp_path, str(tmp_path), 12.0, False, timeout=5.0)
    assert [end.code for end in ends] == [0] * 3, ends
    said = "".join(end.stderr for end in ends)
    what = "all_reduce number 2 over world (startup, 16 bytes) has waited for more than 5 s"
    assert said == f"{what}: rank 1 is compiling, so this is no hang\n"


@pytest.mark.wide
def test_a_rank_that_is_stopped_while_it_compiles_is_found(tmp_path: Path) -> None:
    ends = run_hanging(3, compiles, tmp_path, str(tmp_path), 0.0, True, timeout=TIMEOUT, stopped=1)
    assert "rank 1 did not arrive: it does not answer (stopped or dead)" in message([ends[0], ends[2]])
    assert [ends[0].code, ends[2].code] == [EXIT_CODE] * 2


class Signs:
    """A store in which another rank signals that it compiles."""

    def __init__(self) -> None:
        self.given, self.counts = 0, dict[str, int]()

    def add(self, key: str, amount: int) -> int:
        if key == "signs":
            self.given += amount
            return self.given
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]

    def get(self, key: str) -> bytes:
        assert key == "compiling"
        return b"3"


def test_the_time_counts_from_the_last_sign_of_a_rank_that_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulated clock times a call that waits from second 100 on, with a timeout of 10 s."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    mesh, store = Mesh(Layout(1), 0), Signs()
    watchdog = Watchdog(mesh, 10.0, None, CPU)
    call = mesh.flight.begin(RecordedCall("tp:0", "tp", "all_reduce", "forward", 0, 64, (0, 1), started=now))

    def looked(at: float, signs: int) -> bool:
        """Return whether the call is overdue at a time by which another rank has given `signs` further signs."""
        nonlocal now
        now, store.given = at, store.given + signs
        watchdog._look(store)  # type: ignore[arg-type]
        return watchdog._overdue_call() is call

    assert not looked(105.0, 1)
    assert not looked(112.0, 1) and not looked(121.9, 0)
    assert capsys.readouterr().err.startswith("all_reduce number 1 over tp (forward, layer 0, 64 bytes) has waited for")
    assert looked(122.0, 0), "ten seconds after the last sign"
    assert not looked(123.0, 1) and capsys.readouterr().err == "", "it is said once"
    assert looked(110.0 + COMPILING_S, 1), "no rank compiles forever"
    assert store.counts == {"excused/tp:0/1": 1}


def test_compiled_code_that_runs_is_not_taken_for_a_compiler() -> None:
    found: list[bool] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        found.append(is_compiling())

        def run(*args: Any) -> Any:
            found.append(is_compiling())
            return graph.forward(*args)

        return run

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    assert found == [True, False]


def test_torch_lets_a_call_wait_as_long_as_the_watchdog_does() -> None:
    assert call_limit(5.0).total_seconds() > 5.0 + COMPILING_S + Watchdog(Mesh(Layout(1), 0), 5.0, None, CPU).grace


def test_a_clean_end_is_silent_though_the_store_s_keeper_is_done_first(tmp_path: Path) -> None:
    ends = run_hanging(3, late_leaver, tmp_path, timeout=TIMEOUT)
    assert [(end.code, end.stderr) for end in ends] == [(0, "")] * 3


def late_leaver(mesh: Mesh) -> None:
    warm(mesh)
    time.sleep(0.0 if mesh.rank == 0 else 1.0)


def test_open_store_without_a_place_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is not asked, since it would try again and again."""
    monkeypatch.setattr(watchdog, "TCPStore", lambda *given, **named: pytest.fail("torch was asked"))
    assert open_store({}) is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        assert open_store(env) is None, "nobody listens there"


def _call(op: str, group: str, number: int, ranks: list[int], payload: int = 8) -> dict[str, object]:
    return {"op": op, "group": group, "axis": group.split(":")[0], "number": number, "ranks": ranks, "peer": None,
            "phase": "forward", "layer": 3, "payload": payload}  # fmt: skip


def test_the_message_where_everybody_arrived() -> None:
    here, other = _call("all_reduce", "tp:0", 4, [0, 1]), _call("all_gather", "tp:0", 4, [0, 1])
    states = {rank: {"numbers": {"tp:0": 4}, "holding": c, "last": [c]} for rank, c in ((0, here), (1, other))}
    called = "all_gather number 4 over tp (forward, layer 3, 8 bytes)"
    assert explain(here, 0, 9.0, states.get).endswith(f"rank 1 has called {called} there, so the ranks disagree")
    states[1] = {"numbers": {"tp:0": 4}, "holding": here, "last": [here]}
    assert explain(here, 0, 9.0, states.get).endswith("arrived, so the network or a device is probably stuck")


def test_ranks_may_send_different_sizes_in_an_exchange() -> None:
    calls = [_call("exchange", "dp:0", 4, [0, 1], payload) for payload in (8, 0)]
    states = {rank: {"numbers": {"dp:0": 4}, "holding": call, "last": [call]} for rank, call in enumerate(calls)}
    assert explain(calls[0], 0, 9.0, states.get).endswith("arrived, so the network or a device is probably stuck")


class MemoryStore:
    """A store that remembers values and counters."""

    def __init__(self) -> None:
        self.values, self.counts = dict[str, str](), dict[str, int]()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.counts[key] = self.counts.get(key, 0) + amount
        return self.counts[key]


def stuck_among_thousands(asked: bool) -> tuple[Watchdog, MemoryStore]:
    mesh, store = Mesh(Layout(1), 0), MemoryStore()
    for _ in range(12):
        call = RecordedCall("world:0", "world", "all_reduce", "reduce", None, 64, range(4096))
        mesh.flight.begin(call)
    watch = Watchdog(mesh, 10.0, None, CPU)
    held = mesh.flight.blocking_call()
    assert held is not None
    watch._asked = (held.group, held.number) if asked else None
    return watch, store


def test_what_a_rank_publishes_does_not_grow_with_the_ranks() -> None:
    watch, store = stuck_among_thousands(asked=True)
    watch._publish(store)  # type: ignore[arg-type]
    assert json.loads(store.values["state/0"])["holding"]["op"] == "all_reduce"
    assert sum(map(len, store.values.values())) < 12_000
    assert store.counts == {"answered": 1}
    watch, store = stuck_among_thousands(asked=False)
    watch._publish(store)  # type: ignore[arg-type]
    assert store.values == {"here/0": "null"}, "after a loss nobody reads states"
    watch._asked = "tp:0", 1
    assert len(watch.state()["holding"]["ranks"]) == 4096, "the others follow a call that they do not know"


def test_a_rank_answers_though_its_state_can_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, store = stuck_among_thousands(asked=True)
    monkeypatch.setattr(watch, "state", lambda: {}["x"])
    watch._publish(store)  # type: ignore[arg-type]
    assert json.loads(store.values["state/0"]) == {"rank": 0, "at": "an unknown place (KeyError: 'x')"}
    assert store.values["here/0"] == "null" and store.counts == {"answered": 1}


def test_a_listener_whose_device_fails_leaves_the_report_to_the_timer() -> None:
    def make_current() -> None:
        raise RuntimeError("device-side assert")

    watch, store = stuck_among_thousands(asked=False)
    watch._store, watch.device = store, SimpleNamespace(make_current=make_current)  # type: ignore[assignment]
    watch._listen()
    assert watch._store_gone


def test_many_missing_ranks_are_named_together_and_a_rank_that_left_says_why() -> None:
    here = _call("all_reduce", "world:0", 2, list(range(100)))
    at = {"numbers": {"world:0": 1}, "holding": None, "at": "data/dataset.py:9 sample"}
    left = {"left": "ValueError: bad sample"}
    states = dict.fromkeys(range(1, 99), at) | {0: {"numbers": {"world:0": 2}, "holding": here}, 99: left}
    text = explain(here, 0, 60.0, states.get)
    assert "15, 16 and 82 more] did not arrive: each is outside any collective, in data/dataset.py:9 sample" in text
    assert "rank 99 did not arrive: it has left (ValueError: bad sample)" in text
