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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.train.processes import OWN_RUN
from meshwright.train.signals import STOP_SIGNALS, StopRequests, stops_handled_by

PRELOAD = ["torch._dynamo", "meshwright.train.pretrain", "meshwright.train.gpt", "meshwright.show.live"]

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


def guarded(folder: str | None, stops: bool, main: Callable[..., None], *args: object) -> None:
    """The body of a rank: a mistake is one sentence and exit code 2, a bug its traceback and 1. `stops`: it notes
    requests to stop and ends by itself; others are ended by the signal.

    The launcher's ranks leave it in `folder`; ranks of another launcher say it themselves. A mistake is not mended by
    starting again, so ranks that are end at once.
    """
    from meshwright.comm.group import CommError

    place = Path(folder) if folder else None
    try:
        if not stops and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)  # the server that forked this process ignores them
        with StopRequests(signal.SIG_DFL) if stops else contextlib.nullcontext() as requests:
            if place is not None:
                (place / f"pid-{_me()}").write_text(str(os.getpid()))
                if requests is not None and (place / STOP).exists():
                    requests.request()
                if _reports(place, "mistake"):
                    raise SystemExit(2)
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
    """Texts of this kind by rank, of the last attempt (of any one for a mistake: no later one does anything)."""
    names = [path.name.split("-") for path in folder.glob("*-*-*")]
    last = max((int(attempt) for what, attempt, _ in names if what == "pid"), default=0)
    wanted = [(int(n), a) for what, a, n in names if what == kind and (int(a) == last or kind == "mistake")]
    return {rank: (folder / f"{kind}-{attempt}-{rank}").read_text(encoding="utf-8") for rank, attempt in sorted(wanted)}


def launch(ranks: int, restarts: int, main: Callable[..., None], *args: object, stops: bool = False) -> int:
    """Runs `main(*args)` on `ranks` local ranks and returns the exit code.

    When a rank dies all are started again, at most `restarts` times. With `stops`, a request to stop (SIGTERM, SIGUSR1)
    is passed on to the ranks, which save and end by themselves; without, it ends them.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    warm_up()
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # we say ourselves who failed, and why
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix=OWN_RUN) as folder:
        signals = "SIGINT,SIGHUP,SIGQUIT" if stops else "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
        options: dict[str, Any] = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}
        known = {field.name for field in dataclasses.fields(LaunchConfig)}  # torch 2.11 has fewer
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="loopback", rdzv_endpoint="127.0.0.1:0",
            run_id=Path(folder).name, max_restarts=restarts, start_method="forkserver", local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=folder), **{k: v for k, v in options.items() if k in known},
        )  # fmt: skip
        _meet_on_loopback()
        if stops:
            _pass_on_stop_requests(Path(folder))
        try:
            elastic_launch(config, guarded)(folder, stops, main, *args)
        except ChildFailedError as error:
            _show_cursor()
            return _failed(Path(folder), error)
        except SignalException as error:
            _show_cursor()
            print(f"meshwright: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return 128 + int(error.sigval)
    return 0


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


def _pass_on_stop_requests(folder: Path) -> None:
    """To the ranks, whose numbers they leave in `folder`. A rank that has ended is passed over."""

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            (folder / STOP).touch()
        for pid in _reports(folder, "pid").values():
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid), number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)


def _failed(folder: Path, error: object) -> int:
    """Prints why; 2 if a user's mistake stopped the run, else 1."""
    from meshwright.comm.watchdog import EXIT_CODE

    first = error.get_first_failure()[1]  # type: ignore[attr-defined]
    if first.exitcode == EXIT_CODE:  # the watchdog has said what hung
        return EXIT_CODE
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        why = " (a file that it had mapped could not be read or written: look at the disk)" if name == "SIGBUS" else ""
        said = f"meshwright: rank {first.local_rank} was killed by {name}{why}; the other ranks were stopped"
        print(said, file=sys.stderr)
        return 1
    told = _reports(folder, "mistake") or _reports(folder, "bug") or dict([*_reports(folder, "weak").items()][:1])
    for text in dict.fromkeys(told.values()):
        ranks = ", ".join(str(rank) for rank, said in told.items() if said == text)
        where = f"rank {ranks}: " if len(told) > 1 or "Traceback" in text else ""
        print(f"meshwright: {where}{text}", file=sys.stderr)
    if not told:
        print(f"meshwright: rank {first.local_rank} ended with exit code {first.exitcode}", file=sys.stderr)
    return first.exitcode if first.exitcode in (1, 2) else 1
