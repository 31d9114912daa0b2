"""Give a run's folder one owner at a time: the job that trains in it, until that job has ended. No torch.

The claim on a folder is a file `.owner-N`, and the one with the highest N counts. A job takes the folder by creating
the next number, which only one job can do (O_EXCL, which also works on a network disk). It then removes the lower ones.
The highest claim is never removed, only marked as ended, so that no number is used twice. A claim whose process no
longer exists counts as ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from meshwright.disk import refusal
from meshwright.errors import UserError, notice
from meshwright.outside import read_json
from meshwright.record import checkpoint_format as fmt

UNWRITTEN_S = 3.0  # the writer of a claim that is still empty after this long has died
State = Literal["ended", "gone", "restarted", "alive", "unknown"]


@dataclass(frozen=True)
class Owner:
    """A claim on a folder: the process that trains in it."""

    host: str
    pid: int
    began: str  # start time of the process, which differs from that of a later process with the same pid
    boot: str  # id of the host's boot, since pids are reused after a reboot
    pids: str  # pid name space of the process, as a pid means nothing in another one
    job: str
    attempt: int  # of the job; a later attempt takes over the folder from its own earlier ones
    since: float
    ended: bool = False

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        boot = _read("/proc/sys/kernel/random/boot_id")
        began = _began(pid) or ""
        pids = _link("/proc/self/ns/pid")
        return cls(socket.gethostname(), pid, began, boot, pids, fmt.job_name(), _attempt(), time.time())

    def state(self, me: Owner) -> State:
        """Return whether the owner still exists, as far as the process `me` can know.

        "ended" and "gone" mean that it does not: it said so, or its process no longer exists. "restarted" is an
        earlier attempt of the job of `me`.
        """
        if self.ended:
            return "ended"
        is_earlier_attempt = me.job not in ("", "none") and self.job == me.job and self.attempt < me.attempt
        is_visible = (self.host, self.pids) == (me.host, me.pids) and self.boot == me.boot
        # A living process comes before the job's name: jobs that are started twice may share a name.
        if is_visible and _began(self.pid) == self.began:
            return "alive"
        if is_earlier_attempt:
            return "restarted"
        # Either the process has ended, or the machine was rebooted since.
        if is_visible or (self.host == me.host and self.boot != me.boot):
            return "gone"
        return "unknown"

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"


class Ownership:
    """Ownership of a run's folder, until `release`. Raises a UserError if the folder belongs to another process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.me = folder, Owner.this_process()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.number = self._take()
        except OSError as error:
            raise refusal(f"run.dir={folder} can't be written", error, folder, "another run.dir") from None

    def _take(self) -> int:
        """Create the next claim once the previous owner is known to be gone, and return its number."""
        while True:
            number, before = _newest(self.folder)
            message = _check_owner(self.folder, number, before, self.me)
            if not self._create(number + 1):
                time.sleep(0.05)  # another job was first: check that one
                continue
            # The claims may have changed between reading and creating (on a network disk, a listing may be old). Then
            # the check above judged an outdated claim and is repeated.
            if _newest(self.folder)[0] != number + 1 or (number and _note(self.folder, number) not in (before, None)):
                _file(self.folder, number + 1).unlink(missing_ok=True)
                continue
            for lower in _numbers(self.folder):
                if lower <= number:
                    _file(self.folder, lower).unlink(missing_ok=True)
            if message:
                notice(message)
            return number + 1

    def _create(self, number: int) -> bool:
        """Create a claim and return True, or return False if the number is taken."""
        try:
            handle = os.open(_file(self.folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self.me)))
            file.flush()
            os.fsync(handle)
        return True

    def release(self) -> None:
        """Mark the claim as ended. A folder that was created for this run and is still empty is removed."""
        path = _file(self.folder, self.number)
        with contextlib.suppress(OSError):
            if self.number == 1 and _is_bare(self.folder, path):
                path.unlink()
                for empty in (self.folder / "checkpoints", self.folder):
                    with contextlib.suppress(FileNotFoundError):
                        empty.rmdir()
            elif _note(self.folder, self.number) == self.me:
                fmt.write_json(path, asdict(self.me) | {"ended": True})

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


@contextlib.contextmanager
def own_folders(*folders: Path) -> Iterator[None]:
    """Own all of these folders in the body. If one can't be owned, none is."""
    with contextlib.ExitStack() as held:
        # Two names of one folder count once: this process could not own it a second time.
        for folder in {path.resolve(): path for path in folders}.values():
            held.enter_context(Ownership(folder))
        yield


def refuse_owned(folder: Path) -> None:
    """Raise a UserError if a run trains in this folder. Another job may still take it before this one does."""
    _check_owner(folder, *_newest(folder), Owner.this_process())


def who_trains(folder: Path) -> tuple[State, Owner | None]:
    """Return the state of the folder's last owner, and that owner (None if there was none)."""
    _, owner = _newest(folder)
    return (owner.state(Owner.this_process()) if owner else "ended"), owner


def owner_number(folder: Path) -> int:
    """Return the number of the last claim on this folder; 0 if there is none."""
    return max(_numbers(folder), default=0)


def has_ended_since(folder: Path, number: int) -> bool:
    """Return True if a job took the folder after the claim `number`, and the newest of them has ended."""
    now, owner = _newest(folder)
    return now > number and owner is not None and owner.ended


def _check_owner(folder: Path, number: int, owner: Owner | None, me: Owner) -> str:
    """Raise a UserError if `owner` may still exist. Return a notice about one that is gone, or an empty string."""
    state = owner.state(me) if owner else "ended"
    if state == "alive":
        raise UserError(
            f"run.dir={folder} belongs to a run that is still training ({owner}): stop it, or choose another run.dir"
        )
    if state == "unknown":
        raise UserError(
            f"run.dir={folder} belongs to a run about which nothing can be known from {me.host} "
            f"({owner}{_last_step(folder)}): wait until it ends or choose another run.dir; if it is gone, delete "
            f"{_file(folder, number)} and start again"
        )
    return f"{folder} was left by a run that is gone ({owner}): this one takes it over" if state == "gone" else ""


def _last_step(folder: Path) -> str:
    """Return words about when the run wrote its last step, or an empty string."""
    with contextlib.suppress(OSError):
        ago = max(0.0, time.time() - (folder / "metrics.jsonl").stat().st_mtime)
        return f", its last step was written {ago:.0f} s ago"
    return ""


def _file(folder: Path, number: int) -> Path:
    return folder / f".owner-{number}"


def _numbers(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(found.group(1)) for name in names if (found := re.fullmatch(r"\.owner-(\d+)", name)))


def _newest(folder: Path) -> tuple[int, Owner | None]:
    """Return (highest claim number, its contents), or (0, None) if there are no claims.

    The contents are None if the writer died before writing them, which this waits to find out.
    """
    end = time.monotonic() + UNWRITTEN_S
    while numbers := _numbers(folder):
        owner = _note(folder, numbers[-1])
        if owner is not None or time.monotonic() >= end:
            return numbers[-1], owner
        time.sleep(0.05)
    return 0, None


def _note(folder: Path, number: int) -> Owner | None:
    """Return the contents of a claim, or None if it is missing or not complete."""
    try:
        values = read_json(_file(folder, number))
        return Owner(**{field.name: values[field.name] for field in fields(Owner)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_bare(folder: Path, note: Path) -> bool:
    """Return True if a folder holds nothing but the claim `note` and an empty folder of checkpoints."""
    checkpoints = folder / "checkpoints"
    names = {*os.listdir(folder)} - {note.name} - ({"checkpoints"} if checkpoints.is_dir() else set())
    return not names and not (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _attempt(env: Mapping[str, str] = os.environ) -> int:
    """Return a number that grows with every restart of a job's ranks, by any of its launchers."""
    counts = (env.get(name, "") for name in fmt.ATTEMPTS)
    return sum(int(count) for count in counts if count.isdecimal())


def _began(pid: int) -> str | None:
    """Return the start time of a process on this machine, or None if there is no such process.

    The format does not matter: it only has to differ from that of every other process with the same pid.
    """
    stat = _read(f"/proc/{pid}/stat")
    if stat:
        # The name of the program may contain spaces and parentheses, so fields are counted from its last parenthesis.
        state, *rest = stat.rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]  # clock ticks since boot; a zombie or dead process has ended
    if os.path.exists("/proc/self/stat"):
        return None
    # Without /proc, as on macOS.
    ps = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return ps.stdout.strip() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
