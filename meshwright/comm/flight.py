"""The flight record: the last calls of a rank, so that a hang can name the op and who is missing."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """One collective or transfer. `number` counts the calls of its group on this rank."""

    group: str
    axis: str
    op: str
    number: int
    phase: str
    layer: int | None
    payload: int
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def describe(self) -> str:
        where = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.op} number {self.number} over {self.axis} ({self.phase}{where}, {self.payload} bytes)"

    def plain(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "group": self.group, "axis": self.axis, "op": self.op, "number": self.number, "phase": self.phase,
            "layer": self.layer, "payload": self.payload, "age_s": now - self.started, "done": self.ended is not None,
        }  # fmt: skip


class FlightRecord:
    """The last `keep` calls, those still in flight, and how many calls each group has begun."""

    def __init__(self, keep: int = 64) -> None:
        self.last: deque[Call] = deque(maxlen=keep)
        self.open: dict[int, Call] = {}
        self.numbers: dict[str, int] = {}
        self._ids = itertools.count()

    def begin(self, group: str, axis: str, op: str, phase: str, layer: int | None, payload: int) -> int:
        number = self.numbers[group] = self.numbers.get(group, 0) + 1
        call = Call(group, axis, op, number, phase, layer, payload)
        key = next(self._ids)
        self.last.append(call)
        self.open[key] = call
        return key

    def end(self, key: int) -> float:
        """Marks a call done; the seconds it was in flight."""
        call = self.open.pop(key)
        call.ended = time.monotonic()
        return call.ended - call.started

    def oldest(self) -> Call | None:
        return min(list(self.open.values()), key=lambda call: call.started, default=None)
