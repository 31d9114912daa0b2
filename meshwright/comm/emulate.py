"""Slow links, emulated by delays, to measure on one machine what a slower network would do (`comm.emulate`).

A rank has a link into its node, on which its messages go one after the other, and the ranks of a node share adapters to
other nodes. What is sent takes its bytes over the rate, from the moment at which the link is free. A collective does
not end for a rank before that time has passed; what is computed meanwhile hides it. A message is handed to torch by a
thread when its time has passed. Emulated links must be slower than the machine's own, whose time is not taken off.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import math
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.config.comm import EmulateConfig


def hops(op: str, size: int) -> float:
    """Returns the latencies that a call has one after the other: those of a ring."""
    ring = size - 1.0
    return {"all_reduce": 2 * ring, "all_to_all": ring / size * math.log2(size), "send": 1.0}.get(op, ring)


class Adapters:
    """What the ranks of one node share: until when its adapters to other nodes are busy, in a file that no longer has a
    name when all have opened it."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def opened(cls, number: int, node: int, meet: Callable[[], None]) -> Adapters:
        """Opens the adapters of a node. `number` is the run's, `meet` returns when all ranks have called it."""
        path = Path(tempfile.gettempdir()) / f"meshwright-links-{number}-{node}"
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        meet()
        path.unlink(missing_ok=True)
        return cls(file)

    def reserve(self, now: float, seconds: float) -> float:
        """Returns when a message is through that begins when the adapters are free, and takes so long."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            found = os.pread(self._file, 8, 0)
            busy = struct.unpack("d", found)[0] if len(found) == 8 else 0.0
            until = max(now, busy) + seconds
            os.pwrite(self._file, struct.pack("d", until), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return float(until)


class Later:
    """A message that is handed to torch when it is due."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._begun, self._work = begin, threading.Event(), None
        self._error: RuntimeError | None = None

    def begin(self) -> None:
        try:
            self._work = self._begin()
        except RuntimeError as error:
            self._error = error
        self._begun.set()

    def wait(self) -> None:
        self._begun.wait()
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait()


class Until:
    """A call that does not end before it is due."""

    def __init__(self, work: Any, due: float) -> None:
        self._work, self._due = work, due

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        time.sleep(max(0.0, self._due - time.monotonic()))


class Arriving:
    """A message on its way to this rank, whose link takes in one after the other."""

    def __init__(self, work: Any, take: Callable[[], float]) -> None:
        self._work, self._take = work, take

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._take() - time.monotonic()))


class EmulatedLinks:
    """One rank's links, through which all its groups send."""

    def __init__(self, config: EmulateConfig, rank: int, node_size: int, adapters: Adapters | None) -> None:
        self.config, self.rank, self.node_size, self.adapters = config, rank, node_size, adapters
        self._free = self._free_in = 0.0
        self._due: list[tuple[float, int, Later]] = []
        self._numbers, self._changed = itertools.count(), threading.Condition()
        threading.Thread(target=self._deliver, daemon=True, name="meshwright-links").start()

    def begin(self, op: str, wire: int, ranks: Sequence[int], peer: int | None, launch: Callable[[], Any]) -> Any:
        """Begins a call that sends `wire` bytes, among `ranks` or to one of them. Returns what can be waited for."""
        if op == "receive":
            return Arriving(launch(), lambda: self._taken(wire))
        due = self._until(op, wire, ranks, peer)
        if peer is None:
            return Until(launch(), due)
        later = Later(launch)
        with self._changed:
            heapq.heappush(self._due, (due, next(self._numbers), later))
            self._changed.notify()
        return later

    def _until(self, op: str, wire: int, ranks: Sequence[int], peer: int | None) -> float:
        now, c = time.monotonic(), self.config
        late = hops(op if peer is None else "send", len(ranks)) * c.latency_us * 1e-6
        if peer is not None and self.adapters is not None and peer // self.node_size != self.rank // self.node_size:
            return self.adapters.reserve(now, wire / (c.network_gb_s * 1e9)) + late
        self._free = max(now, self._free) + self._seconds(op, wire, ranks if peer is None else (self.rank,))
        return self._free + late

    def _taken(self, wire: int) -> float:
        """Returns when a message that has been sent is through this rank's own link: it could begin when it was sent,
        unless others came in."""
        seconds = wire / (self.config.link_gb_s * 1e9 or math.inf)
        self._free_in = max(self._free_in, time.monotonic() - seconds) + seconds
        return self._free_in

    def _seconds(self, op: str, wire: int, ranks: Sequence[int]) -> float:
        """Returns the seconds of bytes that go into the node or, where a group spans nodes, over this rank's share of
        the adapters: with all rings at work, a ring's share is that of its ranks on the node."""
        c, here = self.config, self.rank // self.node_size
        link = c.link_gb_s * 1e9 or math.inf
        on_node = sum(rank // self.node_size == here for rank in ranks)
        if on_node == len(ranks) or self.adapters is None:
            return wire / link
        network = c.network_gb_s * 1e9
        if op == "all_to_all":  # what is for each other rank leaves by itself
            each = wire / (len(ranks) - 1)
            outside = each * (len(ranks) - on_node)
            return max(each * (on_node - 1) / link, outside / (network / self.node_size))
        return wire / min(link, network * on_node / self.node_size)

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    wait = None if not self._due else max(0.0, self._due[0][0] - time.monotonic())
                    self._changed.wait(wait)
                _, _, later = heapq.heappop(self._due)
            later.begin()
