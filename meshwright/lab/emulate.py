"""Slow links, emulated by delays, to measure on one machine how a slower network would perform (`comm.emulate`).

Each rank has a link into its node, which carries its messages one after the other. The ranks of a node share adapters
to other nodes. A message of some bytes takes bytes / rate seconds from the moment at which the link is free.

A collective does not end on a rank before this time has passed; computation in the meantime hides it. A message to one
rank is passed to torch by a thread once its time has passed. Emulated links must be slower than the machine's real
ones, because the time of the real transfer is not subtracted.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import math
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.config.comm import EmulateConfig
from meshwright.spec.traffic.ledger import OPERATIONS


def hops(op: str, size: int) -> float:
    """Return the number of link latencies that a call pays in sequence. A ring of n ranks has n - 1. An all_reduce goes
    round twice, and an all_to_all pays log2(n)/n of a ring's latencies."""
    ring = size - 1.0
    return {"all_reduce": 2 * ring, "all_to_all": ring / size * math.log2(size), "send": 1.0}.get(op, ring)


class Adapters:
    """The network adapters that the ranks of one node share. A file holds the time at which they become free.

    Its name is removed once all ranks have opened it, so the file disappears with the last process.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def open(cls, number: int, node: int, meet: Callable[[], None]) -> Adapters:
        """Open the adapters of a node. `number` identifies the run. `meet` returns when all ranks have called it."""
        path = Path(tempfile.gettempdir()) / f"meshwright-links-{number}-{node}"
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        meet()
        path.unlink(missing_ok=True)
        return cls(file)

    def reserve(self, now: float, seconds: float) -> float:
        """Queue a message that takes `seconds`, and return the time at which it will be through the adapters."""
        # The lock makes reading and writing the time one step for the processes of a node.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            content = os.pread(self._file, 8, 0)
            busy_until = struct.unpack("d", content)[0] if len(content) == 8 else 0.0
            until = max(now, busy_until) + seconds
            os.pwrite(self._file, struct.pack("d", until), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return float(until)


class DelayedSend:
    """A message that is passed to torch when it is due."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._begun = threading.Event()
        self._work = None
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


class DelayedCall:
    """A call that does not end before it is due."""

    def __init__(self, work: Any, due: float) -> None:
        self._work, self._due = work, due

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        time.sleep(max(0.0, self._due - time.monotonic()))


class DelayedReceive:
    """A message on its way to this rank. The rank's link takes in one message after the other."""

    def __init__(self, work: Any, take: Callable[[], float]) -> None:
        self._work, self._take = work, take

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._take() - time.monotonic()))


class EmulatedLinks:
    """One rank's links, through which all its groups send (see `comm.group.SlowLinks`)."""

    def __init__(self, config: EmulateConfig, rank: int, node_size: int, adapters: Adapters | None) -> None:
        self.config, self.rank, self.node_size, self.adapters = config, rank, node_size, adapters
        self._free = self._free_in = 0.0
        self._due: list[tuple[float, int, DelayedSend]] = []
        self._numbers, self._changed = itertools.count(), threading.Condition()
        threading.Thread(target=self._deliver, daemon=True, name="meshwright-links").start()

    def begin(self, op: str, wire: int, ranks: Sequence[int], peer: int | None, launch: Callable[[], Any]) -> Any:
        if op == "receive":
            return DelayedReceive(launch(), lambda: self._time_received(wire))
        due = self._until(op, wire, ranks, peer)
        if peer is None:
            return DelayedCall(launch(), due)
        later = DelayedSend(launch)
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

    def _time_received(self, wire: int) -> float:
        """Return the time at which a received message is through this rank's link. Unless the link was busy with other
        messages, it took the message in while the sender's link sent it."""
        seconds = wire / (self.config.link_gb_s * 1e9 or math.inf)
        self._free_in = max(self._free_in, time.monotonic() - seconds) + seconds
        return self._free_in

    def _seconds(self, op: str, wire: int, ranks: Sequence[int]) -> float:
        """Return the seconds that `wire` bytes take inside the node or, if a group spans nodes, over this rank's share
        of the adapters. All rings are assumed to be busy, so a ring's share grows with its ranks on the node."""
        c, here = self.config, self.rank // self.node_size
        link = c.link_gb_s * 1e9 or math.inf
        on_node = sum(rank // self.node_size == here for rank in ranks)
        if on_node == len(ranks) or self.adapters is None:
            return wire / link
        network = c.network_gb_s * 1e9
        # An all_to_all sends to each rank separately, so only the messages to other nodes use the adapters.
        if OPERATIONS[op].is_exchange:
            to_one_rank = wire / (len(ranks) - 1)
            outside = to_one_rank * (len(ranks) - on_node)
            return max(to_one_rank * (on_node - 1) / link, outside / (network / self.node_size))
        return wire / min(link, network * on_node / self.node_size)

    def _deliver(self) -> None:
        """Pass each delayed message to torch when it is due. Runs in a thread for the life of the process."""
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    wait = None if not self._due else max(0.0, self._due[0][0] - time.monotonic())
                    self._changed.wait(wait)
                _, _, later = heapq.heappop(self._due)
            later.begin()


def emulate_links(mesh: Mesh, config: EmulateConfig) -> None:
    """Send all further calls of a mesh through emulated links. All its ranks must call this together."""
    if mesh.world.alone or dist.get_backend() == "fake":
        return
    node_size = mesh.layout.node_size or mesh.layout.world
    adapters = None
    if config.network_gb_s and node_size < mesh.layout.world:
        # The number gives the ranks of a run one name for their shared file, which no other run uses.
        number = torch.tensor([random.getrandbits(48)])
        mesh.world.broadcast(number)
        meet = partial(mesh.world.all_reduce, torch.zeros(1))
        adapters = Adapters.open(int(number), mesh.rank // node_size, meet)  # type: ignore[arg-type]
    mesh.use_links(EmulatedLinks(config, mesh.rank, node_size, adapters))
