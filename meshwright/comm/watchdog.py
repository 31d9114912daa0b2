"""The watchdog: turns a hang into one message that names the call and the ranks that did not arrive, and ends the run.

Each rank runs two threads. The *timer* only reads this rank's flight record, so nothing can hold it up. Only the
*listener* talks to the store, because a store that does not answer blocks its caller for ever. It has a separate
connection: on torch's, a request that waits, e.g. for a peer of a new communicator, would hold up the listener.

When a call has held up the program longer than `timeout`, the first rank to notice raises the alarm in the store. Every
rank that receives it publishes its state. The first rank reads the states it needs and writes the message, then all end
with EXIT_CODE. If the store is silent, each waiting rank reports its local knowledge. Only JSON goes through the store.
A failed call, or a process group that reports an error, raises the same alarm at once: a rank is lost, and the message
names the one that does not answer (`lost_ranks.py`).

A rank that compiles is late and not lost, however long it takes. It signals this in the store at every look, and the
others count their time from the last such sign. The signs stop when the rank dies or is stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from meshwright.comm.flight import RecordedCall
from meshwright.comm.group import CommError
from meshwright.comm.hang import State, explain
from meshwright.comm.lost_ranks import ErrorPoll, describe_lost_ranks, record_presence
from meshwright.comm.mesh import COMPILING_S, Mesh
from meshwright.device import Device
from meshwright.errors import notice
from meshwright.record.ending import LAUNCHER_SEES_S, act_before_end, report_loss

EXIT_CODE = 75  # "Temporary failure" in sysexits.h: the same job may succeed if it is started again.
# The number of last calls that a rank publishes in the store, in addition to those around the stuck one. Its file holds
# more.
PUBLISHED_CALLS = 8
# One counter in the store carries both kinds of signals, so that a listener makes one request per look. It grows by one
# with every sign of a rank that compiles, and by ALARM with an alarm.
ALARM = 1 << 40
# Value of the key `told` after a hang, whose message was already printed. After a loss the value is the message.
HANG_REPORTED = "1"
# The longest time that the rank whose process hosts the store waits for the others to disconnect.
STORE_LINGER_S = 30.0
# The longest time that a rank waits for its files before it ends. A lost network disk may block a write for ever.
DISK_S = 5.0
# Longer than any report takes. After this additional time the process ends even if no Python thread runs.
BACKSTOP_S = 120.0

_NUMBERS = itertools.count()


def open_store(env: Mapping[str, str] = os.environ) -> Store | None:
    """Open a separate connection to the store at MASTER_ADDR:MASTER_PORT. Return None if it can't be reached."""
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        return None
    host = env["MASTER_ADDR"]
    port = int(env["MASTER_PORT"])
    limit = timedelta(seconds=30)
    try:
        # Try the port first: torch would retry again and again if no process listens there.
        socket.create_connection((host, port), limit.total_seconds()).close()
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (RuntimeError, OSError):
        return None
    # torchrun's store outlives a restart of the ranks, so each attempt has separate keys.
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', 'run')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"meshwright/{attempt}", store)


def store_keeper(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank whose process hosts the store of `open_store`, or None if the launcher hosts it."""
    return None if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


class Watchdog:
    """A watchdog over one rank: `with Watchdog(mesh, timeout, open_store(), device, folder=...):` around the run."""

    def __init__(
        self, mesh: Mesh, timeout: float, store: Store | None, device: Device, folder: Path | None = None,
        keeper: int | None = None,
    ) -> None:  # fmt: skip
        """Prepare the watchdog; entering it starts its threads.

        `device`: the device whose events mark the calls. It has no default, because the threads would then query the
        wrong device. `folder`: the folder for `rank-N.json` after an alarm. `keeper`: the rank whose process hosts the
        store.
        """
        self.device = device
        self.rank, self.world, self.flight = mesh.rank, mesh.layout.world, mesh.flight
        self.timeout, self.folder, self.keeper = timeout, folder, keeper
        # Each rank makes one request per interval, so the store gets about a thousand per second at most.
        self.interval = max(min(1.0, timeout / 10), self.world / 1000)
        self.grace = 2 * self.interval + 1.5
        self._worker = threading.get_ident()  # The thread whose stack is published.
        # Every rank makes its watchdogs in the same order, so their numbers agree.
        self._store = None if store is None else PrefixStore(f"watchdog/{next(_NUMBERS)}", store)
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._left = "it was finished"
        self._overdue: RecordedCall | None = None
        self._errors = ErrorPoll(lambda: list(mesh.groups.values()))
        self._broken: str | None = None  # The error of a process group that failed.
        self._heard = time.monotonic()  # The time of the store's last answer.
        # The number of signs of compiling ranks, and the time when the last one was received.
        self._signs, self._compiled = 0, -math.inf
        self._compiles = False  # True if this rank was compiling at the last look.
        self._excused: tuple[str, int] | None = None  # The call whose delay this rank has explained.
        self._asked: tuple[str, int] | None = None  # The group and number of the call for which the alarm was raised.
        self._error: BaseException | None = None
        self._store_gone = False
        self._answered = False  # True once this rank has answered an alarm in the store.
        self._alarmed, self._ending = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._writers: list[threading.Thread] = []  # File writers, each abandoned if the disk does not answer.

    def __enter__(self) -> Watchdog:
        if self.world == 1:
            return self
        bodies = {"timer": self._time} | ({"listener": self._listen} if self._store is not None else {})
        for name, body in bodies.items():
            thread = threading.Thread(target=body, name=f"meshwright-watchdog-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the watch. `error` is published, because the other ranks may ask later why this rank is gone."""
        if error is not None:
            self._left = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self._error = error
        self._stopping.set()
        self._wake.set()
        waits = STORE_LINGER_S + 1 if error is None and self.rank == self.keeper else 2.0
        for thread in self._threads:
            thread.join(waits)
            # After an alarm the error is only a consequence of the other ranks' end. Let the thread report the cause.
            if self._alarmed.is_set():
                thread.join(2 * self.grace + 4.0)
        # Only a store that does not answer can hold up a thread.
        silent = any(thread.is_alive() for thread in self._threads)
        if self._threads:
            faulthandler.cancel_dump_traceback_later()
        self._threads = []
        if isinstance(error, CommError):
            if error.lost and (silent or self._store_gone):
                self._end_alone(str(error))
            self._write_flight(self.state())
            self._finish_writes()

    def state(self) -> State:
        """Return the state that this rank publishes after an alarm. It omits rank lists that the other ranks already
        have: with thousands of ranks, sending them would take longer than a report may take."""
        frames = self._stack()
        held = self.flight.blocking_call()
        is_known = held is not None and (held.group, held.number) == self._asked
        return {
            "rank": self.rank,
            "numbers": self.flight.calls_begun(held),
            "holding": held.to_plain(with_ranks=not is_known) if held else None,
            "around": [call.to_plain(with_ranks=False) for call in self._around(held)],
            "compiling": is_compiling(),
            "at": next((where for where, ours in frames if ours), frames[0][0] if frames else None),
            "stack": [where for where, _ in frames],
            "last": [call.to_plain(with_ranks=False) for call in list(self.flight.last)[-PUBLISHED_CALLS:]],
        }

    def _around(self, held: RecordedCall | None) -> list[RecordedCall]:
        """Return the calls around the one that holds up this rank, and around the one that the alarm is about."""
        places = [(held.group, held.number)] if held else []
        if self._asked is not None and self._asked not in places:
            places.append(self._asked)
        return [call for place in places for call in self.flight.around(*place)]

    # The timer's thread.

    def _time(self) -> None:
        """Check this rank until a call is overdue or a process group fails, then let the listener end the run."""
        self.device.make_current()
        held: RecordedCall | None = None
        while (broken := self._errors.look()) is None and (held := self._overdue_call()) is None:
            self._arm_backstop()
            if self._stopping.wait(self._pause()):
                faulthandler.cancel_dump_traceback_later()
                return
        self._broken, self._overdue = broken, held
        self._wake.set()
        recent = time.monotonic() - self._heard < 3 * self.interval + 1.0
        if self._store is not None and (recent or self._answered):
            # The listener ends the process, unless the store keeps it waiting. A listener that answers an alarm also
            # waits for the message, which takes longer than other answers of the store.
            self._stopping.wait(2 * self.grace + 2.0)
        if self._stopping.is_set():
            return
        if broken is not None:
            self._end_alone(broken)
        elif held is not None:
            self._speak_alone(held)

    def _arm_backstop(self) -> None:
        """Arrange that the process ends, with all stacks on stderr, if this thread makes no progress for very long.

        `faulthandler` needs no Python thread for this. A thread that never releases the interpreter's lock would stop
        the watchdog's threads too.
        """
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.dump_traceback_later(3 * self.timeout + COMPILING_S + BACKSTOP_S, exit=True, file=2)

    def _overdue_call(self) -> RecordedCall | None:
        """Return a call that has held up the program for too long, or None. Each sign of a compiling rank restarts the
        time."""
        held = self.flight.blocking_call(self.timeout)
        now = time.monotonic()
        if held is None or held.since is None:
            return None
        excused = now - self._compiled < self.timeout and now - held.since < self.timeout + COMPILING_S
        return None if excused else held

    def _pause(self) -> float:
        """Return the seconds until the next look: one interval, or less if a call is about to be overdue."""
        oldest = min((c.since for c in list(self.flight.open.values()) if c.since is not None), default=None)
        left = self.interval if oldest is None else max(oldest, self._compiled) + self.timeout - time.monotonic()
        return min(self.interval, max(left, 0.02))

    # The listener's thread: everything that uses the store.

    def _listen(self) -> None:
        """Exchange signals with the other ranks until the run ends, and report its reason for leaving."""
        assert self._store is not None
        store = self._store
        try:
            self.device.make_current()
            while not self._stopping.is_set():
                self._wake.wait(self.interval)
                if self._broken is not None:
                    self._tell_loss(store, self._broken)
                elif self._overdue is not None:
                    self._raise_alarm(store, self._overdue)
                elif not self._stopping.is_set():
                    self._look(store)
            if (loss := self._loss()) is not None:
                self._tell_loss(store, loss)
            # Publish why this rank is gone. After a run without errors, the rank that hosts the store leaves last.
            store.set(f"state/{self.rank}", json.dumps({"rank": self.rank, "left": self._left}))
            record_presence(store, self.rank, self._left)
            self._leave(store, STORE_LINGER_S if self._error is None else 0.0)
        except RuntimeError:  # The store is gone, and with it the rank that hosted it.
            self._store_gone = True
            if self._broken is not None:
                self._end_alone(self._broken)
            if self._overdue is not None:
                self._speak_alone(self._overdue)

    def _look(self, store: Store) -> None:
        """Check the store for an alarm and for signs of compiling ranks, and add this rank's sign if it compiles."""
        began = self._compiles
        self._compiles = is_compiling()
        if self._compiles and not began:
            store.set("compiling", str(self.rank))
        signs = store.add("signs", int(self._compiles))
        self._heard = time.monotonic()
        if signs >= ALARM:
            self._answer(store)
        if signs > self._signs:
            self._signs, self._compiled = signs, self._heard
        if (
            self._compiled > self._heard - self.timeout
            and (held := self.flight.blocking_call(self.timeout)) is not None
        ):
            self._excuse(store, held)

    def _excuse(self, store: Store, held: RecordedCall) -> None:
        """Print once, on one of the ranks that wait in a call, that another rank compiles."""
        if (held.group, held.number) == self._excused:
            return
        self._excused = held.group, held.number
        if store.add(f"excused/{held.group}/{held.number}", 1) == 1:
            who = f"rank {store.get('compiling').decode()} is compiling"
            notice(f"{held.describe()} has waited for more than {self.timeout:g} s: {who}, so this is no hang")

    def _raise_alarm(self, store: Store, call: RecordedCall) -> None:
        """Raise the alarm for an overdue call and end the run with an explanation, unless another rank was first."""
        self._alarmed.set()
        # Another rank has raised the alarm before this one, so this rank only answers.
        if store.add("signs", ALARM) >= 2 * ALARM:
            self._answer(store)
            return
        self._asked = call.group, call.number
        store.set("alarm", json.dumps(self._asked))
        self._publish(store)
        deadline = time.monotonic() + self.grace

        @cache
        def ask(rank: int) -> State | None:
            """Return a rank's state, or None if it is not there by the deadline, which all ranks share."""
            while not store.check([f"state/{rank}"]):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(0.05)
            state: State = json.loads(store.get(f"state/{rank}"))
            return state

        self._end(explain(call.to_plain(), self.rank, self.timeout, ask), store)

    def _tell_loss(self, store: Store, what: str) -> None:
        """End the run because `what` failed. The first rank that notices asks all ranks, and names those that do not
        answer."""
        self._alarmed.set()
        if store.add("signs", ALARM) >= 2 * ALARM:
            self._answer(store)
            return
        begun = time.monotonic()
        store.set("alarm", json.dumps(None))  # The alarm is not about an overdue call.
        self._publish(store)
        message = f"{what}; {describe_lost_ranks(store, self.world, begun + self.grace)}"
        # Give the launcher time to notice which rank died before this one ends too.
        time.sleep(max(0.0, begun + LAUNCHER_SEES_S - time.monotonic()))
        self._end(message, store, lost=True)

    def _answer(self, store: Store) -> None:
        """Publish this rank's state, wait until the message is out (or the store is gone), and end the process."""
        self._alarmed.set()
        try:
            call = json.loads(store.get("alarm"))
            self._asked = None if call is None else (call[0], call[1])
            self._publish(store)
            self._answered = True
            store.wait(["told"], timedelta(seconds=2 * self.grace + 1.0))
            message = store.get("told").decode()
            if message != HANG_REPORTED:
                report_loss(message, speaks=False)
        except RuntimeError:
            self._store_gone = True
            if (loss := self._loss()) is not None:
                self._end_alone(loss)
            if self._overdue is not None:
                self._speak_alone(self._overdue)
            self._end(f"rank {self.rank} ends: another rank raised an alarm and did not say why")
        self._end(None, store)

    def _loss(self) -> str | None:
        """Return the reason to believe that another rank is lost, or None if there is none."""
        if self._broken is not None:
            return self._broken
        # A call that torch refused fails on a rank whose peers are all well.
        return str(self._error) if isinstance(self._error, CommError) and self._error.lost else None

    def _publish(self, store: Store) -> None:
        """Answer an alarm. Other ranks read the state only after a hang; after a loss it is enough that a rank
        answers."""
        try:
            state = self.state()
        # The main thread changes the data that is read here, and any answer is better than none.
        except Exception as error:
            state = {"rank": self.rank, "at": f"an unknown place ({type(error).__name__}: {error})"}
        if self._asked is not None:
            store.set(f"state/{self.rank}", json.dumps(state))
        record_presence(store, self.rank)
        store.add("answered", 1)
        self._write_flight(state)

    def _leave(self, store: Store, patience: float) -> None:
        """Count this rank as gone. The keeper of the store stays until all are gone, or for `patience` seconds."""
        gone = store.add("left", 1)
        deadline = time.monotonic() + patience
        while self.rank == self.keeper and gone < self.world and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = store.add("left", 0)

    def _leave_after_alarm(self, store: Store) -> None:
        """Count this rank as ended. The keeper of the store stays longer than the other ranks.

        It first stays until ranks outside the stuck call have received the alarm, then until every rank that answered
        has read the message. On a busy machine that takes longer, and they would mistake this rank for the dead one.
        """
        ended = store.add("ended", 1)
        begun = time.monotonic()
        while self.rank == self.keeper and ended < self.world:
            waited = time.monotonic() - begun
            all_read = waited >= self.interval + 0.5 and ended >= store.add("answered", 0)
            if all_read or waited >= self.interval + 0.5 + 2 * self.grace:
                return
            time.sleep(0.02)
            ended = store.add("ended", 0)

    # The end.

    def _speak_alone(self, call: RecordedCall) -> None:
        """End this rank with its local knowledge of an overdue call, because it can't ask the other ranks."""
        what = f"{call.describe()} of ranks {list(call.ranks)[:16]} did not end within {self.timeout:g} s"
        self._write_flight(self.state())
        self._end(f"{what} on rank {self.rank}; {self._store_silence()}")

    def _end_alone(self, what: str) -> None:
        """End this rank after a loss if it can't ask the other ranks."""
        self._write_flight(self.state())
        self._end(f"{what}; {self._store_silence()}", lost=True)

    def _store_silence(self) -> str:
        if self.keeper is not None and self.keeper != self.rank and self._store is not None:
            why = f"rank {self.keeper}, which keeps the ranks' store, does not answer (stopped or dead)"
        else:
            why = "there is no store that answers"
        return f"{why}, so the other ranks can't be asked"

    def _end(self, message: str | None, store: Store | None = None, lost: bool = False) -> None:
        """Print the message, pass it to the other ranks and end the process at once, because its main thread can't.

        Files come last, since the disk may not answer. `lost`: the message is about a loss, which the launcher may know
        more about.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(60.0)  # The other thread is ending the process.
        if message is not None and lost:
            report_loss(message, speaks=True)
        elif message is not None:
            where = "" if self.folder is None else f" (flight records in {self.folder})"
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"meshwright: {message}{where}\n")
                sys.stderr.flush()
            # Begin to write before the other ranks know that the message is out: once they end, a launcher ends this
            # rank too.
            self._write_message(message)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                if message is not None:
                    store.set("told", message if lost else HANG_REPORTED)
                self._leave_after_alarm(store)
        self._finish_writes()
        act_before_end()
        os._exit(EXIT_CODE)

    def _try_write(self, name: str, text: str) -> None:
        """Begin to write a file in the folder of flight records, in a thread that may block for ever."""
        folder = self.folder
        if folder is None:
            return

        def write() -> None:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")

        writer = threading.Thread(target=write, name=f"meshwright-{name}", daemon=True)
        with contextlib.suppress(RuntimeError):  # The interpreter is ending and starts no more threads.
            writer.start()
            self._writers.append(writer)

    def _finish_writes(self) -> None:
        """Wait until the files are written, for at most DISK_S seconds."""
        deadline = time.monotonic() + DISK_S
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))

    def _write_flight(self, state: State) -> None:
        """Begin to write the whole flight record to a file, for later study."""
        record = state | {
            "open": [call.to_plain() for call in list(self.flight.open.values())],
            "last": [call.to_plain() for call in list(self.flight.last)],
        }
        self._try_write(f"rank-{self.rank}.json", json.dumps(record, indent=1))

    def _write_message(self, message: str) -> None:
        """Begin to write the message next to the flight records, for tools that show the run later."""
        self._try_write("hang.json", json.dumps({"time": time.time(), "rank": self.rank, "text": message}))

    def _stack(self) -> list[tuple[str, bool]]:
        """Return the main thread's frames, innermost first: each as e.g. `data/dataset.py:120 sample`, and whether it
        is `_ours`."""
        frame = sys._current_frames().get(self._worker)
        walked = [] if frame is None else itertools.islice(traceback.walk_stack(frame), 32)
        places = [(at.f_code.co_filename, f"{line} {at.f_code.co_name}") for at, line in walked]
        return [(f"{_short(file)}:{place}", _ours(file)) for file, place in places]


def watchdog_for(
    mesh: Mesh, timeout: float, device: Device, own_world: bool = True, folder: Path | None = None
) -> Watchdog:
    """Return the watchdog of a program, to be entered around all its calls. `own_world`: Meshwright set up
    torch.distributed itself, so rank 0 may be the rank that hosts the store."""
    store = open_store() if mesh.layout.world > 1 else None
    return Watchdog(mesh, timeout, store, device, folder, store_keeper() if own_world else None)


# Files of torch that have a frame on the stack while it compiles, but not while compiled code runs.
_COMPILER = tuple(
    os.path.join("torch", *name) for name in
    (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"), ("_inductor", "async_compile.py"))
)  # fmt: skip


def is_compiling() -> bool:
    """Return True if torch is compiling in any thread of this process. Backward is compiled in autograd's threads."""
    return any(
        frame.f_code.co_filename.endswith(_COMPILER)
        for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top)
    )  # fmt: skip


_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARIES = (str(Path(torch.__file__).resolve().parent.parent) + os.sep, os.path.dirname(os.__file__) + os.sep)


def _ours(path: str) -> bool:
    """Return True if a file belongs to this package or to the user, not to Python or an installed library."""
    return path.startswith(_PACKAGE) or not (path.startswith(_LIBRARIES) or path.startswith("<"))


def _short(path: str) -> str:
    return path[len(_PACKAGE) :] if path.startswith(_PACKAGE) else os.sep.join(path.split(os.sep)[-2:])
