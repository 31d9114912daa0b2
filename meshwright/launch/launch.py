"""Starts local ranks with torch's elastic launcher, on a fork server that has loaded torch so that ranks start at once.

A rank that fails writes its error into a file. When all ranks have ended, the launcher prints each distinct error once.
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
from meshwright.launch.processes import DEVICE, LOOPBACK, OWN_RUN, ProcessPlace, find_place, interface_of, loopback
from meshwright.launch.rank_process import end_process, end_with_launcher, name_rank
from meshwright.launch.signals import (
    SAME_CTRL_C_S,
    STOP_SIGNALS,
    TERMINAL_SIGNALS,
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

# Systems limit a socket's path to about 100 bytes, and multiprocessing's names need 33 of them.
DEEPEST_TMPDIR = 64
SHORT_TMPDIR = "/tmp"  # noqa: S108
SHUTDOWN_S = 5  # From SIGTERM to SIGKILL, for ranks that are stopped because another one failed.
SERVER_GONE = 255  # multiprocessing's exit code for a process whose fork server died before reporting the real one.


def warm_up() -> None:
    """Begin loading torch for the ranks while this process still checks the config.

    The server that forks the ranks ignores requests to stop. A scheduler sends these to every process of a job, and if
    the server ended, all ranks would look dead.
    """
    raise_file_limit()
    quiet_torch()
    multiprocessing.set_forkserver_preload(PRELOAD)
    _keep_sockets_short()
    with stops_handled_by(signal.SIG_IGN):
        multiprocessing.forkserver.ensure_running()


def _keep_sockets_short() -> None:
    """Make multiprocessing create its folder elsewhere if TMPDIR is too deep for the path of the server's socket."""
    if len(os.fsencode(tempfile.gettempdir())) > DEEPEST_TMPDIR:
        # multiprocessing asks for a temporary folder once and remembers it.
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
    """The ranks that one launcher starts at once, and the address at which the launchers of all nodes meet.

    They meet at `host`:`port`. The first node listens there, on the socket `door` (None: it opens a new one).
    """

    ranks: int
    attempt: int = 0
    devices: tuple[int, ...] = ()  # The device of each local rank; empty: the device with the local rank's number.
    node: int = 0
    nodes: int = 1
    host: str = LOOPBACK
    port: int = 0
    door: int | None = None  # A file descriptor.
    address: str = LOOPBACK  # The address of this node.
    job: str = ""  # The job's name, the same on all nodes and in all attempts; empty: a name of this launcher.
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = field(default_factory=loaded_plugins)  # Modules that every rank imports.


@dataclass(frozen=True)
class Outcome:
    """The end of a team's ranks: exit code, reason (empty if it was printed already), and the failed rank.

    `failed` is the local rank that failed by itself; None if it failed because other ranks did. `certain`: the rank was
    killed, which the loss of another rank can't cause.
    """

    code: int
    why: str = ""
    failed: int | None = None
    certain: bool = False


def _rank(team: Team, folder: str, stops: bool, main: Callable[..., None], *args: object) -> None:
    # Each attempt has a new agent of torch, which would count from zero.
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(team.attempt)
    os.environ.update(team.env)
    # With several nodes and no known interface, leave the choice to the back ends: other nodes can't reach loopback.
    interface = interface_of(team.address) or (loopback() if team.nodes == 1 else None)
    if interface is not None:
        # Without this, Gloo takes the interface of the address that the machine's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Without this, NCCL takes any interface but loopback. The "=" asks for this exact name.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if team.devices:
        os.environ[DEVICE] = str(team.devices[int(os.environ["LOCAL_RANK"])])
    run_guarded(folder, stops, _with_plugins, team.plugins, main, *args)


def _with_plugins(plugins: tuple[str, ...], main: Callable[..., None], *args: object) -> None:
    """Run `main` of a rank after the plugins that its launcher has loaded: its arguments may hold a resolved config."""
    load_plugins(plugins)
    main(*args)


def run_guarded(folder: str | None, stops: bool, main: Callable[..., None], *args: object) -> None:
    """Run the body of a rank. A mistake is reported in one sentence with exit code 2, a bug as a traceback with 1.

    With `stops`, the rank notes requests to stop and ends by itself; otherwise the signal ends it. Ranks of our
    launcher write their report into `folder`; ranks of another launcher print it.

    After an error, a launched rank ends without the interpreter's shutdown, in which torch would wait for peers that
    are gone. Nothing is lost by that: all contexts inside `main` are closed first, including saves and loggers.
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
            # The interpreter would print this text at its shutdown, which is skipped here.
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
    """Run `main(*args)` with a rank's handlers for requests to stop."""
    if not stops and threading.current_thread() is threading.main_thread():
        # The server that forked this process ignores these signals, and the process inherits that. A closed terminal
        # (SIGHUP) stays ignored: the launcher handles it.
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP:
                signal.signal(number, signal.SIG_DFL)
    global _folder
    _folder = place
    with StopRequests(signal.SIG_DFL, speaks=speaks) if stops else contextlib.nullcontext() as requests:
        StopRequests.has_work = not stops
        if place is not None:
            (place / f"pid-{_me()}").write_text(str(os.getpid()))
            # The launcher was asked to stop before it could know this rank's process id.
            if requests is not None and (place / STOP).exists():
                requests.request(time.monotonic())
        main(*args)


_folder: Path | None = None  # The folder of this rank's launcher.
LIFELINE = "launcher"  # A FIFO that only the launcher holds open for writing.
REGROUP = "regroup"  # The launcher of an elastic run makes this file when it stops ranks to start more of them.
STOP = "stop"  # The launcher makes this file when it is asked to stop, for ranks that start later.


def regroups() -> bool:
    """Return True if this rank was asked to stop so that its run continues on more ranks."""
    return _folder is not None and (_folder / REGROUP).exists()


def _me() -> str:
    """Return the suffix of this rank's files. It includes the attempt, so that files of earlier attempts differ."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ.get('RANK', '0')}"


def _report(folder: Path | None, kind: str, text: str) -> None:
    """Write a report of this kind ("mistake", "bug" or "weak") into the folder, or print it if there is no folder.

    Weak reports follow from another rank's failure. They count only if there are no others.
    """
    if folder:
        (folder / f"{kind}-{_me()}").write_text(text, encoding="utf-8")
    else:
        print(f"meshwright: rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)


def _reports(folder: Path, kind: str) -> dict[int, str]:
    """Return the texts of this kind by rank, as written in the last attempt."""
    names = [path.name.split("-") for path in folder.glob("*-*-*")]
    last = max((int(attempt) for its_kind, attempt, _ in names if its_kind == "pid"), default=0)
    files = [(int(n), a) for its_kind, a, n in names if its_kind == kind and int(a) == last]
    return {rank: (folder / f"{kind}-{attempt}-{rank}").read_text(encoding="utf-8") for rank, attempt in sorted(files)}


def launch(
    ranks: int,
    restarts: int,
    main: Callable[..., None],
    *args: object,
    stops: bool = False,
    loses: Callable[[], str] | None = None,
    tell: Callable[[str, str], None] = lambda kind, text: None,
) -> int:
    """Run `main(*args)` on `ranks` local ranks and return the exit code.

    When a rank dies, all ranks start again, at most `restarts` times. There is no restart after a mistake, which it
    would not fix. With `stops`, a request to stop is forwarded to the ranks, which save and end by themselves;
    otherwise it ends them. A second Ctrl-C always ends them: `loses` then returns a sentence about the lost work.
    `tell` receives the events: restarts, and the failure that ends the run.
    """
    with launch_folder(stops) as folder:
        for attempt in range(restarts + 1):
            ended = attempt_of(Team(ranks, attempt), folder, stops, main, args)
            if is_final(ended.code) or attempt == restarts:
                break
            reason = in_short(ended)
            again = f"restart {attempt + 1} of {restarts}, from the newest checkpoint"
            notice(f"{reason}; all ranks start again ({again})")
            tell("restart", f"{reason}; {again}")
    return conclude(ended, loses, tell)


@contextlib.contextmanager
def launch_folder(stops: bool) -> Iterator[Path]:
    """Yield a folder for the files of ranks. Teams of ranks may be started while it exists, one after the other."""
    warm_up()
    _register_meeting()
    with tempfile.TemporaryDirectory(prefix=OWN_RUN) as folder, _held_open(Path(folder) / LIFELINE):
        with _passing_on(Path(folder)) if stops else contextlib.nullcontext():
            yield Path(folder)


def is_final(code: int) -> bool:
    """Return True if another start would not help: all ended well, it was a mistake, or the launcher was stopped."""
    return code in (0, 2) or code > 128


def in_short(ended: Outcome) -> str:
    """Return the reason of an outcome; of a traceback only the ranks and the last line."""
    who, traceback_follows, _ = ended.why.partition("Traceback")
    return f"{who}{ended.why.splitlines()[-1]}" if traceback_follows else ended.why or "the ranks hung"


def conclude(
    ended: Outcome, loses: Callable[[], str] | None, tell: Callable[[str, str], None] = lambda kind, text: None
) -> int:
    """Print why a run ended, if it failed or was stopped. Return the exit code."""
    why = loses() if ended.code == 128 + signal.SIGINT and loses else ended.why
    if why:
        print(f"meshwright: {why}", file=sys.stderr)
    if ended.code:
        kind = {2: "refusal", 128 + signal.SIGINT: "end"}.get(ended.code, "failure")
        tell(kind, why.splitlines()[-1] if why else "the ranks hung")
    return ended.code


def attempt_of(team: Team, folder: Path, stops: bool, main: Callable[..., None], args: tuple[object, ...]) -> Outcome:
    """Run this launcher's ranks once and return how they ended."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from meshwright.comm.lost_ranks import leave_errors_to_us

    _silence_torch()
    # torch's agent passes these variables on to its ranks. Without them it would set its defaults.
    leave_errors_to_us(os.environ)
    signals = "SIGQUIT" if stops else "SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"
    options: dict[str, Any] = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}
    # torch 2.11 does not have all of these options.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
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
        return _failed_outcome(folder, error)
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
    """Suppress the messages of torch's launcher: ours tell which rank failed and why."""
    # torch sets a level for each of its loggers, so it is not enough to set that of their parent.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing.spawn")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _held_open(fifo: Path) -> Iterator[None]:
    """Make a FIFO and hold it open for writing. Ranks that read from it see its end when this process ends."""
    os.mkfifo(fifo)
    # Opening a FIFO for writing alone would wait for a reader.
    handle = os.open(fifo, os.O_RDWR)
    try:
        yield
    finally:
        os.close(handle)


def _show_cursor() -> None:
    """Show the terminal's cursor. The live display hides it, and a rank that was killed could not restore it."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        print("\x1b[?25h", end="", file=sys.stderr, flush=True)


MEETING = "meshwright"  # The name of our rendezvous backend.
MEETING_S = 60  # The launchers of all nodes must meet within this many seconds.


def _register_meeting() -> None:
    """Register our rendezvous backend with torch. Its store listens on a single address: loopback if there is one node.

    torch's own store would listen on every interface, and its dynamic rendezvous unpickles data from the store.
    """
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

    # An earlier launch of this process may have registered it already.
    with contextlib.suppress(ValueError):
        rendezvous.rendezvous_handler_registry.register(MEETING, handler)


def signal_ranks(folder: Path, number: int) -> None:
    """Send a signal to the ranks of the last attempt."""
    for pid in _reports(folder, "pid").values():
        # The rank may have ended, or its file may still be empty.
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid), number)


@contextlib.contextmanager
def _passing_on(folder: Path) -> Iterator[None]:
    """Forward requests to stop to the ranks, whose process ids are in `folder`. A second Ctrl-C kills the ranks."""
    interrupted = 0.0  # The time of the first Ctrl-C.

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
        # Ranks ignore the signals of terminals, so these are forwarded as SIGTERM.
        signal_ranks(folder, signal.SIGTERM if number in TERMINAL_SIGNALS else number)

    before = {number: signal.signal(number, pass_on) for number in filter(taken_over, STOP_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed_outcome(folder: Path, error: object) -> Outcome:
    """Return the outcome of ranks that failed.

    The exit code is 2 if a user's mistake stopped the run, 75 if ranks lost others, otherwise 1.
    """
    from meshwright.comm.watchdog import EXIT_CODE

    rank, first = error.get_first_failure()  # type: ignore[attr-defined]
    bugs, mistakes, weak = (_reports(folder, kind) for kind in ("bug", "mistake", "weak"))
    # A rank that was asked to stop did not wait for the end of its step.
    if first.exitcode - 128 in STOP_SIGNALS:
        return Outcome(first.exitcode, f"stopped by {signal.Signals(first.exitcode - 128).name}")
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        why = " (a file that it had mapped could not be read or written: look at the disk)" if name == "SIGBUS" else ""
        by_itself = rank not in weak and not _ended_by_torch(first.exitcode)
        text = f"rank {rank} was killed by {name}{why}; the other ranks were stopped"
        return Outcome(1, text, first.local_rank if by_itself else None, by_itself)

    # Several weak reports are about the same loss, so one is enough.
    reports = mistakes or bugs or dict([*weak.items()][:1])
    # The watchdog has already printed what hung.
    if first.exitcode == EXIT_CODE and not reports:
        return Outcome(EXIT_CODE)
    text = _distinct(reports)
    if not reports:
        server = ", or the process that it was forked from was killed" * (first.exitcode == SERVER_GONE)
        text = f"rank {rank} ended with exit code {first.exitcode}{server}"
    code = EXIT_CODE if first.exitcode == EXIT_CODE else 1
    by_itself = rank in bugs or not reports
    return Outcome(2 if first.exitcode == 2 or mistakes else code, text, first.local_rank if by_itself else None)


def _distinct(reports: Mapping[int, str]) -> str:
    """Return the reports of ranks, each distinct text once, with the ranks that wrote it."""
    paragraphs = []
    for text in dict.fromkeys(reports.values()):
        ranks = ", ".join(str(rank) for rank, other in reports.items() if other == text)
        where = f"rank {ranks}: " if len(reports) > 1 or "Traceback" in text else ""
        paragraphs.append(f"{where}{text}")
    return "\nmeshwright: ".join(paragraphs)


def _ended_by_torch(exit_code: int) -> bool:
    """Return True if torch may have aborted the rank because its peers were gone. NCCL's watchdog uses SIGABRT."""
    from meshwright.device import accelerator_count

    return exit_code == -signal.SIGABRT and accelerator_count() > 0


def place_in_launcher(nproc: int | None) -> ProcessPlace | None:
    """Return this process's place if it is a rank of torchrun or srun; otherwise None."""
    place = find_place()
    if place.launched and nproc is not None:
        raise UserError("--nproc starts ranks, and this process is already one rank of a launcher: leave it out")
    return place if place.launched else None


def run_as_rank(
    place: ProcessPlace, prepare: Callable[[ProcessPlace], None], main: Callable[..., None], args: object, stops: bool
) -> int:
    """Run as one rank started by torchrun or srun, and return the exit code.

    A mistake found by `prepare` is the same on every rank, so only one rank per machine reports it.
    """
    quiet_torch()
    try:
        prepare(place)
    except UserError:
        if place.local_rank == 0:
            raise
        return 2
    run_guarded(None, stops, main, args)
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
    """Run `main(args)` on local ranks and return the exit code. A single rank without restarts runs in this process.

    `loses` returns a sentence about the work that is lost when a second Ctrl-C ends the run. `tell` receives the
    events: restarts and failures.
    """
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
