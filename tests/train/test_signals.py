"""Requests to stop: noted by a run, and never a way to make a process that waits for ever immortal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

# A mutex that is locked twice: no signal interrupts that, as none interrupts a wait for a peer inside torch.
BLOCKED = """
import ctypes, sys
from meshwright.train import signals
signals.SAME_REQUEST_S, signals.BLOCKED_S = 0.5, 0.1
with signals.StopRequests(), signals.StopRequests():
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
"""
NOTED = """
import time
from meshwright.train.signals import StopRequests
with StopRequests() as requests:
    print("ready", flush=True)
    while not requests.seen:
        time.sleep(0.01)
with StopRequests() as again:
    print(again.seen, flush=True)
"""
JOINING = """
import time
from meshwright.train.signals import StopRequests, ends_at_once
with StopRequests():
    with ends_at_once():
        print("ready", flush=True)
        time.sleep(30)
"""
NOTED_BEFORE = """
import time
from meshwright.train.signals import StopRequests, ends_at_once
with StopRequests() as requests:
    print("ready", flush=True)
    while not requests.seen:
        time.sleep(0.01)
    with ends_at_once():
        time.sleep(30)
"""
# Requests to a child that was forked, and a later one to a run that has ended well, end nobody.
UNTOUCHED = """
import os, signal, time
from meshwright.train import signals
signals.SAME_REQUEST_S, signals.BLOCKED_S = 0.2, 0.1
with signals.StopRequests():
    for _ in range(2):
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
        time.sleep(0.3)
        os.kill(child, signal.SIGTERM)
        time.sleep(0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with signals.StopRequests() as run:
        os.kill(os.getpid(), signal.SIGTERM)
        while not run.seen:
            time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.01)
print("ready", flush=True)
"""
# A process that nobody launched: its user's Ctrl-C comes twice when a wrapper passes it on, and then once more.
CTRL_C = """
import time
from meshwright.train import signals
signals.SAME_CTRL_C_S = 0.3
with signals.StopRequests(launched=False, speaks=True) as requests:
    print("ready", flush=True)
    try:
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        print(requests.seen, flush=True)
"""
# Two that come while one long call computes, of which Python tells the process once.
BUSY = """
import hashlib, time
from meshwright.train import signals
signals.BLOCKED_S, signals.SAME_CTRL_C_S = 30.0, 0.05
with signals.StopRequests(launched=False):
    try:
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", ROUNDS)
        time.sleep(10)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
STUCK = BLOCKED.replace("0.5, 0.1", "9.0, 0.1\nsignals.SAME_CTRL_C_S = 0.3").replace(
    "with signals.StopRequests(), signals.StopRequests():",
    "with signals.StopRequests(launched=False, loses=lambda: 'steps 1 to 2 are lost'):",
)
IGNORED = """
import signal, time
from meshwright.train.signals import StopRequests, ends_at_once
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequests() as requests, ends_at_once():
    print("ready", flush=True)
    time.sleep(0.5)
print(requests.seen, flush=True)
"""
# The end of run.time_limit asks to stop; the scheduler's signal, while the run saves, is the first one.
LIMITED = """
import time
from meshwright.train import signals
signals.SAME_REQUEST_S, signals.BLOCKED_S = 0.1, 0.1
with signals.StopRequests() as requests:
    requests.request()
    with signals.StopRequests() as saving:
        time.sleep(0.3)
        print("ready", flush=True)
        time.sleep(0.6)
        print(saving.seen, flush=True)
        time.sleep(30)
"""
GUARDED = """
import signal, time
from meshwright.train.launch import guarded
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def body():
    print("ready", flush=True)
    time.sleep(30)
guarded(None, False, body)
"""


def started(code: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_a_second_request_ends_a_process_that_handles_nothing() -> None:
    child = started(BLOCKED)
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGTERM)  # passed on by a launcher: the same request
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.8)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10.0) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_request_is_noted_and_ends_with_the_run(number: signal.Signals) -> None:
    child = started(NOTED)
    child.send_signal(number)
    out, _ = child.communicate(timeout=10.0)
    assert out == "False\n" and child.returncode == 0


def test_what_is_not_this_process_s_request_does_not_end_it() -> None:
    assert started(UNTOUCHED).wait(10.0) == 0


def test_a_signal_after_the_time_limit_is_the_first_request() -> None:
    """It does not end a run that saves; the next one does."""
    child = started(LIMITED)
    child.send_signal(signal.SIGUSR1)
    assert child.stdout is not None and child.stdout.readline() == "True\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(10.0) == -signal.SIGTERM


@pytest.mark.parametrize("code", [JOINING, NOTED_BEFORE, GUARDED], ids=["meeting", "before", "saves nothing"])
def test_where_nothing_can_be_lost_the_first_request_ends(code: str) -> None:
    child = started(code)
    begin = time.monotonic()
    child.send_signal(signal.SIGTERM)
    assert child.wait(10.0) == -signal.SIGTERM and time.monotonic() - begin < 5.0


def test_a_second_ctrl_c_interrupts_and_one_that_is_passed_on_does_not() -> None:
    child = started(CTRL_C)
    for pause in (0.0, 0.1, 0.4):
        time.sleep(pause)
        child.send_signal(signal.SIGINT)
    out, said = child.communicate(timeout=10.0)
    assert out == "True\n" and child.returncode == 0
    assert said == "asked to stop: saves after this step (Ctrl-C again stops at once, and saves nothing)\n"


@pytest.mark.parametrize("rounds", [1, 6_000_000], ids=["idle", "busy"])  # seconds
def test_two_ctrl_c_of_quick_fingers_are_two(rounds: int) -> None:
    child = started(BUSY.replace("ROUNDS", str(rounds)))
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60.0)
    assert out == "interrupted\n" and child.returncode == 0


def test_what_is_said_after_ctrl_c_begins_a_line() -> None:
    """A terminal has echoed ^C."""
    ours, theirs = os.openpty()
    child = subprocess.Popen([sys.executable, "-c", CTRL_C], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    said = ""
    while "saves nothing)" not in said:
        said += os.read(ours, 1000).decode()
    assert said.startswith("\r\nasked to stop"), said
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    assert child.wait(10.0) == 0
    os.close(ours)


def test_a_second_ctrl_c_ends_a_process_that_handles_nothing_and_says_what_is_lost() -> None:
    child = started(STUCK)
    child.send_signal(signal.SIGINT)
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=10.0)
    assert child.returncode == 130 and said == "steps 1 to 2 are lost\n"


def test_a_process_that_was_started_to_ignore_hangups_does() -> None:
    child = started(IGNORED)
    child.send_signal(signal.SIGHUP)
    out, _ = child.communicate(timeout=10.0)
    assert out == "False\n" and child.returncode == 0
