"""Lets the launchers of a run's nodes find each other and agree, by notes in a shared folder. No torch.

Each launcher rewrites its own note every second. A launcher is gone if its note has not changed for `lost_after`
seconds, or at once if its port refuses connections. Both are measured with the observer's clock alone.

The oldest launcher leads. It makes the next *generation*: a file with the number of ranks that each launcher starts,
the address where they meet, and their layout. Each generation has a unique number, whoever makes it: its file is
created by a hard link, which fails if the name exists. So a run never trains twice at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from meshwright.outside import of_kind, read_json

BEAT_S = 1.0  # Each launcher rewrites its note at this interval.
KNOCK_S = 2.0  # A connection that takes longer counts as unanswered.
SILENT_S = 2.5 * BEAT_S  # After this time without a beat, the launcher's port is tried.
State = Literal["ready", "running", "left"]
# own: a rank of this node was killed. unsure: one may have failed by itself. others: its ranks only lost other ranks.
Fault = Literal["own", "unsure", "others"]


@dataclass(frozen=True)
class LauncherNote:
    """A launcher's note about itself.

    `places` are the devices that it offers, spares last. `generation` is the one that it runs or ran last. `fault` says
    who caused the end of that generation, if it failed.
    """

    name: str
    since: float
    address: str
    port: int  # The port of its keeper; 0: there is none.
    places: list[int]
    state: str = "ready"
    generation: int = 0
    code: int = 0  # The exit code with which it left.
    beat: int = 0  # Increases with every write.
    fault: str = ""  # A Fault, or empty.

    @property
    def has_left(self) -> bool:
        return self.state == "left"

    @property
    def ended_well(self) -> bool:
        return self.has_left and self.code == 0

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_running(self) -> bool:
        return self.state == "running"


@dataclass(frozen=True)
class NodeShare:
    """The ranks of one node in a generation."""

    name: str
    address: str
    port: int
    places: list[int]


@dataclass(frozen=True)
class Generation:
    """One start of a run's ranks. `attempt` counts the starts within the job."""

    number: int
    attempt: int
    job: str
    host: str
    port: int
    shares: list[NodeShare]
    words: list[str]
    full: bool  # It has all the ranks and the layout that the run was started with.
    key: str = ""  # Ranks and keepers sign with this key.
    beside: list[NodeShare] = field(default_factory=list)  # Nodes without ranks, whose keepers may hold memory copies.

    @property
    def world(self) -> int:
        return sum(len(share.places) for share in self.shares)

    def index_of(self, name: str) -> int | None:
        """Return a node's index in this generation; None if it has no ranks in it."""
        return next((n for n, share in enumerate(self.shares) if share.name == name), None)


def new_node(address: str, port: int, places: list[int]) -> LauncherNote:
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return LauncherNote(name, time.time(), address, port, places)


class Board:
    """The shared folder of notes, as one launcher reads and writes it."""

    def __init__(self, folder: Path, me: LauncherNote, lost_after: float) -> None:
        self.folder, self.me, self.lost_after = folder, me, lost_after
        self._lock = threading.Lock()
        # For each launcher: its newest beat, when that was first seen, and whether an earlier beat was seen too.
        self._seen: dict[str, tuple[int, float, bool]] = {}
        self._shut: dict[str, bool] = {}  # Launchers whose port refused a connection since their newest beat.
        folder.mkdir(parents=True, exist_ok=True)
        self.say()

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Rewrite this launcher's note regularly, in a thread, until the context ends."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                self.say()

        thread = threading.Thread(target=beat, name="meshwright-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def say(self, **changes: Any) -> None:
        """Rewrite this launcher's note with some changes. If the disk is unavailable, the next beat tries again."""
        with self._lock:
            self.me = replace(self.me, beat=self.me.beat + 1, **changes)
            with contextlib.suppress(OSError):
                _write_note(self.folder / f"node-{self.me.name}.json", asdict(self.me))

    def look(self) -> list[LauncherNote]:
        """Return the launchers that are present, including this one, oldest first."""
        present, now = [self.me], time.monotonic()
        for path in self.folder.glob("node-*.json"):
            node = _read(path, LauncherNote)
            if node is None or node.name == self.me.name:
                continue
            beat, since, confirmed = self._seen.get(node.name, (node.beat, now, False))
            if node.beat != beat:
                since, confirmed, self._shut[node.name] = now, True, False
            self._seen[node.name] = (node.beat, since, confirmed)
            silent = now - since
            if silent > SILENT_S and confirmed and node.port and not self._shut.get(node.name):
                self._shut[node.name] = knock(node.address, node.port) == "shut"
            gone = silent > self.lost_after or self._shut.get(node.name)
            # A note that has never changed may have been left by a launcher that ended long ago.
            if confirmed and not gone:
                present.append(node)
        return sorted(present, key=lambda node: (node.since, node.name))

    def newest(self) -> Generation | None:
        numbers = self._numbers()
        return _read(self._file(numbers[-1]), Generation) if numbers else None

    def begin(self, make: Callable[[int], Generation]) -> Generation | None:
        """Make the next generation and return it; None if another launcher was first."""
        number = max(self._numbers(), default=0) + 1
        generation = make(number)
        aside = self.folder / f".{self.me.name}.part"
        try:
            _write_own(aside, json.dumps(asdict(generation)))
            _create(aside, self._file(number))
        except FileExistsError:
            return None
        finally:
            aside.unlink(missing_ok=True)
        # Keep the newest two: a launcher may still be reading the one before.
        for old in self._numbers()[:-2]:
            for path in (self._file(old), self._reshape(old)):
                path.unlink(missing_ok=True)
        return generation

    def reshape(self, number: int) -> None:
        """Note that the ranks of a generation are stopped only in order to start again."""
        self._reshape(number).touch()

    def is_reshaped(self, number: int) -> bool:
        return self._reshape(number).exists()

    def _reshape(self, number: int) -> Path:
        return self.folder / f"reshape-{number}"

    def leave(self, code: int) -> None:
        self.say(state="left", code=code)

    def tidy(self) -> None:
        """Remove notes that can't be read or have not changed for a long time."""
        for path in self.folder.glob("node-*.json"):
            node = _read(path, LauncherNote)
            name = node.name if node else ""
            _, since, _ = self._seen.get(name, (0, time.monotonic(), False))
            if name != self.me.name and (node is None or time.monotonic() - since > 10 * self.lost_after):
                path.unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self.folder / f"generation-{number}.json"

    def _numbers(self) -> list[int]:
        names = [re.fullmatch(r"generation-(\d{1,9})\.json", name) for name in os.listdir(self.folder)]
        return sorted(int(name.group(1)) for name in names if name)


def knock(address: str, port: int) -> Literal["open", "shut", "silent"]:
    """Try to connect to a port. Return `open`, `shut` if the machine refuses, or `silent` if nothing answers."""
    try:
        socket.create_connection((address, port), KNOCK_S).close()
    except ConnectionRefusedError:
        return "shut"
    except OSError:
        return "silent"
    return "open"


def _create(aside: Path, path: Path) -> None:
    """Give a file its final name, or raise FileExistsError if another process did so first."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:
        # This disk has no hard links. Creating the file exclusively is as safe, but a reader may see it half written.
        _write_own(path, aside.read_text(encoding="utf-8"))


def _write_own(path: Path, text: str) -> None:
    """Create a file that no other user can read at any time, since it holds the job's key."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text.encode())


def _write_note(path: Path, value: Any) -> None:
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(json.dumps(value), encoding="utf-8")
    aside.replace(path)


def _read(path: Path, kind: type[Any]) -> Any:
    """Read a note of this kind; return None if it is missing or not valid."""
    try:
        return _parse(kind, read_json(path))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _parse(kind: type[Any], value: Any) -> Any:
    """Make an object of a dataclass from JSON. Raise unless all its fields are there, each with the right type."""
    if not isinstance(value, dict) or value.keys() != {member.name for member in fields(kind)}:
        raise ValueError("the note has other keys")
    hints = get_type_hints(kind)
    if kind is Generation:
        value = value | {key: [_parse(NodeShare, share) for share in value[key]] for key in ("shares", "beside")}
    for key, hint in hints.items():
        if hint != list[NodeShare]:
            of_kind(value[key], hint, key)
    return kind(**value)
