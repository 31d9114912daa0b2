"""Starts local ranks: torch's elastic launcher on a forkserver that has torch loaded, so that ranks start at once.

A rank that fails leaves its sentence in a file; when all are gone the launcher prints each distinct one once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwright.comm.process import quiet_torch, raise_file_limit
from meshwright.disk import mistake_of
from meshwright.errors import UserError, begin_line, notice
from meshwright.launch.processes import DEVICE, LOOPBACK, OWN_RUN, Place, find_place, interface_of, loopback
from meshwright.launch.rank_process import end_process, end_with_launcher, name_rank
from meshwright.launch.signals import (
    OF_TERMINALS,
    SAME_CTRL_C_S,
    STOP_SIGNALS,
    StopRequests,
    stops_handled_by,
    taken_over,
)
from meshwright.plugins import load_plugins, loaded_plugins
from meshwright.record.ending import LAUNCHER_SEES_S, report_losses_by

PRELOAD = [
    "meshwright.launch.fork_server", "torch._dynamo", "meshwright.run.pretrain", "meshwright.engine.providers",
    "meshwright.watch.live",
]  # fmt: skip

DEEPEST_TMPDIR = 64  # bytes: systems allow a socket's path some hundred, of which multiprocessing's names need 33
SHORT_TMPDIR = "/tmp"  # noqa: S108
SHUTDOWN_S = 5  # from SIGTERM to SIGKILL, for ranks that are stopped because another one failed
SERVER_GONE = 255  # what multiprocessing calls the exit code of a process whose server can't tell it any more


def warm_up() -> None:
    """Begins loading torch for the ranks while this process still checks the config.

    The server that forks them ignores requests to stop: a scheduler sends those to every process of a job, and without
    the server all ranks would look dead.
    """
    raise_file_limit()
    quiet_torch()
    multiprocessing.set_forkserver_preload(PRELOAD)
    _keep_sockets_short()
    with stops_handled_by(signal.SIG_IGN):
        multiprocessing.forkserver.ensure_running()


def _keep_sockets_short() -> None:
    """Has multiprocessing make its folder, in which the server's socket lies, elsewhere than in a TMPDIR that is too
    deep for the path of a socket."""
    if len(os.fsencode(tempfile.gettempdir())) > DEEPEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, SHORT_TMPDIR
        try:
            multiprocessing.util.get_temp_dir()
        except OSError as error:
            why = f"is too deep for the path of a socket, and {SHORT_TMPDIR} can't be used ({error.strerror})"
            raise UserError(f"TMPDIR={before} {why}: set TMPDIR to a shorter folder") from None
        finally:
            tempfile.tempdir = before


@dataclass(frozen=True)
class Team:
    """The ranks that one launcher starts at once, and where the launchers of all nodes meet: at `host`, on the socket
    `door` where this one is the first (None: a new one)."""

    ranks: int
    attempt: int = 0
    devices: tuple[int, ...] = ()  # of each rank, by its number on this machine; empty: in their order
    node: int = 0
    nodes: int = 1
    host: str = LOOPBACK
    port: int = 0
    door: int | None = None
    address: str = LOOPBACK  # of this node
    job: str = ""  # its name, for all nodes and attempts; empty: this launcher's
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = field(default_factory=loaded_plugins)  # that every rank imports


@dataclass(frozen=True)
class Outcome:
    """How a team ended: an exit code, why (empty if that was said already), and the rank on this machine that failed
    by itself, not since others did. `certain`: it was killed, which the loss of another rank does not do."""

    code: int
    why: str = ""
    failed: int | None = None
    certain: bool = False


def _rank(team: Team, folder: str, stops: bool, main: Callable[..., None], *args: object) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(team.attempt)  # torch's agent is a new one in each attempt
    os.environ.update(team.env)
    interface = interface_of(team.address) or (loopback() if team.nodes == 1 else None)
    if interface is not None:  # with several nodes, better the back ends' own choice than one that nobody reaches
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else by the machine's name, wherever
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # else any but loopback; =: this very name
    if team.devices:
        os.environ[DEVICE] = str(team.devices[int(os.environ["LOCAL_RANK"])])
    guarded(folder, stops, _with_plugins, team.plugins, main, *args)


def _with_plugins(plugins: tuple[str, ...], main: Callable[..., None], *args: object) -> None:
    """Run `main` of a rank after the plugins that its launcher has loaded: its arguments may hold a resolved config."""
    load_plugins(plugins)
    main(*args)


def guarded(folder: str | None, stops: bool, main: Callable[..., None], *args: object) -> None:
    """The body of a rank: a mistake is one sentence and exit code 2, a bug its traceback and 1. `stops`: it notes
    requests to stop and ends by itself; others are ended by the signal.

    The launcher's ranks leave it in `folder`; ranks of another launcher say it themselves. After an error a launched
    rank ends without the interpreter's own end, which would wait in torch for peers that are gone. All that must not
    be lost was written before: the contexts inside of `main` are closed, those of saves and loggers among them.
    """
    from meshwright.comm.group import CommError
    from meshwright.comm.watchdog import EXIT_CODE

    place = Path(folder) if folder else None
    at = find_place()
    if at.launched:
        end_with_launcher(place / LIFELINE if place else None)
        name_rank(at.rank, at.world)
    if place is not None:
        report_losses_by(lambda text: _report(place, "weak", text))
    try:
        _run_body(place, stops, at.rank == 0, main, *args)
    except UserError as error:
        _report(place, "mistake", str(error))
        code = 2
    except CommError as error:
        _report(place, "weak" if error.lost else "bug", str(error) if error.lost else traceback.format_exc())
        time.sleep(LAUNCHER_SEES_S if error.lost else 0.0)
        code = EXIT_CODE if error.lost else 1
    except SystemExit as error:
        if not error.code or not at.launched:
            raise
        if not isinstance(error.code, int):
            # The interpreter would print the text at its end, to which this process does not come.
            _report(place, "bug", str(error.code))
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        mistake = mistake_of(error) if isinstance(error, OSError) else None
        _report(place, "mistake" if mistake else "bug", str(mistake) if mistake else traceback.format_exc())
        code = 2 if mistake else 1
    else:
        return
    if at.launched:
        end_process(code)
    raise SystemExit(code)


def _run_body(place: Path | None, stops: bool, speaks: bool, main: Callable[..., None], *args: object) -> None:
    """Runs `main(*args)` with the handlers of a rank for requests to stop."""
    if not stops and threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP:  # a closed terminal is the launcher's business
                signal.signal(number, signal.SIG_DFL)  # the server that forked this process ignores them
    with StopRequests(signal.SIG_DFL, speaks=speaks) if stops else contextlib.nullcontext() as requests:
        if place is not None:
            (place / f"pid-{_me()}").write_text(str(os.getpid()))
            if requests is not None and (place / STOP).exists():
                requests.request(time.monotonic())
        main(*args)


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
    with launching(stops) as folder:
        for attempt in range(restarts + 1):
            ended = attempt_of(Team(ranks, attempt), folder, stops, main, args)
            if is_final(ended.code) or attempt == restarts:
                break
            said, again = in_short(ended), f"restart {attempt + 1} of {restarts}, from the newest checkpoint"
            notice(f"{said}; all ranks start again ({again})")
            tell("restart", f"{said}; {again}")
    return conclude(ended, loses, tell)


@contextlib.contextmanager
def launching(stops: bool) -> Iterator[Path]:
    """A folder in which teams of ranks may be started one after the other."""
    warm_up()
    _register_meeting()
    with tempfile.TemporaryDirectory(prefix=OWN_RUN) as folder, _held_open(Path(folder) / LIFELINE):
        with _passing_on(Path(folder)) if stops else contextlib.nullcontext():
            yield Path(folder)


def is_final(code: int) -> bool:
    """Whether no further start would mend it: all is well, or a mistake, or the launcher was stopped."""
    return code in (0, 2) or code > 128


def in_short(ended: Outcome) -> str:
    who, bug, _ = ended.why.partition("Traceback")
    return f"{who}{ended.why.splitlines()[-1]}" if bug else ended.why or "the ranks hung"


def conclude(
    ended: Outcome, loses: Callable[[], str] | None, tell: Callable[[str, str], None] = lambda kind, text: None
) -> int:
    """Says why a run ended, if not well; the exit code."""
    why = loses() if ended.code == 128 + signal.SIGINT and loses else ended.why
    if why:
        print(f"meshwright: {why}", file=sys.stderr)
    if ended.code:
        kind = {2: "refusal", 128 + signal.SIGINT: "end"}.get(ended.code, "failure")
        tell(kind, why.splitlines()[-1] if why else "the ranks hung")
    return ended.code


def attempt_of(team: Team, folder: Path, stops: bool, main: Callable[..., None], args: tuple[object, ...]) -> Outcome:
    """Runs this launcher's ranks once."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from meshwright.comm.lost_ranks import leave_errors_to_us

    _silence_torch()
    leave_errors_to_us(os.environ)  # torch's agent gives its ranks what it finds here, else a default of its own
    signals = "SIGQUIT" if stops else "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
    options: dict[str, Any] = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # torch 2.11 has fewer
    meeting = {"node": team.node, "nodes": team.nodes, "door": team.door}
    config = LaunchConfig(
        min_nodes=team.nodes, max_nodes=team.nodes, nproc_per_node=team.ranks, rdzv_backend=MEETING,
        rdzv_endpoint=f"{team.host}:{team.port}", rdzv_configs=meeting, run_id=team.job or folder.name, max_restarts=0,
        start_method="forkserver", local_addr=team.address, logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        **{k: v for k, v in options.items() if k in known},
    )  # fmt: skip
    try:
        elastic_launch(config, _rank)(team, str(folder), stops, main, *args)
    except ChildFailedError as error:
        _show_cursor()
        if error.get_first_failure()[1].exitcode < 0:
            begin_line()
        return _failed(folder, error)
    except SignalException as error:
        _show_cursor()
        begin_line()
        return Outcome(128 + int(error.sigval), f"stopped by {signal.Signals(error.sigval).name}")
    except DistError as error:
        if team.nodes == 1:
            raise
        why = str(error).splitlines()[0]
        return Outcome(1, f"the {team.nodes} nodes did not meet at {team.host}:{team.port} ({why})")
    return Outcome(0)


def _silence_torch() -> None:
    """We say ourselves who failed, and why. torch gives each of its loggers a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


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


MEETING = "meshwright"  # the name of our rendezvous
MEETING_S = 60  # within which the launchers of all nodes must have met


def _register_meeting() -> None:
    """The ranks' store listens on one address alone, that of this machine's loopback if there is one node. (torch's own
    would listen on every interface, and its dynamic rendezvous unpickles what it finds there.)"""
    from torch.distributed import TCPStore
    from torch.distributed.elastic import rendezvous
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class Meeting(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return MEETING

    def handler(given: rendezvous.RendezvousParameters) -> rendezvous.RendezvousHandler:
        node, nodes, door = (given.config[key] for key in ("node", "nodes", "door"))
        host, _, port = given.endpoint.rpartition(":")
        limit = timedelta(seconds=MEETING_S)
        if node == 0:
            server = socket.create_server((host, int(port))) if door is None else socket.socket(fileno=door)
            port = server.getsockname()[1]
            options: dict[str, Any] = {"is_master": True, "master_listen_fd": server.detach()}
        else:
            options = {"is_master": False}
        meeting = Meeting(host, int(port), node, nodes, given.run_id, MEETING_S)
        meeting._store = TCPStore(host, int(port), wait_for_workers=False, timeout=limit, **options)
        return meeting

    with contextlib.suppress(ValueError):  # registered by an earlier launch of this process
        rendezvous.rendezvous_handler_registry.register(MEETING, handler)


def signal_ranks(folder: Path, number: int) -> None:
    """Sends a signal to the ranks of the last attempt."""
    for pid in _reports(folder, "pid").values():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or its number is about to be written
            os.kill(int(pid), number)


@contextlib.contextmanager
def _passing_on(folder: Path) -> Iterator[None]:
    """Passes requests to stop on to the ranks, whose numbers they leave in `folder`; a second Ctrl-C ends them."""
    interrupted = 0.0

    def pass_on(number: int, frame: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        nonlocal interrupted
        if number == signal.SIGINT:
            if interrupted and time.monotonic() - interrupted > SAME_CTRL_C_S:
                signal_ranks(folder, signal.SIGKILL)
                raise SignalException("a second Ctrl-C", signal.SIGINT)
            interrupted = interrupted or time.monotonic()
        with contextlib.suppress(OSError):
            (folder / STOP).touch()
        # The ranks leave those of terminals to the launcher.
        signal_ranks(folder, signal.SIGTERM if number in OF_TERMINALS else number)

    before = {number: signal.signal(number, pass_on) for number in filter(taken_over, STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(folder: Path, error: object) -> Outcome:
    """Returns the exit code (2 if a user's mistake stopped the run, 75 if ranks lost others, else 1) and why."""
    from meshwright.comm.watchdog import EXIT_CODE

    rank, first = error.get_first_failure()  # type: ignore[attr-defined]
    bugs, mistakes, weak = (_reports(folder, kind) for kind in ("bug", "mistake", "weak"))
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        why = " (a file that it had mapped could not be read or written: look at the disk)" if name == "SIGBUS" else ""
        alone = rank not in weak and not _ended_by_torch(first.exitcode)
        said = f"rank {rank} was killed by {name}{why}; the other ranks were stopped"
        return Outcome(1, said, first.local_rank if alone else None, alone)
    told = mistakes or bugs or dict([*weak.items()][:1])
    if first.exitcode == EXIT_CODE and not told:  # the watchdog has said what hung
        return Outcome(EXIT_CODE)
    said = _distinct(told)
    if not told:
        server = ", or the process that it was forked from was killed" * (first.exitcode == SERVER_GONE)
        said = f"rank {rank} ended with exit code {first.exitcode}{server}"
    code = EXIT_CODE if first.exitcode == EXIT_CODE else 1
    alone = rank in bugs or not told
    return Outcome(2 if first.exitcode == 2 or mistakes else code, said, first.local_rank if alone else None)


def _distinct(told: Mapping[int, str]) -> str:
    """Returns the reports of ranks, each distinct one once, with the ranks that it came from."""
    said = []
    for text in dict.fromkeys(told.values()):
        ranks = ", ".join(str(rank) for rank, other in told.items() if other == text)
        where = f"rank {ranks}: " if len(told) > 1 or "Traceback" in text else ""
        said.append(f"{where}{text}")
    return "\nmeshwright: ".join(said)


def _ended_by_torch(exit_code: int) -> bool:
    """Return True if torch may have aborted the rank because its peers were gone. NCCL's watchdog uses SIGABRT."""
    from meshwright.device import accelerator_count

    return exit_code == -signal.SIGABRT and accelerator_count() > 0


def place_in_launcher(nproc: int | None) -> Place | None:
    """Returns this process's place if torchrun or srun started it."""
    place = find_place()
    if place.launched and nproc is not None:
        raise UserError("--nproc starts ranks, and this process is already one rank of a launcher: leave it out")
    return place if place.launched else None


def run_as_rank(
    place: Place, prepare: Callable[[Place], None], main: Callable[..., None], args: object, stops: bool
) -> int:
    """Runs as one rank started by torchrun or srun. A mistake that `prepare` finds is the same on every rank, so one
    rank per machine reports it."""
    quiet_torch()
    try:
        prepare(place)
    except UserError:
        if place.local_rank == 0:
            raise
        return 2
    guarded(None, stops, main, args)
    return 0


def start(
    ranks: int,
    main: Callable[..., None],
    args: object,
    restarts: int = 0,
    stops: bool = False,
    loses: Callable[[], str] | None = None,
    tell: Callable[[str, str], None] = lambda kind, text: None,
) -> int:
    """Runs on local ranks; one rank alone, if it need not be started again, is this process. `loses` says what is lost
    when a second Ctrl-C ends it; `tell` hears of restarts and failures."""
    if ranks > 1 or restarts:
        return launch(ranks, restarts, main, args, stops=stops, loses=loses, tell=tell)
    try:
        main(args)
    except KeyboardInterrupt:
        if loses is None:
            raise
        print(f"meshwright: {loses()}", file=sys.stderr)
        return 130
    return 0


def local_devices(kind: str, least: int) -> int:
    if kind == "cpu":
        return least
    from meshwright.device import accelerator_count

    return max(least, accelerator_count())
