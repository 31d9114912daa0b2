"""Measure a device's compute time and its waits for communication in every tenth step. Does not import torch.

On an accelerator the host launches work without waiting for it, so the host's clock shows neither time. In every tenth
step, marks are recorded on the compute stream around each wait; between the two the stream does nothing but wait. They
are read two steps later, when the device has long passed them, so that the host never waits for them. Recording two
marks takes the host some 10 us per wait in one step of ten, while the device works on earlier launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwright.spec.traffic.ledger import Ledger

EVERY = 10  # One step in EVERY is timed.
FIRST = 5  # The first timed step; earlier steps fill caches that later ones reuse.
# The number of steps after which the marks are read. It is the same on all ranks, since their figures are summed. The
# host reads a step's numbers, the last work of that step, before it launches the step after the next one.
READ_DELAY = 2


class Timer(Protocol):
    """The part of `device.StreamTimer` that this module uses."""

    def mark(self) -> Any: ...
    def seconds(self, begin: Any, end: Any) -> float | None: ...
    def forget(self, marks: Iterable[Any]) -> None: ...


@dataclass
class TimedStep:
    """The marks of one step: at its begin and end, and around each wait, with the axis of the communication."""

    begin: Any
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)
    data_us: int = 0


@dataclass(frozen=True)
class StepWaits:
    """The microseconds of a timed step: waits by axis, the rest of the device's time, and the host's wait for data."""

    waited_us: dict[str, int]
    busy_us: int
    data_us: int


class SampledWaits:
    """Times the waits of one step in `EVERY`. In those steps it observes the ledger."""

    def __init__(self, timer: Timer, ledger: Ledger) -> None:
        self.timer, self.ledger = timer, ledger
        self.launched = 0
        self._now: TimedStep | None = None
        self._unread: TimedStep | None = None

    def begin_step(self) -> None:
        """Start timing if this step is to be timed. Call it before the first work of each step."""
        self.launched += 1
        if self.launched % EVERY == FIRST:
            self._now = TimedStep(self.timer.mark())
            self.ledger.stream_waits = self

    def begin_wait(self) -> Any:
        return self.timer.mark()

    def end_wait(self, axis: str, begun: Any) -> None:
        assert self._now is not None
        self._now.waits.append((axis, begun, self.timer.mark()))

    def end_step(self, data_us: int) -> StepWaits | None:
        """Stop timing after the last work of a step. Return the figures of the last timed step if they are due now."""
        if self._now is not None:
            self._now.end, self._now.data_us = self.timer.mark(), data_us
            self._unread, self._now, self.ledger.stream_waits = self._now, None, None
        due = self.launched >= FIRST and (self.launched - FIRST) % EVERY == READ_DELAY
        step, self._unread = (self._unread, None) if due else (None, self._unread)
        return None if step is None else self._read(step)

    def _read(self, step: TimedStep) -> StepWaits | None:
        whole = self.timer.seconds(step.begin, step.end)
        if whole is None:
            # The device is more than two steps behind. Its marks are not forgotten, since they may not be reused yet.
            return None
        waited: dict[str, float] = defaultdict(float)
        for axis, begin, end in step.waits:
            waited[axis] += self.timer.seconds(begin, end) or 0.0
        self.timer.forget([step.begin, step.end, *(mark for _, *marks in step.waits for mark in marks)])
        busy = max(0.0, whole - sum(waited.values()))
        return StepWaits({axis: round(s * 1e6) for axis, s in waited.items()}, max(1, round(busy * 1e6)), step.data_us)
