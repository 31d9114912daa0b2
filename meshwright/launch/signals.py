"""Handles requests to stop: save a checkpoint and end cleanly after the current step.

SIGTERM and SIGUSR1 come from a scheduler, SIGINT from Ctrl-C, SIGHUP from a terminal that is closed. A second Ctrl-C
ends the process at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from meshwright.errors import begin_line, notice

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)  # A process may be started to ignore these, for example by nohup.

# A scheduler may signal both a launcher and its ranks, and the launcher forwards its signal to them. Signals within
# this many seconds count as one request.
SAME_REQUEST_S = 5.0
# A terminal sends Ctrl-C once to each process, so a second SIGINT is usually the user's. A wrapper may forward the
# Ctrl-C that all processes got already, but it does so sooner than this, even on a busy machine. A user who presses
# twice within this time must press once more.
SAME_CTRL_C_S = 0.2
FIRST_STEP_S = 45.0  # A run that is asked to stop before its first step has ended waits this long for it.
BLOCKED_S = 1.0  # A main thread that takes longer to handle a signal is blocked, perhaps forever.


def taken_over(number: int) -> bool:
    """Return True if a process that stops on request should handle this signal: it was not started to ignore it."""
    return number not in TERMINAL_SIGNALS or signal.getsignal(number) is not signal.SIG_IGN


class StopRequests:
    """A context manager that notes requests to stop.

    `seen` is true once a stop signal has come, to this object or to one that was entered before it. A further request
    ends the process in the usual way, even if the main thread is blocked, for example in a wait for another rank.
    """

    handled = 0.0  # The time at which the main thread of this process last handled a request.
    # A second Ctrl-C that came before the main thread handled the first one. Python calls the handler once for both.
    second = 0
    # False until the first step of this process has ended: there is nothing to save, and the step may take hours.
    has_work = True

    def __init__(
        self, after: Any = None, speaks: bool = False, launched: bool = True, loses: Callable[[], str] | None = None
    ) -> None:
        """Take the options; the signals are handled only while this is entered.

        `after` is the handler to set on exit (None: the one before). `speaks`: print a notice at the first request.
        `launched`: a launcher may forward Ctrl-C. Without a launcher, a second Ctrl-C is the user's: it raises
        KeyboardInterrupt or, if the main thread is blocked, prints the sentence of `loses` about the lost work and ends
        the process.
        """
        self._seen = False
        self._since: float | None = None  # The time of the first signal; a request without a signal has none.
        self._after, self._speaks, self._launched, self._loses = after, speaks, launched, loses
        self._before: dict[int, Any] = {}
        self._bell: tuple[socket.socket, socket.socket] | None = None

    @property
    def seen(self) -> bool:
        return self._seen

    def request(self, signalled: float | None = None) -> None:
        """Ask to stop. `signalled` is the time of the signal, if one was the reason."""
        self._seen = True
        if self._since is None:
            self._since = signalled

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in filter(taken_over, STOP_SIGNALS):
                self._before[number] = signal.signal(number, self._note)
                if outer := _has_seen(self._before[number]):
                    self.request(outer._since)
            self._listen()
        return self

    def _is_again(self, number: int, since: float, now: float) -> bool:
        """Return True if a signal is a second request, rather than a copy of the first one."""
        mine = number == signal.SIGINT and not self._launched
        return now - since > (SAME_CTRL_C_S if mine else SAME_REQUEST_S)

    def _listen(self) -> None:
        """Start a thread that learns of signals at once.

        Python calls `_note` only between two bytecode instructions of the main thread, which may be blocked in native
        code. But it writes each signal's number to the wakeup descriptor at once.
        """
        before = signal.set_wakeup_fd(-1)
        # An outer StopRequests listens already.
        if before != -1:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            return
        bell = self._bell = socket.socketpair()
        bell[1].setblocking(False)
        signal.set_wakeup_fd(bell[1].fileno(), warn_on_full_buffer=False)

        def forked() -> None:
            """Detach a forked child from the descriptor that it inherits: its signals are not meant for its parent."""
            if self._bell is bell:
                # A child that was not forked by the main thread can't change the descriptor.
                with suppress(ValueError):
                    signal.set_wakeup_fd(-1)

        os.register_at_fork(after_in_child=forked)
        threading.Thread(target=self._hear, args=(bell[0],), name="stop requests", daemon=True).start()

    def _hear(self, end: socket.socket) -> None:
        """Print a notice at the first request, and end a blocked process at the second. This runs in a thread."""
        first: float | None = None
        while received := self._received(end, first):
            number, now = received[0], time.monotonic()
            if number not in STOP_SIGNALS:
                continue
            if first is None:
                first = now
                if self._speaks:
                    begin_line()
                    notice("asked to stop: saves after this step (Ctrl-C again stops at once, and saves nothing)")
            elif self._is_again(number, first, now):
                by_user = number == signal.SIGINT and not self._launched
                unhandled = StopRequests.handled < first
                StopRequests.second = number if by_user and unhandled and self._bell is not None else 0
                # Give the main thread time to handle the signal. If it does not, it is blocked.
                time.sleep(BLOCKED_S)
                if StopRequests.handled < now - BLOCKED_S:
                    if self._loses:
                        notice(self._loses())
                    os._exit(128 + number)
                # The main thread had handled both signals as one before `second` was set, so send it again.
                if StopRequests.second and self._bell is not None:
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
        end.close()

    def _received(self, end: socket.socket, first: float | None) -> bytes:
        """Wait for a signal. End the process FIRST_STEP_S after the first one if its first step has not ended."""
        if first is not None and not StopRequests.has_work:
            end.settimeout(max(0.001, first + FIRST_STEP_S - time.monotonic()))
            with suppress(TimeoutError):
                return end.recv(1)
            if not StopRequests.has_work:
                if self._speaks:
                    notice(f"no step has ended {FIRST_STEP_S:g} s after that: stops now, and nothing is lost")
                os._exit(128 + signal.SIGTERM)
            end.settimeout(None)
        return end.recv(1)

    def _note(self, number: int, frame: FrameType | None) -> None:
        StopRequests.handled = time.monotonic()
        again = StopRequests.second == number
        StopRequests.second = 0
        if again or (self._since is not None and self._is_again(number, self._since, time.monotonic())):
            if number == signal.SIGINT and not self._launched:
                raise KeyboardInterrupt
            # End as if the signal had never been handled.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.request(time.monotonic())

    def __exit__(self, *error: object) -> None:
        if self._bell is not None:
            signal.set_wakeup_fd(-1)
            # The thread at the other end receives nothing more, and ends.
            self._bell[1].close()
            self._bell, StopRequests.second = None, 0
        for number, before in self._before.items():
            signal.signal(number, before if self._after is None else self._after)


def _has_seen(handler: Any) -> StopRequests | None:
    """Return the `StopRequests` whose method this signal handler is, if it was asked to stop; otherwise None."""
    requests = getattr(handler, "__self__", None)
    return requests if isinstance(requests, StopRequests) and requests.seen else None


@contextmanager
def stops_handled_by(handler: Any) -> Iterator[dict[int, Any]]:
    """Handle the stop signals with `handler` until the context ends. Yield the handlers before it, by signal.

    Only the main thread can set handlers. In another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in filter(taken_over, STOP_SIGNALS)}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let the first request end the process, during a long wait in which nothing can be lost yet."""
    with stops_handled_by(signal.SIG_DFL) as before:
        # A request that came before this wait counts too.
        for number, handler in before.items():
            if _has_seen(handler):
                os.kill(os.getpid(), number)
        yield
