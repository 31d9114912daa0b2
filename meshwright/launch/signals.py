"""A request to stop asks for a checkpoint and a clean end after the step under way: SIGTERM or SIGUSR1 of a scheduler,
Ctrl-C (SIGINT), a terminal that is closed (SIGHUP). A second Ctrl-C ends at once."""

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
OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)  # who starts a process may have it ignore these, as nohup does

# A scheduler may signal a launcher and its ranks, and the launcher passes it on: within so many seconds all are one.
SAME_REQUEST_S = 5.0
# A terminal sends Ctrl-C once to each process, so a second one is the user's. A wrapper that passes on what all got
# already does so soon, also on a busy machine; a user who is quicker than that has to press once more.
SAME_CTRL_C_S = 0.2
BLOCKED_S = 1.0  # a main thread that has not handled a signal by then is waiting for something that may never come


def taken_over(number: int) -> bool:
    """Whether a process that stops on request has this signal to itself, or was started to ignore it."""
    return number not in OF_TERMINALS or signal.getsignal(number) is not signal.SIG_IGN


class StopRequests:
    """While entered, `seen` says whether one of the signals has come, to this one or an outer one. One that comes later
    than the first request ends the process as usual, also while it waits for a peer and handles nothing."""

    handled = 0.0  # when the main thread of this process last handled a request
    second = 0  # a Ctrl-C that came before the main thread has handled the first one: Python tells it of one

    def __init__(
        self, after: Any = None, speaks: bool = False, launched: bool = True, loses: Callable[[], str] | None = None
    ) -> None:
        """`after`: how the signals are handled when this is left (None: as before). `speaks`: it tells of the first
        request. `launched`: a launcher sends Ctrl-C too; otherwise a second one is the user's, and raises
        KeyboardInterrupt, or says what is lost (`loses`) and ends a process that handles nothing."""
        self._seen = False
        self._since: float | None = None  # when the first signal came; the end of a time limit is none
        self._after, self._speaks, self._launched, self._loses = after, speaks, launched, loses
        self._before: dict[int, Any] = {}
        self._bell: tuple[socket.socket, socket.socket] | None = None

    @property
    def seen(self) -> bool:
        return self._seen

    def request(self, signalled: float | None = None) -> None:
        """Asks to stop; `signalled`: when a signal asked for it, if one did."""
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
        """Whether a signal is a request of its own, not the first one passed on."""
        mine = number == signal.SIGINT and not self._launched
        return now - since > (SAME_CTRL_C_S if mine else SAME_REQUEST_S)

    def _listen(self) -> None:
        """Python calls `_note` between two of its own instructions only; a byte is written at once."""
        before = signal.set_wakeup_fd(-1)
        if before != -1:  # an outer one listens already
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            return
        bell = self._bell = socket.socketpair()
        bell[1].setblocking(False)
        signal.set_wakeup_fd(bell[1].fileno(), warn_on_full_buffer=False)

        def forked() -> None:
            """A child inherits where signals ring, and its own must not ring for its parent."""
            if self._bell is bell:
                with suppress(ValueError):  # not forked by the main thread
                    signal.set_wakeup_fd(-1)

        os.register_at_fork(after_in_child=forked)
        threading.Thread(target=self._hear, args=(bell[0],), name="stop requests", daemon=True).start()

    def _hear(self, end: socket.socket) -> None:
        first: float | None = None
        while heard := end.recv(1):
            number, now = heard[0], time.monotonic()
            if number not in STOP_SIGNALS:
                continue
            if first is None:
                first = now
                if self._speaks:
                    begin_line()
                    notice("asked to stop: saves after this step (Ctrl-C again stops at once, and saves nothing)")
            elif self._is_again(number, first, now):
                mine, unhandled = number == signal.SIGINT and not self._launched, StopRequests.handled < first
                StopRequests.second = number if mine and unhandled and self._bell is not None else 0
                time.sleep(BLOCKED_S)
                if StopRequests.handled < now - BLOCKED_S:
                    if self._loses:
                        notice(self._loses())
                    os._exit(128 + number)
                if StopRequests.second and self._bell is not None:
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
        end.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        StopRequests.handled = time.monotonic()
        again, StopRequests.second = StopRequests.second == number, 0
        if again or (self._since is not None and self._is_again(number, self._since, time.monotonic())):
            if number == signal.SIGINT and not self._launched:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.request(time.monotonic())

    def __exit__(self, *error: object) -> None:
        if self._bell is not None:
            signal.set_wakeup_fd(-1)
            self._bell[1].close()  # the other end hears that, and ends
            self._bell, StopRequests.second = None, 0
        for number, before in self._before.items():
            signal.signal(number, before if self._after is None else self._after)


def _has_seen(handler: Any) -> StopRequests | None:
    """The `StopRequests` of which this is the handler of the signals, if it was asked to stop."""
    requests = getattr(handler, "__self__", None)
    return requests if isinstance(requests, StopRequests) and requests.seen else None


@contextmanager
def stops_handled_by(handler: Any) -> Iterator[dict[int, Any]]:
    """Meanwhile the signals have this handler, in the main thread, which alone can set it; gives those before it."""
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
    """Where nothing can be lost yet and a wait may be long, the first request ends the process."""
    with stops_handled_by(signal.SIG_DFL) as before:
        for number, handler in before.items():
            if _has_seen(handler):
                os.kill(os.getpid(), number)
        yield
