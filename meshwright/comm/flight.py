"""The flight record: the last calls of a rank, so that a hang report can name the op and the missing ranks.

The main thread writes it and the watchdog's threads read it. There is no lock: every read is one atomic step of the
interpreter (a copy of a dict's values or of a deque), so no reader sees a half-written record.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One collective or transfer.

    `group` names a sequence of calls that all participants number alike: the collectives of a group, or the transfers
    in one direction between two ranks. `number` is the position of this call in the sequence, counted on this rank.
    """

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
    # The time since which this call holds up the program: during its launch, and while the program waits for it.
    since: float | None = None
    # On an accelerator `wait` only orders the stream. This event marks the place in the stream: `query()` returns True
    # once the device has reached it.
    event: Any = None
    # True if the call was still in flight when later calls pushed it out of `FlightRecord.last`.
    early: bool = False

    def describe(self) -> str:
        return describe_call(self.to_plain())

    def to_plain(self, with_ranks: bool = True) -> dict[str, Any]:
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
        """Return True if the program, or the device behind it, can't continue before this call ends."""
        event = self.event
        if event is None:
            return self.ended is None and self.since is not None
        try:
            reached = bool(event.query())
        except RuntimeError:  # The device can't answer: it failed, or it captures a graph.
            return False
        # The main thread may have reused the event for a later call meanwhile. Then its answer is not about this call.
        return not reached and self.event is event


def describe_call(call: dict[str, Any]) -> str:
    """Return e.g. `all_reduce number 12 over dp (reduce, 4194304 bytes)`, from a call's plain form."""
    toward = {"send": " to", "receive": " from"}.get(call["op"], " with")
    peer = "" if call["peer"] is None else f"{toward} rank {call['peer']}"
    where = "" if call["layer"] is None else f", layer {call['layer']}"
    inside = f"{call['phase']}{where}, {call['payload']} bytes"
    return f"{call['op']} number {call['number']} over {call['axis']}{peer} ({inside})"


class FlightRecord:
    """The calls of a rank that may explain a hang, and the number of calls that each group has begun.

    On an accelerator the host launches calls far ahead of the device. The call that holds up the device may be hundreds
    of calls before the last one. The record therefore has three parts, from old to new: `passed`, a few calls that the
    device has passed; `unreached`, the calls from the first one that it has not reached; and `last`, the last `keep`
    calls. Calls in flight are also in `open`.
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
        """Number a call and record it as in flight."""
        call.number = self.numbers[call.group] = self.numbers.get(call.group, 0) + 1
        call.since = call.started
        if len(self.last) == self.last.maxlen:
            self._make_room()
        self.last.append(call)
        self.open[id(call)] = call
        return call

    def _make_room(self) -> None:
        """Move the oldest call out of `last`. If the device has not reached its event, it goes to `unreached`, and so
        do all calls after it. A full `unreached` keeps its oldest calls, because one of them is the cause of a hang."""
        oldest = self.last.popleft()
        oldest.early = id(oldest) in self.open
        while self.unreached and not self.unreached[0].holds_up_program():
            self._pass(self.unreached.popleft())
        if oldest.early:
            return  # It is still in `open`, and `end` will decide about it.
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
        """Let a later call reuse the event, which costs the host less than a new event per call."""
        event, call.event = call.event, None
        if event is not None:
            self.spare_events.append(event)

    def end(self, call: RecordedCall) -> float:
        """Mark a call as done and return the seconds for which it was in flight."""
        del self.open[id(call)]
        call.ended = time.monotonic()
        if call.early and call.event is not None:
            # It was launched more than `keep` calls ago, but the program waits for it only now.
            self._keep(call)
        return call.ended - call.started

    def blocking_call(self, longer_than: float = 0.0) -> RecordedCall | None:
        """Return the call that has held up the program longest, or None if none did for `longer_than` seconds."""
        limit = time.monotonic() - longer_than
        marked = [call for call in (*list(self.unreached), *list(self.last)) if call.event is not None]
        calls = list(self.open.values()) + marked
        old = [(since, i) for i, call in enumerate(calls) if (since := call.since) is not None and since <= limit]
        return next((calls[i] for _, i in sorted(old) if calls[i].holds_up_program()), None)

    def calls_begun(self, blocking: RecordedCall | None) -> dict[str, int]:
        """Return the number of calls that each group has begun at the point where `blocking` holds up this rank.

        The host of an accelerator launches calls ahead. Those that it launched after the stream began to wait have not
        begun on the device, so they are not counted.
        """
        numbers = dict(self.numbers)
        if blocking is None or (since := blocking.since) is None:
            return numbers
        for call in (*list(self.unreached), *list(self.last)):
            if call is not blocking and call.started > since:
                # The main thread may have begun the first call of a group after `numbers` was copied.
                numbers[call.group] = min(numbers.get(call.group, call.number), call.number - 1)
        return numbers

    def around(self, group: str, number: int, reach: int = 4) -> list[RecordedCall]:
        """Return the recorded calls of a group whose numbers are at most `reach` away from `number`."""
        known = (*list(self.passed), *list(self.unreached), *list(self.last))
        return [call for call in known if call.group == group and abs(call.number - number) <= reach]
