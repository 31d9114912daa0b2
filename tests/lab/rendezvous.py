"""A transport under NCCL's rules in one process: each rank is a thread, and deadlocks are detected without a timeout.

A transfer ends only when both ends have been posted. Unbatched transfers between two ranks go through one queue for
both directions. The first of them creates the pair's communicator, and returns only when the other rank makes its first
one too. The transfers of a batch are unordered. A rank's batches run one after the other over the group's communicator,
which is created once all ranks have called. Data is moved, so that results can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.flight import FlightRecord
from meshwright.comm.group import Group
from meshwright.spec.traffic.ledger import Ledger


class Deadlock(Exception):
    """Every rank that has not ended waits for another one."""


class Transfer:
    """One end of a transfer."""

    def __init__(self, op: str, tensor: Tensor, rank: int, peer: int) -> None:
        self.op, self.tensor, self.rank, self.peer, self.done = op, tensor, rank, peer, False

    def meets(self, other: Transfer) -> bool:
        opposite = {self.op, other.op} == {"send", "receive"}
        return opposite and self.peer == other.rank and other.peer == self.rank and not (self.done or other.done)


class Posted(NamedTuple):
    """A transfer as `batch_isend_irecv` takes it."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any


class Work:
    def __init__(self, transport: Transport, rank: int, item: list[Transfer]) -> None:
        self.transport, self.rank, self.item = transport, rank, item

    def wait(self) -> None:
        self.transport.wait_until(self.rank, lambda: all(transfer.done for transfer in self.item))


class Transport:
    """The connections of `size` ranks. `dist` replaces torch.distributed inside `Group`."""

    def __init__(self, size: int) -> None:
        self.size, self.changed = size, threading.Condition()
        self.queues: dict[tuple[int, Any], list[list[Transfer]]] = {}  # By rank and communicator.
        self.arrived: dict[Any, set[int]] = {}  # The ranks that have started to create a communicator.
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.ended: set[int] = set()
        self.dist = SimpleNamespace(
            isend=self.isend, irecv=self.irecv, batch_isend_irecv=self.batch, P2POp=Posted, ReduceOp=dist.ReduceOp
        )

    def isend(self, tensor: Tensor, peer: int, group: int) -> Work:
        return self._alone(Transfer("send", tensor, group, peer))

    def irecv(self, tensor: Tensor, peer: int, group: int) -> Work:
        return self._alone(Transfer("receive", tensor, group, peer))

    def batch(self, posted: list[Posted]) -> list[Work]:
        rank = posted[0].group
        ops = {self.isend: "send", self.irecv: "receive"}
        item = [Transfer(ops[each.op], each.tensor, rank, each.peer) for each in posted]
        return [self._post(rank, "group", set(range(self.size)), item)]

    def _alone(self, transfer: Transfer) -> Work:
        pair = frozenset((transfer.rank, transfer.peer))
        return self._post(transfer.rank, pair, set(pair), [transfer])

    def _post(self, rank: int, communicator: Any, members: set[int], item: list[Transfer]) -> Work:
        with self.changed:
            self.queues.setdefault((rank, communicator), []).append(item)
            arrived = self.arrived.setdefault(communicator, set())
            arrived.add(rank)
            self._move(communicator)
            self.changed.notify_all()
        self.wait_until(rank, lambda: arrived >= members)
        return Work(self, rank, item)

    def _move(self, communicator: Any) -> None:
        """Move the data of all transfers at the heads of the queues whose two ends have been posted."""
        moved = True
        while moved:
            heads = [queue[0] for (_, of), queue in self.queues.items() if of == communicator and queue]
            pairs = [(a, b) for one in heads for a in one for other in heads for b in other if a.meets(b)]
            moved = bool(pairs)
            for a, b in pairs:
                if a.meets(b):  # Each pair is listed twice, once from either end.
                    source, target = (a, b) if a.op == "send" else (b, a)
                    target.tensor.copy_(source.tensor)
                    a.done = b.done = True
            for (_, of), queue in self.queues.items():
                if of == communicator and queue and all(transfer.done for transfer in queue[0]):
                    queue.pop(0)

    def wait_until(self, rank: int, reached: Callable[[], bool]) -> None:
        with self.changed:
            self.waiting[rank] = reached
            while not reached():
                # A rank is stuck if it waits for a condition that still does not hold. If all are, no thread can change
                # that.
                stuck = all(r in self.ended or (r in self.waiting and not self.waiting[r]()) for r in range(self.size))
                if stuck:
                    self.changed.notify_all()
                    raise Deadlock(f"rank {rank}")
                self.changed.wait()
            del self.waiting[rank]

    def run(self, body: Callable[[Group], Any]) -> list[Any]:
        """Call `body` on every rank with the group of all ranks and return the results. Raise Deadlock if the ranks
        lock.
        """
        results: dict[int, Any] = {}

        def rank_body(place: int) -> None:
            # The transport is given the calling rank in place of torch's process group.
            group = Group("dp", tuple(range(self.size)), place, place, Ledger(), FlightRecord())
            try:
                results[place] = body(group)
            except BaseException as error:
                results[place] = error
            with self.changed:
                self.ended.add(place)
                self.waiting.pop(place, None)
                self.changed.notify_all()

        threads = [threading.Thread(target=rank_body, args=(place,)) for place in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for place in range(self.size):
            if isinstance(results[place], BaseException):
                raise results[place]
        return [results[place] for place in range(self.size)]
