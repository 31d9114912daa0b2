"""The flight record: the last calls of a rank, so that a hang can name the op and who is missing.

The main thread writes it and the watchdog's threads read it. There is no lock: every read is one step of the
interpreter (a copy of a dict's values or of a deque), and nothing is read that could be half written.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class RecordedCall:
    """One collective or transfer. `group` names a sequence of calls that all participants count alike: a group's
    collectives, or one direction between two ranks. `number` is this call's place in it on this rank."""

    group: str
    axis: str
    op: str
    phase: str
    layer: int | None
    payload: int
    ranks: Sequence[int] = ()
    peer: int | None = None
    number: int = 0
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    # Since when this call holds up the program: while it is being launched, and while the program waits for it.
    since: float | None = None
    # On an accelerator `wait` only orders the stream; this event marks the place (`query()` says if it was reached).
    event: Any = None

    def describe(self) -> str:
        return describe_call(self.plain())

    def plain(self) -> dict[str, Any]:
        """Returns the call as values that JSON can hold."""
        now, since = time.monotonic(), self.since
        return {
            "group": self.group, "axis": self.axis, "op": self.op, "number": self.number, "phase": self.phase,
            "layer": self.layer, "payload": self.payload, "ranks": list(self.ranks), "peer": self.peer,
            "age_s": now - self.started, "held_s": None if since is None else now - since,
            "done": self.ended is not None,
        }  # fmt: skip

    def holds_up_program(self) -> bool:
        """Whether the program, or the device behind it, can't continue before this call ends."""
        event = self.event
        if event is None:
            return self.ended is None and self.since is not None
        try:
            reached = bool(event.query())
        except RuntimeError:  # the device can't say (it failed, or captures a graph)
            return False
        # An event is used again for a later call once this one is forgotten; then its answer is not about this call.
        return not reached and self.event is event


def describe_call(call: dict[str, Any]) -> str:
    """Returns e.g. `all_reduce number 12 over dp (reduce, 4194304 bytes)`, from a call's plain form."""
    toward = {"send": " to", "receive": " from"}.get(call["op"], " with")
    peer = "" if call["peer"] is None else f"{toward} rank {call['peer']}"
    where = "" if call["layer"] is None else f", layer {call['layer']}"
    inside = f"{call['phase']}{where}, {call['payload']} bytes"
    return f"{call['op']} number {call['number']} over {call['axis']}{peer} ({inside})"


class FlightRecord:
    """The last `keep` calls, those still in flight, and how many calls each group has begun."""

    def __init__(self, keep: int = 64) -> None:
        self.last: deque[RecordedCall] = deque(maxlen=keep)
        self.open: dict[int, RecordedCall] = {}
        self.numbers: dict[str, int] = {}
        self.spare_events: list[Any] = []

    def begin(self, call: RecordedCall) -> RecordedCall:
        """Numbers a call and notes it as under way."""
        call.number = self.numbers[call.group] = self.numbers.get(call.group, 0) + 1
        call.since = call.started
        if len(self.last) == self.last.maxlen:
            forgotten = self.last[0]
            event, forgotten.event = forgotten.event, None
            if event is not None:
                self.spare_events.append(event)
        self.last.append(call)
        self.open[id(call)] = call
        return call

    def end(self, call: RecordedCall) -> float:
        """Marks a call as done and returns the seconds for which it was in flight."""
        del self.open[id(call)]
        call.ended = time.monotonic()
        return call.ended - call.started

    def holding(self, longer_than: float = 0.0) -> RecordedCall | None:
        """Returns the call that has held up the program longest, if for at least `longer_than` seconds."""
        limit = time.monotonic() - longer_than
        calls = list(self.open.values()) + [call for call in list(self.last) if call.event is not None]
        old = [(since, i) for i, call in enumerate(calls) if (since := call.since) is not None and since <= limit]
        return next((calls[i] for _, i in sorted(old) if calls[i].holds_up_program()), None)
