"""Requests to stop: a run notes them, and they still end a process that waits forever.

The time between two requests decides how the second one is understood. The processes of these tests therefore read a
clock that stands still until the test sets it. They report when a request was heard (by the thread that listens) or
noted (by the main thread), so that no result depends on how soon a busy machine runs them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.waiting import HANG_S

# Sleeping is reported too: the listener begins that way to end a process that handles nothing.
CLOCK = """
import ctypes, os, sys, threading, time
from meshwright.launch import signals
from meshwright.launch.signals import StopRequests, ends_at_once

class Clock:
    @staticmethod
    def monotonic():
        now = float(open(sys.argv[1]).read())  # before it is said: the test sets the next time then
        if threading.current_thread().name == "stop requests":
            os.write(1, b"heard\\n")
        return now

    @staticmethod
    def sleep(seconds):
        os.write(1, b"sleeps\\n")
        time.sleep(seconds)

def note(self, *args, real=StopRequests._note):
    real(self, *args)
    os.write(1, b"noted\\n")

def listener_ends():
    for thread in threading.enumerate():
        if thread.name == "stop requests":
            thread.join()

def say_when_blocked(mutex):
    # The C library writes 2 into a mutex for which somebody waits. Until then the main thread may still handle signals.
    while int.from_bytes(mutex.raw[:4], sys.byteorder) != 2:
        time.sleep(0.001)
    print("ready", flush=True)

StopRequests._note, signals.time = note, Clock
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
signals.SAME_REQUEST_S, signals.SAME_CTRL_C_S, signals.BLOCKED_S = 5.0, 0.3, 0.1
"""
# A mutex that is locked twice. No signal interrupts that wait, and none interrupts a wait for a peer inside torch.
BLOCKED = """
with signals.StopRequests(), signals.StopRequests():
    library.pthread_mutex_lock(mutex)
    threading.Thread(target=say_when_blocked, args=(mutex,), daemon=True).start()
    library.pthread_mutex_lock(mutex)
"""
NOTED = """
with StopRequests() as requests:
    print("ready", flush=True)
    while not requests.seen:
        time.sleep(0.01)
with StopRequests() as again:
    print(again.seen, flush=True)
"""
JOINING = """
with StopRequests():
    with ends_at_once():
        print("ready", flush=True)
        time.sleep(600)
"""
NOTED_BEFORE = """
with StopRequests() as requests:
    print("ready", flush=True)
    while not requests.seen:
        time.sleep(0.01)
    with ends_at_once():
        time.sleep(600)
"""
# Requests to a forked child, and a later one to a run that has ended well, end no process.
UNTOUCHED = """
import signal
now = 100.0
Clock.monotonic = lambda: now

def request(process):  # long after the one before it
    global now
    now += 100.0
    os.kill(process, signal.SIGTERM)

with StopRequests() as outer:
    for _ in range(2):
        child = os.fork()
        if not child:
            request(os.getpid())
            while not outer.seen:
                time.sleep(0.01)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and not outer.seen
    with StopRequests() as run:
        request(os.getpid())
        while not run.seen:
            time.sleep(0.01)
    request(os.getpid())
    while not outer.seen:
        time.sleep(0.01)
listener_ends()
print("ready", flush=True)
"""
# A process without a launcher. Its user's Ctrl-C arrives twice when a wrapper passes it on, and then once more.
CTRL_C = """
signals.BLOCKED_S = 600.0
with StopRequests(launched=False, speaks=True) as requests:
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        print(requests.seen, flush=True)
"""
# Two requests arrive during one long call, and Python reports them to the process once. The call is a mutex that is
# held until the test says that both have arrived.
BUSY = """
signals.BLOCKED_S = 600.0
library.pthread_mutex_lock(mutex)

def release():
    say_when_blocked(mutex)
    sys.stdin.readline()
    library.pthread_mutex_unlock(mutex)

threading.Thread(target=release, daemon=True).start()
with StopRequests(launched=False):
    try:
        library.pthread_mutex_lock(mutex)
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
STUCK = BLOCKED.replace(
    "with signals.StopRequests(), signals.StopRequests():",
    "with signals.StopRequests(launched=False, loses=lambda: 'steps 1 to 2 are lost'):",
)
FIRST_STEP = BLOCKED.replace(
    "with signals.StopRequests(), signals.StopRequests():",
    "signals.FIRST_STEP_S, StopRequests.has_work = 0.2, False\nwith signals.StopRequests(speaks=True):",
)
IGNORED = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with StopRequests() as requests, ends_at_once():
    print("ready", flush=True)
    sys.stdin.readline()
print(requests.seen, flush=True)
"""
# The end of run.time_limit asks to stop. The scheduler's signal, which arrives while the run saves, is the first
# request.
LIMITED = """
with StopRequests() as requests:
    requests.request()
    with StopRequests() as saving:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
"""
GUARDED = """
import signal
from meshwright.launch.launch import run_guarded
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def body():
    print("ready", flush=True)
    time.sleep(600)
run_guarded(None, False, body)
"""


class Child:
    """A process that runs one of these programs, and the file with its time."""

    def __init__(self, folder: Path, code: str, stderr: int = subprocess.PIPE) -> None:
        self.clock = folder / "clock"
        self.at(100.0)
        command = [sys.executable, "-c", CLOCK + code, str(self.clock)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        self.hears("ready")

    def at(self, seconds: float) -> None:
        """Set the clock of the process."""
        part = self.clock.with_suffix(".part")
        part.write_text(str(seconds))
        part.replace(self.clock)

    def sends(self, number: signal.Signals, *then: str) -> None:
        """Send a signal, and wait until the process has said the words `then`, in any order, and nothing else."""
        self.process.send_signal(number)
        self.hears(*then)

    def hears(self, *words: str) -> None:
        assert self.process.stdout is not None
        said = Counter(self.process.stdout.readline().strip() for _ in words)
        assert said == Counter(words), said

    def ends(self) -> tuple[int, str, str]:
        """Return the exit code and the rest of the output."""
        out, err = self.process.communicate("\n", timeout=HANG_S)
        return self.process.returncode, out, err


def test_a_second_request_ends_a_process_that_handles_nothing(tmp_path: Path) -> None:
    child = Child(tmp_path, BLOCKED)
    child.sends(signal.SIGTERM, "heard")
    child.at(104.9)
    child.sends(signal.SIGTERM, "heard")  # passed on by a launcher: the same request
    child.at(105.1)
    child.sends(signal.SIGTERM, "heard", "sleeps")
    assert child.ends()[0] == 128 + signal.SIGTERM


def test_a_first_step_that_does_not_end_ends_with_the_process(tmp_path: Path) -> None:
    """Nothing is lost by that, and the step may take hours."""
    child = Child(tmp_path, FIRST_STEP)
    child.process.send_signal(signal.SIGTERM)
    code, _, said = child.ends()
    assert code == 128 + signal.SIGTERM and "stops now, and nothing is lost" in said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_request_is_noted_and_ends_with_the_run(number: signal.Signals, tmp_path: Path) -> None:
    child = Child(tmp_path, NOTED)
    child.process.send_signal(number)
    code, out, _ = child.ends()
    assert code == 0 and {"noted", "False"} <= set(out.splitlines()), out


def test_what_is_not_this_process_s_request_does_not_end_it(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", CLOCK + UNTOUCHED], stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0 and out.splitlines().count("ready") == 1, out


def test_a_signal_after_the_time_limit_is_the_first_request(tmp_path: Path) -> None:
    """The signal does not end a run that saves, and the next one does."""
    child = Child(tmp_path, LIMITED)
    child.at(200.0)
    child.sends(signal.SIGUSR1, "heard", "noted")
    child.at(300.0)
    child.process.send_signal(signal.SIGTERM)
    assert child.ends()[0] == -signal.SIGTERM


@pytest.mark.parametrize("code", [JOINING, NOTED_BEFORE, GUARDED], ids=["meeting", "before", "saves nothing"])
def test_where_nothing_can_be_lost_the_first_request_ends(code: str, tmp_path: Path) -> None:
    child = Child(tmp_path, code)
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(HANG_S) == -signal.SIGTERM


def test_a_second_ctrl_c_interrupts_and_one_that_is_passed_on_does_not(tmp_path: Path) -> None:
    child = Child(tmp_path, CTRL_C)
    for seconds in (100.0, 100.2):
        child.at(seconds)
        child.sends(signal.SIGINT, "heard", "noted")
    child.at(100.4)
    child.process.send_signal(signal.SIGINT)
    code, out, said = child.ends()
    assert code == 0 and "True" in out.splitlines()
    assert said == "asked to stop: saves after this step (Ctrl-C again stops at once, and saves nothing)\n"


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_two_ctrl_c_of_quick_fingers_are_two(busy: bool, tmp_path: Path) -> None:
    child = Child(tmp_path, BUSY)
    if not busy:
        assert child.process.stdin is not None
        child.process.stdin.write("\n")
        child.process.stdin.flush()
    child.sends(signal.SIGINT, "heard", *([] if busy else ["noted"]))
    child.at(100.4)
    child.process.send_signal(signal.SIGINT)
    if busy:
        child.hears("heard", "sleeps")
    code, out, _ = child.ends()
    assert code == 0 and "interrupted" in out  # two threads write, so lines may be joined


def test_what_is_said_after_ctrl_c_begins_a_line(tmp_path: Path) -> None:
    """A terminal has echoed ^C, so the message starts a new line."""
    ours, theirs = os.openpty()
    child = Child(tmp_path, CTRL_C, stderr=theirs)
    os.close(theirs)
    child.sends(signal.SIGINT, "heard", "noted")
    said = ""
    while "saves nothing)" not in said:
        said += os.read(ours, 1000).decode()
    assert said.startswith("\r\nasked to stop"), said
    child.at(100.4)
    child.process.send_signal(signal.SIGINT)
    assert child.ends()[0] == 0
    os.close(ours)


def test_a_second_ctrl_c_ends_a_process_that_handles_nothing_and_says_what_is_lost(tmp_path: Path) -> None:
    child = Child(tmp_path, STUCK)
    child.sends(signal.SIGINT, "heard")
    child.at(100.4)
    child.sends(signal.SIGINT, "heard", "sleeps")
    code, _, said = child.ends()
    assert code == 130 and said == "steps 1 to 2 are lost\n"


def test_a_process_that_was_started_to_ignore_hangups_does(tmp_path: Path) -> None:
    child = Child(tmp_path, IGNORED)
    child.process.send_signal(signal.SIGHUP)
    assert child.ends()[:2] == (0, "False\n")
