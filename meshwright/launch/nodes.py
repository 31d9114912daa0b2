"""How the launchers of one run's nodes know of each other: by notes in a folder that all see. No torch.

Each launcher rewrites its own note every second. Who has not done so for `lost_after` seconds is gone, and so is at
once whoever's door refuses to be knocked at. The oldest launcher that is there leads: it makes the next *generation*,
a file that says which launchers start how many ranks, where these meet, and on which layout. A number is given to one
generation alone, whoever makes it (a file is linked to its name, which only one can), so a run never trains twice at a
time. No clock is compared with another machine's.
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

BEAT_S = 1.0
KNOCK_S = 2.0  # until nobody answers at a door
SILENT_S = 2.5 * BEAT_S  # a note that is older, of a launcher whose door is shut, is that of one that is gone
State = Literal["ready", "running", "left"]
# A rank of this node died; or may have failed by itself; or its ranks only lost others.
Fault = Literal["own", "unsure", "others"]


@dataclass(frozen=True)
class Node:
    """What a launcher says of itself. `places` are the devices that it offers, its spares last; `generation` is the
    one that it runs, or ran last, and `fault` whose fault its end was, if that was no good one."""

    name: str
    since: float
    address: str
    port: int  # its door: where its keeper listens; 0: none
    places: list[int]
    state: str = "ready"
    generation: int = 0
    code: int = 0  # with which it left
    beat: int = 0
    fault: str = ""  # a Fault, or empty


@dataclass(frozen=True)
class Share:
    """The ranks of one node in a generation."""

    name: str
    address: str
    port: int
    places: list[int]


@dataclass(frozen=True)
class Generation:
    """One start of a run's ranks. `attempt` counts them within the job."""

    number: int
    attempt: int
    job: str
    host: str
    port: int
    shares: list[Share]
    words: list[str]
    full: bool  # the ranks and the layout that the run was started with
    key: str = ""  # with which ranks and keepers sign
    beside: list[Share] = field(default_factory=list)  # nodes without ranks, whose keepers may hold something

    @property
    def world(self) -> int:
        return sum(len(share.places) for share in self.shares)

    def index_of(self, name: str) -> int | None:
        return next((n for n, share in enumerate(self.shares) if share.name == name), None)


def new_node(address: str, port: int, places: list[int]) -> Node:
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return Node(name, time.time(), address, port, places)


class Board:
    """The notes, seen by one launcher."""

    def __init__(self, folder: Path, me: Node, lost_after: float) -> None:
        self.folder, self.me, self.lost_after = folder, me, lost_after
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, float, bool]] = {}  # beat, when it was first seen, whether an earlier one was
        self._shut: dict[str, bool] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.say()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
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
        """Rewrites this launcher's note. A disk that is away for a moment is tried again with the next beat."""
        with self._lock:
            self.me = replace(self.me, beat=self.me.beat + 1, **changes)
            with contextlib.suppress(OSError):
                _put(self.folder / f"node-{self.me.name}.json", asdict(self.me))

    def look(self) -> list[Node]:
        """The launchers that are there, this one among them, in the order in which they came."""
        found, now = [self.me], time.monotonic()
        for path in self.folder.glob("node-*.json"):
            node = _read(path, Node)
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
            if confirmed and not gone:
                found.append(node)
        return sorted(found, key=lambda node: (node.since, node.name))

    def newest(self) -> Generation | None:
        numbers = self._numbers()
        return _read(self._file(numbers[-1]), Generation) if numbers else None

    def begin(self, make: Callable[[int], Generation]) -> Generation | None:
        """Makes the next generation; None if somebody else was first."""
        number = max(self._numbers(), default=0) + 1
        generation, aside = make(number), self.folder / f".{self.me.name}.part"
        try:
            _write_own(aside, json.dumps(asdict(generation)))
            _create(aside, self._file(number))
        except FileExistsError:
            return None
        finally:
            aside.unlink(missing_ok=True)
        for old in self._numbers()[:-2]:
            for path in (self._file(old), self._reshape(old)):
                path.unlink(missing_ok=True)
        return generation

    def reshape(self, number: int) -> None:
        """Says that the ranks of a generation are only stopped in order to start again."""
        self._reshape(number).touch()

    def is_reshaped(self, number: int) -> bool:
        return self._reshape(number).exists()

    def _reshape(self, number: int) -> Path:
        return self.folder / f"reshape-{number}"

    def leave(self, code: int) -> None:
        self.say(state="left", code=code)

    def tidy(self) -> None:
        """Removes the notes of launchers that have left, or are long gone."""
        for path in self.folder.glob("node-*.json"):
            node = _read(path, Node)
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
    """Whether somebody listens there: `shut` if the machine says that nobody does, `silent` if nothing answers."""
    try:
        socket.create_connection((address, port), KNOCK_S).close()
    except ConnectionRefusedError:
        return "shut"
    except OSError:
        return "silent"
    return "open"


def _create(aside: Path, path: Path) -> None:
    """Gives a file its name, which only one can; where a disk has no links, its text is written under the name."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:
        _write_own(path, aside.read_text(encoding="utf-8"))


def _write_own(path: Path, text: str) -> None:
    """Writes a file anew that no other user can read at any time: it holds the job's key."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(text.encode())


def _put(path: Path, value: Any) -> None:
    aside = path.with_name(f".{path.name}.part")
    aside.write_text(json.dumps(value), encoding="utf-8")
    aside.replace(path)


def _read(path: Path, kind: type[Any]) -> Any:
    """A note, or None where there is none, or a strange one."""
    try:
        return _made(kind, read_json(path))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _made(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {each.name for each in fields(kind)}:
        raise ValueError("the note has other keys")
    hints = get_type_hints(kind)
    if kind is Generation:
        value = value | {key: [_made(Share, each) for each in value[key]] for key in ("shares", "beside")}
    for key, hint in hints.items():
        if hint != list[Share]:
            of_kind(value[key], hint, key)
    return kind(**value)
