"""A lane runs cases one after another, and several lanes run side by side. A lane keeps the worlds that its cases
share.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.nccl.transports import TRANSPORTS, Transport
from tests.nccl.worlds import World

MOST_RUNS = 16  # A world is replaced after this many cases.


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case. `worst` is the largest difference, if numbers are compared. `note` holds the
    complaints.
    """

    name: str
    ranks: int
    ok: bool
    seconds: float = 0.0
    worst: float | None = None
    sent: int | None = None  # Bytes that the busiest rank put on the wire in a step.
    note: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """The result of a check: complaints, the largest difference, and the bytes of a step. Without complaints it
    passed.
    """

    complaints: list[str]
    worst: float | None = None
    sent: int | None = None


class Shared:
    """References that all lanes use, each computed once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        with self._lock:
            return self._found.get(key)

    def put(self, key: str, value: Any) -> None:
        with self._lock:
            self._found[key] = value


class Lane:
    """The worlds of one lane: that of the current cases, one process for references, and Gloo ranks for comparison."""

    def __init__(self, transport: Transport, shared: Shared, keep: Path | None = None) -> None:
        self.transport, self.shared, self.keep = transport, shared, keep
        self._worlds: dict[tuple[str, int], World] = {}

    def world(self, ranks: int, transport: Transport | None = None) -> World:
        """Return the world of this many ranks, starting it if needed. Only one world of several ranks exists per
        transport at a time, because idle ranks hold memory of the device.
        """
        transport = transport or self.transport
        return self._standing((transport.name, ranks), transport)

    def gloo(self, ranks: int) -> World:
        """Return ranks on Gloo that are not those of the case itself."""
        return self._standing(("reference", ranks), TRANSPORTS["gloo"])

    def _standing(self, key: tuple[str, int], transport: Transport) -> World:
        kind, ranks = key
        rivals = [other for other in self._worlds if other[0] == kind and other[1] > 1 and ranks > 1 and other != key]
        # Each case leaves threads of its process groups behind, so worlds wear out.
        worn = [key] if key in self._worlds and self._worlds[key].runs >= MOST_RUNS else []
        for other in (*rivals, *worn):
            self._worlds.pop(other).close()
        if key not in self._worlds:
            self._worlds[key] = World(ranks, transport)
        return self._worlds[key]

    def folder(self, name: str) -> Path:
        """Return an empty folder for the files of a case."""
        word = name.replace("/", "-")
        if self.keep is not None:
            path = self.keep / word
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            return path
        return Path(tempfile.mkdtemp(prefix=f"meshwright-{word}-"))

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds = {}
