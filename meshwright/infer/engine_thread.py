"""The loop that owns the served model: it takes orders from any thread and gives each token to its listener.

With several tensor-parallel ranks, rank 0 sends the changes of the batch to all ranks before each pass, so that all run
the same passes. While there is nothing to do, the others wait for an announcement outside any collective.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from meshwright.comm.announce import Announcements
from meshwright.comm.group import Group
from meshwright.infer.batching import Batcher, Drawn, Order

LOOK_S = 0.2  # Seconds between two looks at whether to stop, while nothing is to be done.
BYTES = torch.uint8

Listener = Callable[[Drawn, bool], None]


class Engine:
    """The batcher of rank 0 with the listeners of its orders. `submit` and `cancel` may be called from any thread."""

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        self._changes: queue.SimpleQueue[tuple[Order, Listener] | int] = queue.SimpleQueue()
        self._listeners: dict[int, Listener] = {}
        self._lock = threading.Lock()
        self._orders = 0
        self._open = 0
        self.is_closed = False

    @property
    def open(self) -> int:
        """The number of orders that have not ended."""
        return self._open

    def submit(self, orders: list[tuple[dict[str, Any], Listener]]) -> list[int] | None:
        """Queue orders, given as the arguments of `Order` but the key, and return their keys.

        Return None if too many orders are open, or if the engine is closed.
        """
        with self._lock:
            if self.is_closed or self._open + len(orders) > self.most_waiting:
                return None
            self._open += len(orders)
            keys = list(range(self._orders, self._orders + len(orders)))
            self._orders += len(orders)
        for key, (given, listener) in zip(keys, orders, strict=True):
            self._changes.put((Order(key, **given), listener))
        return keys

    def close(self) -> bool:
        """Take no more orders, if none is open. Return whether the engine is closed."""
        with self._lock:
            self.is_closed = self.is_closed or not self._open
            return self.is_closed

    def cancel(self, key: int) -> None:
        """Drop an order whose listener no longer listens."""
        self._changes.put(key)

    def changes(self, wait: bool) -> dict[str, Any]:
        """Return the orders and cancellations since the last call. With `wait`, wait a moment for the first one."""
        orders: list[dict[str, Any]] = []
        cancelled: list[int] = []
        while True:
            try:
                change = self._changes.get(timeout=LOOK_S) if wait else self._changes.get_nowait()
            except queue.Empty:
                return {"orders": orders, "cancelled": cancelled}
            wait = False
            if isinstance(change, int):
                cancelled.append(change)
                self._ended(change)
            else:
                orders.append(asdict(change[0]))
                self._listeners[change[0].key] = change[1]

    def report(self, key: int, drawn: Drawn, is_last: bool) -> None:
        """Give a token to the listener of its order."""
        listener = self._listeners.get(key)
        if is_last:
            self._ended(key)
        if listener is not None:
            listener(drawn, is_last)

    def _ended(self, key: int) -> None:
        if self._listeners.pop(key, None) is not None:
            with self._lock:
                self._open -= 1


class RequestChannel:
    """Brings rank 0's changes to all ranks: by a broadcast while the model computes, else by an announcement."""

    def __init__(self, world: Group, rank: int, device: torch.device) -> None:
        self._world, self._rank, self._device = world, rank, device
        self._announced = Announcements(rank) if not world.alone else None

    def pass_on(self, changes: dict[str, Any], busy: bool) -> dict[str, Any]:
        if self._announced is None:
            return changes
        text = json.dumps(changes) if self._rank == 0 else ""
        text = self._broadcast(text) if busy else self._announced.next(text)
        received: dict[str, Any] = json.loads(text)
        return received

    def _broadcast(self, text: str) -> str:
        data = torch.tensor(list(text.encode()), dtype=BYTES, device=self._device)
        length = torch.tensor([len(data)], device=self._device)
        self._world.broadcast(length)
        if self._rank:
            data = torch.empty(int(length), dtype=BYTES, device=self._device)
        self._world.broadcast(data)
        return bytes(data.tolist()).decode()


def run_batches(batcher: Batcher, engine: Engine | None, channel: RequestChannel, stopped: Callable[[], bool]) -> None:
    """Run passes until rank 0 has `stopped` and no order is open. `engine` is None on the other ranks."""
    while True:
        busy = not batcher.is_idle
        changes: dict[str, Any] = {}
        if engine is not None:
            changes = engine.changes(wait=not busy)
            ends = stopped() and engine.close()
            if not busy and not any(changes.values()) and not ends:
                continue
            changes["ends"] = ends
        changes = channel.pass_on(changes, busy)
        for key in changes["cancelled"]:
            batcher.cancel(key)
        for given in changes["orders"]:
            batcher.add(Order(**{**given, "ids": tuple(given["ids"]), "ends": tuple(given["ends"])}))
        if changes["ends"]:
            return
        if not batcher.is_idle:
            batcher.step()
