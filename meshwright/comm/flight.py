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


@dataclass(eq=False, slots=True)
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
    # Whether so many calls were launched after it that the record's last ones no longer hold it.
    early: bool = False

    def describe(self) -> str:
        return describe_call(self.plain())

    def plain(self, with_ranks: bool = True) -> dict[str, Any]:
        """Return the call as values that JSON can hold."""
        now, since = time.monotonic(), self.since
        return {
            "group": self.group, "axis": self.axis, "op": self.op, "number": self.number, "phase": self.phase,
            "layer": self.layer, "payload": self.payload, "ranks": list(self.ranks) if with_ranks else [],
            "peer": self.peer,
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
    """The calls of a rank that a hang may be explained with, and how many calls each group has begun.

    On an accelerator the host launches calls far ahead of the device, so the call that holds it up may lie hundreds of
    calls before the last one. The record is a line of three parts, by age: a few calls that the device has passed, the
    calls from the first that it has not reached, and the last `keep` calls. Calls in flight are in `open` besides.
    """

    def __init__(self, keep: int = 64, unreached: int = 4096, passed: int = 8) -> None:
        self.last: deque[RecordedCall] = deque(maxlen=keep)
        self.unreached: deque[RecordedCall] = deque()
        self.passed: deque[RecordedCall] = deque(maxlen=passed)
        self.most_unreached = unreached
        self.open: dict[int, RecordedCall] = {}
        self.numbers: dict[str, int] = {}
        self.spare_events: list[Any] = []

    def begin(self, call: RecordedCall) -> RecordedCall:
        """Numbers a call and notes it as under way."""
        call.number = self.numbers[call.group] = self.numbers.get(call.group, 0) + 1
        call.since = call.started
        if len(self.last) == self.last.maxlen:
            self._make_room()
        self.last.append(call)
        self.open[id(call)] = call
        return call

    def _make_room(self) -> None:
        """Takes the oldest call out of `last`. One whose event the device has not reached is kept, and so is what comes
        after it; where there are too many, the oldest stay: one of them is the cause of a hang."""
        oldest = self.last.popleft()
        oldest.early = id(oldest) in self.open
        while self.unreached and not self.unreached[0].holds_up_program():
            self._pass(self.unreached.popleft())
        if oldest.early:
            return  # `open` has it, and `end` sees where it belongs
        if not self.unreached and not oldest.holds_up_program():
            self._pass(oldest)
        else:
            self._keep(oldest)

    def _keep(self, call: RecordedCall) -> None:
        if len(self.unreached) < self.most_unreached:
            self.unreached.append(call)
        else:
            self._give_back_event(call)

    def _pass(self, call: RecordedCall) -> None:
        self._give_back_event(call)
        self.passed.append(call)

    def _give_back_event(self, call: RecordedCall) -> None:
        """Lets a later call use the event: making a new one for every call would cost the host more."""
        event, call.event = call.event, None
        if event is not None:
            self.spare_events.append(event)

    def end(self, call: RecordedCall) -> float:
        """Marks a call as done and returns the seconds for which it was in flight."""
        del self.open[id(call)]
        call.ended = time.monotonic()
        if call.early and call.event is not None:
            # It was launched more than `keep` calls ago and is waited for only now.
            self._keep(call)
        return call.ended - call.started

    def holding(self, longer_than: float = 0.0) -> RecordedCall | None:
        """Returns the call that has held up the program longest, if for at least `longer_than` seconds."""
        limit = time.monotonic() - longer_than
        marked = [call for call in (*list(self.unreached), *list(self.last)) if call.event is not None]
        calls = list(self.open.values()) + marked
        old = [(since, i) for i, call in enumerate(calls) if (since := call.since) is not None and since <= limit]
        return next((calls[i] for _, i in sorted(old) if calls[i].holds_up_program()), None)

    def begun(self, held: RecordedCall | None) -> dict[str, int]:
        """Returns how many calls of each group have begun where `held` holds up this rank. The host of an accelerator
        launches calls ahead: those that it launched after the stream began to wait have not begun there."""
        numbers = dict(self.numbers)
        if held is None or (since := held.since) is None:
            return numbers
        for call in (*list(self.unreached), *list(self.last)):
            if call is not held and call.started > since:
                # The main thread may have begun the first call of a group after `numbers` was copied.
                numbers[call.group] = min(numbers.get(call.group, call.number), call.number - 1)
        return numbers

    def around(self, group: str, number: int, reach: int = 4) -> list[RecordedCall]:
        """Returns the calls of a group that are recorded, from `reach` before `number` to as many after it."""
        known = (*list(self.passed), *list(self.unreached), *list(self.last))
        return [call for call in known if call.group == group and abs(call.number - number) <= reach]
