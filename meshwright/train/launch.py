"""Starts local ranks: torch's elastic launcher on a forkserver that has torch loaded, so that ranks start at once.

A rank that fails leaves its sentence in a file; when all are gone the launcher prints each distinct one once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import UserError, notice
from meshwright.train.processes import OWN_RUN, find_place
from meshwright.train.rank_process import end_with_launcher, name_rank
from meshwright.train.signals import (
    OF_TERMINALS,
    SAME_CTRL_C_S,
    STOP_SIGNALS,
    StopRequests,
    stops_handled_by,
    taken_over,
)

PRELOAD = [
    "meshwright.train.fork_server", "torch._dynamo", "meshwright.train.pretrain", "meshwright.train.gpt",
    "meshwright.show.live",
]  # fmt: skip

SHUTDOWN_S = 5  # from SIGTERM to SIGKILL, for ranks that are stopped because another one failed
GRACE = 2.0  # a rank that lost its peers waits so long before it ends, so that the launcher sees first who was lost


def warm_up() -> None:
    """Begins loading torch for the ranks while this process still checks the config.

    The server that forks them ignores requests to stop: a scheduler sends those to every process of a job, and without
    the server all ranks would look dead.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    with stops_handled_by(signal.SIG_IGN):
        multiprocessing.forkserver.ensure_running()


def _rank(attempt: int, folder: str, stops: bool, main: Callable[..., None], *args: object) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # torch's agent is a new one in each attempt
    guarded(folder, stops, main, *args)


def guarded(folder: str | None, stops: bool, main: Callable[..., None], *args: object) -> None:
    """The body of a rank: a mistake is one sentence and exit code 2, a bug its traceback and 1. `stops`: it notes
    requests to stop and ends by itself; others are ended by the signal.

    The launcher's ranks leave it in `folder`; ranks of another launcher say it themselves.
    """
    from meshwright.comm.group import CommError

    place = Path(folder) if folder else None
    at = find_place()
    if at.launched:
        end_with_launcher(place / LIFELINE if place else None)
        name_rank(at.rank, at.world)
    try:
        if not stops and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if number != signal.SIGHUP:  # a closed terminal is the launcher's business
                    signal.signal(number, signal.SIG_DFL)  # the server that forked this process ignores them
        with StopRequests(signal.SIG_DFL, speaks=at.rank == 0) if stops else contextlib.nullcontext() as requests:
            if place is not None:
                (place / f"pid-{_me()}").write_text(str(os.getpid()))
                if requests is not None and (place / STOP).exists():
                    requests.request()
            main(*args)
    except UserError as error:
        _report(place, "mistake", str(error))
        raise SystemExit(2) from None
    except CommError as error:
        _report(place, "weak", str(error))
        time.sleep(GRACE)
        raise SystemExit(1) from None
    except Exception:
        _report(place, "bug", traceback.format_exc())
        raise SystemExit(1) from None


LIFELINE = "launcher"  # a FIFO that only the launcher holds open for writing
STOP = "stop"  # the launcher leaves this file where it was asked to stop, for ranks that start later


def _me() -> str:
    """This rank in this attempt, as its files are called: what an earlier attempt left is told apart."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ.get('RANK', '0')}"


def _report(folder: Path | None, kind: str, text: str) -> None:
    """Weak reports follow from another rank's failure and count only if nothing else is known."""
    if folder:
        (folder / f"{kind}-{_me()}").write_text(text, encoding="utf-8")
    else:
        print(f"meshwright: rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)


def _reports(folder: Path, kind: str) -> dict[int, str]:
    """Texts of this kind by rank, of the last attempt."""
    names = [path.name.split("-") for path in folder.glob("*-*-*")]
    last = max((int(attempt) for what, attempt, _ in names if what == "pid"), default=0)
    wanted = [(int(n), a) for what, a, n in names if what == kind and int(a) == last]
    return {rank: (folder / f"{kind}-{attempt}-{rank}").read_text(encoding="utf-8") for rank, attempt in sorted(wanted)}


def launch(
    ranks: int,
    restarts: int,
    main: Callable[..., None],
    *args: object,
    stops: bool = False,
    loses: Callable[[], str] | None = None,
    tell: Callable[[str, str], None] = lambda kind, text: None,
) -> int:
    """Runs `main(*args)` on `ranks` local ranks and returns the exit code.

    When a rank dies all are started again, at most `restarts` times; a mistake is not mended by that. With `stops`, a
    request to stop is passed on to the ranks, which save and end by themselves; without, it ends them. A second Ctrl-C
    always does, and `loses` says what is lost by it. `tell` hears of restarts and of the failure that ends it all.
    """
    warm_up()
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we say ourselves who failed, and why
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _meet_on_loopback()
    with tempfile.TemporaryDirectory(prefix=OWN_RUN) as folder, _held_open(Path(folder) / LIFELINE):
        with _passing_on(Path(folder)) if stops else contextlib.nullcontext():
            for attempt in range(restarts + 1):
                code, why = _attempt(ranks, attempt, Path(folder), stops, main, args)
                if code in (0, 2) or code > 128 or attempt == restarts:
                    break
                who, bug, _ = why.partition("Traceback")
                said = f"{who}{why.splitlines()[-1]}" if bug else why or "the ranks hung"
                again = f"restart {attempt + 1} of {restarts}, from the newest checkpoint"
                notice(f"{said}; all ranks start again ({again})")
                tell("restart", f"{said}; {again}")
        if code == 128 + signal.SIGINT and loses:
            why = loses()
        if why:
            print(f"meshwright: {why}", file=sys.stderr)
        if code:
            tell("failure", why.splitlines()[-1] if why else "the ranks hung")
    return code


def _attempt(
    ranks: int, attempt: int, folder: Path, stops: bool, main: Callable[..., None], args: tuple[object, ...]
) -> tuple[int, str]:
    """Runs the ranks once; the exit code, and why they did not end well (empty if that was said already)."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    signals = "SIGQUIT" if stops else "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
    options: dict[str, Any] = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # torch 2.11 has fewer
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="loopback", rdzv_endpoint="127.0.0.1:0",
        run_id=folder.name, max_restarts=0, start_method="forkserver", local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)), **{k: v for k, v in options.items() if k in known},
    )  # fmt: skip
    try:
        elastic_launch(config, _rank)(attempt, str(folder), stops, main, *args)
    except ChildFailedError as error:
        _show_cursor()
        return _failed(folder, error)
    except SignalException as error:
        _show_cursor()
        return 128 + int(error.sigval), f"stopped by {signal.Signals(error.sigval).name}"
    return 0, ""


@contextlib.contextmanager
def _held_open(fifo: Path) -> Iterator[None]:
    """While this process lives, the ranks, which read, find the other end of the FIFO open."""
    os.mkfifo(fifo)
    handle = os.open(fifo, os.O_RDWR)  # for writing alone it would wait for a reader
    try:
        yield
    finally:
        os.close(handle)


def _show_cursor() -> None:
    """A rank that was killed could not give the terminal its cursor back, which the live display hides."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        print("\x1b[?25h", end="", file=sys.stderr, flush=True)


def _meet_on_loopback() -> None:
    """The ranks' store listens on this machine alone. (torch's own would listen on every interface, and its dynamic
    rendezvous unpickles what it finds there.)"""
    from torch.distributed import TCPStore
    from torch.distributed.elastic import rendezvous
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class Loopback(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return "loopback"

    def handler(given: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
        server = socket.create_server(("127.0.0.1", 0))
        host, port = server.getsockname()
        meeting = Loopback(host, port, 0, 1, given.run_id, 900)
        meeting._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        return meeting

    with contextlib.suppress(ValueError):  # registered by an earlier launch of this process
        rendezvous.rendezvous_handler_registry.register("loopback", handler)


@contextlib.contextmanager
def _passing_on(folder: Path) -> Iterator[None]:
    """Passes requests to stop on to the ranks, whose numbers they leave in `folder`; a second Ctrl-C ends them."""
    interrupted = 0.0

    def kill(number: int) -> None:
        for pid in _reports(folder, "pid").values():
            with contextlib.suppress(OSError, ValueError):  # it has ended, or its number is about to be written
                os.kill(int(pid), number)

    def pass_on(number: int, frame: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        nonlocal interrupted
        if number == signal.SIGINT:
            if interrupted and time.monotonic() - interrupted > SAME_CTRL_C_S:
                kill(signal.SIGKILL)
                raise SignalException("a second Ctrl-C", signal.SIGINT)
            interrupted = interrupted or time.monotonic()
        with contextlib.suppress(OSError):
            (folder / STOP).touch()
        kill(signal.SIGTERM if number in OF_TERMINALS else number)  # the ranks leave those to the launcher

    before = {number: signal.signal(number, pass_on) for number in filter(taken_over, STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(folder: Path, error: object) -> tuple[int, str]:
    """The exit code, 2 if a user's mistake stopped the run, else 1; and why."""
    from meshwright.comm.watchdog import EXIT_CODE

    first = error.get_first_failure()[1]  # type: ignore[attr-defined]
    if first.exitcode == EXIT_CODE:  # the watchdog has said what hung
        return EXIT_CODE, ""
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        why = " (a file that it had mapped could not be read or written: look at the disk)" if name == "SIGBUS" else ""
        return 1, f"rank {first.local_rank} was killed by {name}{why}; the other ranks were stopped"
    told = _reports(folder, "mistake") or _reports(folder, "bug") or dict([*_reports(folder, "weak").items()][:1])
    said = []
    for text in dict.fromkeys(told.values()):
        ranks = ", ".join(str(rank) for rank, other in told.items() if other == text)
        where = f"rank {ranks}: " if len(told) > 1 or "Traceback" in text else ""
        said.append(f"{where}{text}")
    if not told:
        said.append(f"rank {first.local_rank} ended with exit code {first.exitcode}")
    return 2 if first.exitcode == 2 or _reports(folder, "mistake") else 1, "\nmeshwright: ".join(said)
