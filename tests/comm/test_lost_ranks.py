"""A rank dies: all others end with one exit code, and one sentence names the dead rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from meshwright.comm import lost_ranks
from meshwright.comm.lost_ranks import ErrorPoll, describe_lost_ranks, leave_errors_to_us, record_presence
from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import EXIT_CODE
from meshwright.record import ending
from tests.comm.hanging import Ended, run_hanging

TIMEOUT = 8.0
DEAD = "does not answer (stopped or dead)"


def killed(mesh: Mesh, victim: int) -> None:
    mesh.world.all_reduce(torch.ones(1))
    if mesh.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.world.all_reduce(torch.ones(4))


def said(ends: list[Ended], victim: int) -> list[str]:
    """Return the messages of the survivors, all of which must end in time with the watchdog's exit code."""
    assert ends[victim].code == -signal.SIGKILL
    others = [end for rank, end in enumerate(ends) if rank != victim]
    assert [end.code for end in others] == [EXIT_CODE] * len(others), ends
    assert all(end.seconds < TIMEOUT + 15 for end in others), ends
    assert not any("Traceback" in end.stderr or "destroy_process_group" in end.stderr for end in others), ends
    return [line for end in others for line in end.stderr.splitlines() if line.startswith("meshwright: ")]


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_a_killed_rank_is_named_once_for_all(victim: int, tmp_path: Path) -> None:
    """The killed rank is a middle one or the last one."""
    lines = said(run_hanging(3, killed, tmp_path, victim, timeout=TIMEOUT), victim)
    assert len(lines) == 1, lines
    assert lines[0].startswith("meshwright: all_reduce number 2 over world (startup, 16 bytes) of ranks [0, 1, 2]")
    assert "another rank has probably stopped (" in lines[0] and lines[0].endswith(f"; rank {victim} {DEAD}")


def test_a_killed_keeper_of_the_store_is_named_by_all_others(tmp_path: Path) -> None:
    lines = said(run_hanging(3, killed, tmp_path, 0, timeout=TIMEOUT), 0)
    assert len(lines) == 2, "without the store the survivors cannot agree on one that reports"
    assert all(f"rank 0, which keeps the ranks' store, {DEAD}" in line for line in lines)


def killed_behind(mesh: Mesh) -> None:
    """Kill rank 3. Rank 2 loses it over tp. Ranks 0 and 1 only wait for rank 2, and learn of the loss by the alarm."""
    mesh.world.all_reduce(torch.ones(1))
    if mesh.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    mesh.tp.all_reduce(torch.ones(2))
    mesh.world.all_reduce(torch.ones(2))


@pytest.mark.wide
def test_ranks_that_do_not_talk_to_the_dead_one_end_too(tmp_path: Path) -> None:
    lines = said(run_hanging(4, killed_behind, tmp_path, timeout=TIMEOUT, tp=2), 3)
    assert len(lines) == 1 and lines[0].endswith(f"; rank 3 {DEAD}"), lines


def raises(mesh: Mesh) -> None:
    mesh.world.all_reduce(torch.ones(1))
    if mesh.rank == 1:
        raise ValueError("bad sample")
    mesh.world.all_reduce(torch.ones(4))


@pytest.mark.wide
def test_a_rank_that_left_with_an_error_is_named_with_it(tmp_path: Path) -> None:
    ends = run_hanging(3, raises, tmp_path, timeout=TIMEOUT)
    assert [end.code for end in ends] == [EXIT_CODE, 1, EXIT_CODE], ends
    text = ends[0].stderr + ends[2].stderr
    assert text.count("\n") == 1 and "; rank 1 has left (ValueError: bad sample)" in text, text


def refused(mesh: Mesh) -> None:
    mesh.world.all_reduce(torch.ones(1))
    mesh.world.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))


def test_a_call_that_torch_refuses_is_no_loss(tmp_path: Path) -> None:
    ends = run_hanging(2, refused, tmp_path, timeout=TIMEOUT)
    assert [end.code for end in ends] == [1, 1], ends
    assert all("torch refused it (Invalid scalar type)" in end.stderr for end in ends), ends
    assert not any("disturbed" in end.stderr or "does not answer" in end.stderr for end in ends), ends


# A process group that can report errors, like that of NCCL: calls never return, and only its state says why.


class State(Enum):
    SUCCESS = 0
    COMM_ERROR = 2


class Fake:
    """A process group with one backend that reports `state()`."""

    _device_types = [torch.device("cpu")]

    def __init__(self, state: Callable[[], State]) -> None:
        self.asked, self._state = 0, state

    def _get_backend(self, device: torch.device) -> Fake:
        return self

    def get_error(self) -> State:
        self.asked += 1
        return self._state()


def stuck_on_device(mesh: Mesh, victim: int) -> None:
    """Let the survivors hang outside any recorded call, while the backend of one group knows that a peer is gone. Polls
    start to fail only once the victim is dead, as with a lost connection.
    """
    mesh.world.all_reduce(torch.ones(1))
    if mesh.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    failing = time.monotonic() + 1.0
    real = mesh.world.process_group
    mesh.world.process_group = Fake(lambda: State.COMM_ERROR if time.monotonic() > failing else State.SUCCESS)
    time.sleep(60)
    mesh.world.process_group = real


def test_an_error_that_only_the_process_group_knows_of_ends_all_ranks(tmp_path: Path) -> None:
    lines = said(run_hanging(3, stuck_on_device, tmp_path, 1, timeout=30.0), 1)
    assert len(lines) == 1, lines
    assert re.fullmatch(
        r"meshwright: communication over world of ranks \[0, 1, 2\] failed on rank [02] \(COMM_ERROR\); "
        rf"rank 1 {re.escape(DEAD)}", lines[0],
    ), lines  # fmt: skip


def test_groups_are_polled_and_those_that_can_not_tell_are_left_out() -> None:
    state = [State.SUCCESS]
    fine, dumb = Fake(lambda: state[0]), SimpleNamespace(_device_types=[torch.device("cpu")], asked=0)

    def no_backend(device: torch.device) -> Any:
        dumb.asked += 1
        return object()

    dumb._get_backend = no_backend
    made = [SimpleNamespace(process_group=each, axis=axis, ranks=(0, 1), rank=1)
            for each, axis in ((None, "alone"), (dumb, "tp"), (fine, "dp"))]  # fmt: skip
    poll = ErrorPoll(lambda: made)  # type: ignore[arg-type, return-value]
    assert poll.look() is None and poll.look() is None
    assert fine.asked == 2 and dumb.asked == 1
    state[0] = State.COMM_ERROR
    assert poll.look() == "communication over dp of ranks [0, 1] failed on rank 1 (COMM_ERROR)"


def test_a_back_end_that_refuses_to_tell_is_left_out() -> None:
    def refuse() -> State:
        raise RuntimeError("Backend gloo does not support getError")

    fake = Fake(refuse)
    poll = ErrorPoll(lambda: [SimpleNamespace(process_group=fake, axis="dp", ranks=(0, 1), rank=0)])  # type: ignore[list-item]
    assert poll.look() is None and poll.look() is None and fake.asked == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "0"),
        ({"TORCHELASTIC_RUN_ID": "x", lost_ranks.ERROR_HANDLING: "1"}, "0"),
        ({lost_ranks.ERROR_HANDLING: "1"}, "1"),
        ({"TORCHELASTIC_RUN_ID": "x", lost_ranks.ERROR_HANDLING: "3"}, "3"),
    ],
)
def test_torch_s_own_teardown_is_off_unless_the_user_wants_it(before: dict[str, str], after: str) -> None:
    env = dict(before)
    leave_errors_to_us(env)
    assert env[lost_ranks.ERROR_HANDLING] == after


class Answers:
    """A store that counts requests, in which the given ranks say that they are present or why they left."""

    def __init__(self, said: dict[int, str | None]) -> None:
        self.values, self.requests = dict[str, str](), 0
        for rank, left in said.items():
            record_presence(self, rank, left)  # type: ignore[arg-type]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return [self.values[key].encode() for key in keys]


@pytest.mark.parametrize(
    ("states", "clause"),
    [
        ({0: None, 2: None}, f"rank 1 {DEAD}"),
        ({1: None}, "ranks [0, 2] do not answer (stopped or dead)"),
        ({}, "ranks [0, 1, 2] do not answer (stopped or dead)"),
        ({0: None, 1: "ValueError: no", 2: None}, "rank 1 has left (ValueError: no)"),
        ({0: None, 1: None, 2: None}, "every rank answers, so the network between them is probably disturbed"),
    ],
)
def test_who_is_lost(states: dict[int, str | None], clause: str) -> None:
    assert describe_lost_ranks(Answers(states), 3, time.monotonic()) == clause  # type: ignore[arg-type]


def test_who_is_lost_among_thousands_takes_few_requests() -> None:
    store = Answers({rank: None for rank in range(4096) if rank not in (7, 4000)})
    assert describe_lost_ranks(store, 4096, time.monotonic()) == "ranks [7, 4000] do not answer (stopped or dead)"  # type: ignore[arg-type]
    assert store.requests < 60
    assert max(map(len, store.values.values())) < 10


def test_a_store_of_torch_s_says_who_is_lost() -> None:
    store = PrefixStore("watchdog/0", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    record_presence(store, 0)
    record_presence(store, 2, "ValueError: no")
    expected = "rank 1 does not answer (stopped or dead); rank 2 has left (ValueError: no)"
    assert describe_lost_ranks(store, 3, time.monotonic()) == expected


def test_the_launcher_is_told_instead_of_the_terminal(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(ending, "_reports", [])
    ending.report_loss("rank 1 is gone", speaks=False)
    ending.report_loss("rank 2 is gone", speaks=True)
    assert capsys.readouterr().err == "meshwright: rank 2 is gone\n"
    reports: list[str] = []
    ending.report_losses_by(reports.append)
    ending.report_loss("rank 3 is gone", speaks=False)
    assert reports == ["rank 3 is gone"] and capsys.readouterr().err == ""


def test_last_acts_are_done_though_one_fails() -> None:
    done: list[int] = []

    def fails() -> None:
        raise RuntimeError

    with ending.before_sudden_end(fails), ending.before_sudden_end(lambda: done.append(1)):
        ending.act_before_end()
    ending.act_before_end()
    assert done == [1]
