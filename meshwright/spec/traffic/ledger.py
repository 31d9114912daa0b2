"""The ledger: every collective and send of this rank, counted by phase, axis, op and layer.

*Payload* is the size of the whole logical tensor: the tensor of an all_reduce or broadcast, the output of an
all_gather, the input of a reduce_scatter or all_to_all, the message of a send. *Wire* is the number of bytes that one
rank sends by the ring algorithm. For an all_to_all of uneven splits it is the input without the rank's own split.
Groups of one rank record nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Operation(NamedTuple):
    """The facts about a collective or a send that its bytes and its seconds depend on."""

    # The fraction of the payload, as (numerator, denominator), that each of n ranks puts on the wire. Integers keep the
    # byte counts exact.
    wire: Callable[[int], tuple[int, int]]
    rounds: int = 1  # the times that data go round a ring of the ranks
    is_message: bool = False  # one rank sends to one other
    is_exchange: bool = False  # every rank sends a different message to every other
    is_sum: bool = False


OPERATIONS = {
    "all_reduce": Operation(lambda n: (2 * (n - 1), n), rounds=2, is_sum=True),
    "all_gather": Operation(lambda n: (n - 1, n)),
    "reduce_scatter": Operation(lambda n: (n - 1, n), is_sum=True),
    "all_to_all": Operation(lambda n: (n - 1, n), is_exchange=True),
    "broadcast": Operation(lambda n: (1, 1)),
    "send": Operation(lambda n: (1, 1), is_message=True),
}

PHASES_OUTSIDE_STEPS = ("startup", "validation")


def bus_factor(op: str, size: int) -> float:
    """Return the bytes on the wire per byte of payload. Payload per second times this factor is the link's rate."""
    over, under = OPERATIONS[op].wire(size)
    return over / under


def wire_bytes(op: str, payload: int, size: int) -> int:
    over, under = OPERATIONS[op].wire(size)
    return payload * over // under


class StreamWaits(Protocol):
    """An observer that times how long a device's stream waits for calls, which the host's clock does not show."""

    def begin_wait(self) -> Any: ...
    def end_wait(self, axis: str, begun: Any) -> None: ...


class LedgerEntry(NamedTuple):
    """The attributes by which calls are counted. Calls that agree in all of them are added up."""

    phase: str
    axis: str
    op: str
    layer: int | None
    crosses_node: bool


@dataclass
class CallTotals:
    """The sums over the calls of one or more entries."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0

    def count(self, payload: int, wire: int) -> None:
        """Add one call."""
        self.calls += 1
        self.payload_bytes += payload
        self.wire_bytes += wire

    def add(self, other: CallTotals) -> None:
        self.calls += other.calls
        self.payload_bytes += other.payload_bytes
        self.wire_bytes += other.wire_bytes
        self.seconds += other.seconds


class Ledger:
    """Counts since the last `clear`. The phase and the layer are contexts around the calls, never arguments."""

    def __init__(self) -> None:
        self.entries: dict[LedgerEntry, CallTotals] = defaultdict(CallTotals)
        self.waited: dict[str, float] = defaultdict(float)  # seconds that the host waited for calls, by axis
        self.waited_in: dict[str, float] = defaultdict(float)  # the same, by the phase in which it waited
        self.stream_waits: StreamWaits | None = None  # set only in steps in which a device's waits are timed
        self.current_phase = "startup"
        self.current_layer: int | None = None

    @property
    def validating(self) -> bool:
        return self.current_phase == "validation"

    def totals_of(self, axis: str, op: str, crosses_node: bool = False) -> CallTotals:
        """Return the totals to which a call made now is added. They belong to its entry until the next `clear`."""
        return self.entries[LedgerEntry(self.current_phase, axis, op, self.current_layer, crosses_node)]

    def record(
        self, axis: str, op: str, payload: int, size: int, crosses_node: bool = False, wire: int | None = None
    ) -> CallTotals:
        """Count one call and return the totals to which it was added. `wire` replaces the bytes on the wire that follow
        from the payload."""
        tally = self.totals_of(axis, op, crosses_node)
        tally.count(payload, wire_bytes(op, payload, size) if wire is None else wire)
        return tally

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = before

    @contextmanager
    def layer(self, number: int | None) -> Iterator[None]:
        before, self.current_layer = self.current_layer, number
        try:
            yield
        finally:
            self.current_layer = before

    def totals(self, by: str = "axis") -> defaultdict[str, CallTotals]:
        """Return the totals by a field of LedgerEntry, over the phases of training steps."""
        sums: defaultdict[str, CallTotals] = defaultdict(CallTotals)
        for entry, tally in self.entries.items():
            if entry.phase not in PHASES_OUTSIDE_STEPS:
                sums[str(getattr(entry, by))].add(tally)
        return sums

    def clear(self) -> None:
        self.entries, self.waited, self.waited_in = defaultdict(CallTotals), defaultdict(float), defaultdict(float)
