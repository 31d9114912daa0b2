"""One run, one owner: a run's folder belongs to the job that trains in it, until that has ended. No torch.

The owner's note is a file `.owner-N`; the one with the highest N counts. A job that takes the folder creates the next
number, which only one can (O_EXCL, also on a network disk), and then removes the lower ones. The highest note is never
removed, only marked as ended, so that a number is never given twice. A note whose process is gone counts as ended.
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

from meshwright.disk import refused
from meshwright.errors import UserError, notice
from meshwright.outside import read_json
from meshwright.record import checkpoint_format as fmt

UNWRITTEN_S = 3.0  # a note that is still empty after so long was begun by a process that died
State = Literal["ended", "gone", "restarted", "alive", "unknown"]


@dataclass(frozen=True)
class Owner:
    """Who trains in a folder. `began` tells a process from a later one with the same number, `boot` and `pids` (its
    name space) where that number means something, `job` and `attempt` whether it was this job's own ranks."""

    host: str
    pid: int
    began: str
    boot: str
    pids: str
    job: str
    attempt: int
    since: float
    ended: bool = False

    @classmethod
    def this_process(cls) -> Owner:
        pid, boot = os.getpid(), _read("/proc/sys/kernel/random/boot_id")
        began, pids = _began(pid) or "", _link("/proc/self/ns/pid")
        return cls(socket.gethostname(), pid, began, boot, pids, fmt.job_name(), _attempt(), time.time())

    def state(self, me: Owner) -> State:
        """Whether the owner is still there, as far as `me` can know."""
        if self.ended:
            return "ended"
        ours = me.job not in ("", "none") and self.job == me.job and self.attempt < me.attempt
        visible = (self.host, self.pids) == (me.host, me.pids) and self.boot == me.boot
        if visible and _began(self.pid) == self.began:
            return "alive"  # whatever it is called: jobs that are started twice may share a name
        if ours:
            return "restarted"
        if visible or (self.host == me.host and self.boot != me.boot):
            return "gone"  # the process ended, or the machine was started again
        return "unknown"

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"


class Ownership:
    """Holds a run's folder. Raises UserError if it belongs to somebody else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.me = folder, Owner.this_process()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.number = self._take()
        except OSError as error:
            raise refused(f"run.dir={folder} can't be written", error, folder, "another run.dir") from None

    def _take(self) -> int:
        while True:
            number, before = _newest(self.folder)
            said = _judged(self.folder, number, before, self.me)
            if not self._create(number + 1):
                time.sleep(0.05)  # somebody else was first: look at that one
                continue
            if _newest(self.folder)[0] != number + 1 or (number and _note(self.folder, number) not in (before, None)):
                _file(self.folder, number + 1).unlink(missing_ok=True)  # what was seen was out of date
                continue
            for lower in _numbers(self.folder):
                if lower <= number:
                    _file(self.folder, lower).unlink(missing_ok=True)
            if said:
                notice(said)
            return number + 1

    def _create(self, number: int) -> bool:
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
        """Marks the note as ended; a folder that was made for this run and got nothing goes away again."""
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
def owning(*folders: Path) -> Iterator[None]:
    """Owns all of these folders, or none."""
    with contextlib.ExitStack() as held:
        for folder in {path.resolve(): path for path in folders}.values():
            held.enter_context(Ownership(folder))
        yield


def refuse_owned(folder: Path) -> None:
    """Raises if somebody trains in this folder. It may still be taken before this job takes it."""
    _judged(folder, *_newest(folder), Owner.this_process())


def who_trains(folder: Path) -> tuple[State, Owner | None]:
    """Whether somebody trains in this folder, and who did last."""
    _, owner = _newest(folder)
    return (owner.state(Owner.this_process()) if owner else "ended"), owner


def owner_number(folder: Path) -> int:
    """The number of the last job, or attempt, that took this folder; 0 if none did."""
    return max(_numbers(folder), default=0)


def has_ended_since(folder: Path, number: int) -> bool:
    """Whether somebody took the folder after `number`, and has ended."""
    now, owner = _newest(folder)
    return now > number and owner is not None and owner.ended


def _judged(folder: Path, number: int, owner: Owner | None, me: Owner) -> str:
    """Raises if `owner` may still be there; returns what to say of one that is gone, or an empty string."""
    state = owner.state(me) if owner else "ended"
    if state == "alive":
        raise UserError(
            f"run.dir={folder} belongs to a run that is still training ({owner}): stop it, or choose another run.dir"
        )
    if state == "unknown":
        raise UserError(
            f"run.dir={folder} belongs to a run of which nothing can be known from {me.host} "
            f"({owner}{_last_step(folder)}): wait until it ends or choose another run.dir; if it is gone, delete "
            f"{_file(folder, number)} and start again"
        )
    return f"{folder} was left by a run that is gone ({owner}): this one takes it over" if state == "gone" else ""


def _last_step(folder: Path) -> str:
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
    """The highest number and its note; 0 without any, and no note where its writer died before it was written."""
    end = time.monotonic() + UNWRITTEN_S
    while numbers := _numbers(folder):
        owner = _note(folder, numbers[-1])
        if owner is not None or time.monotonic() >= end:
            return numbers[-1], owner
        time.sleep(0.05)
    return 0, None


def _note(folder: Path, number: int) -> Owner | None:
    try:
        values = read_json(_file(folder, number))
        return Owner(**{field.name: values[field.name] for field in fields(Owner)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_bare(folder: Path, note: Path) -> bool:
    checkpoints = folder / "checkpoints"
    names = {*os.listdir(folder)} - {note.name} - ({"checkpoints"} if checkpoints.is_dir() else set())
    return not names and not (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _attempt(env: Mapping[str, str] = os.environ) -> int:
    counts = (env.get(name, "") for name in fmt.ATTEMPTS)
    return sum(int(count) for count in counts if count.isdecimal())


def _began(pid: int) -> str | None:
    """When a process of this machine began, in any form that differs from that of every other process with its number;
    None if there is no such process."""
    stat = _read(f"/proc/{pid}/stat")
    if stat:
        state, *rest = stat.rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]  # in ticks since the machine was started
    if os.path.exists("/proc/self/stat"):
        return None
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return told.stdout.strip() or None


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
