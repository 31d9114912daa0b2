"""Timelines as traces in the trace event format (JSON), which Perfetto and Chrome's tracing page open. No torch.

Each pipeline rank is a process with one track for computes, one for sends, and one for the rest of the step. The trace
of a measured step has one more track, for a rank's waits, and its sends only last as long as posting them takes. In all
other respects a simulated and a measured trace can be compared directly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from meshwright.spec.schedule.simulate import Simulation
from meshwright.spec.schedule.table import MEANING, RECEIVES, SENDS, Action

if TYPE_CHECKING:
    from meshwright.device import Device

TRACKS = {"compute": 0, "send": 1, "step": 2, "wait": 3}
MICROSECONDS = 1e6
# The names of the spans that follow the pipeline in a step.
REDUCED, UPDATED = "gradients and parameters (dp)", "optimizer"


@dataclass(frozen=True)
class Span:
    """An activity of a rank from `start` to `end`, in seconds."""

    rank: int
    track: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


class Recorder:
    """A recorder of one pipeline rank's activities in a step, with the times at which its device ran them."""

    def __init__(self, rank: int, device: Device) -> None:
        # Importing this loads torch, which reading a trace must not do.
        from meshwright.device import Clock

        self.rank, self.device, self.clock = rank, device, Clock(device)
        self._marks: list[tuple[str, str, Any, Any, dict[str, Any]]] = []

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self._marks.append((track, name, begin, self.clock.mark(), args))

    def spans(self) -> list[Span]:
        """Return all recorded spans, in seconds of this machine's clock. Waits for the device."""
        self.device.synchronize()
        read = self.clock.read
        return [Span(self.rank, track, name, read(a), read(b), args) for track, name, a, b, args in self._marks]

    def packed(self) -> bytes:
        """Return all recorded spans as bytes, to be sent to another rank."""
        return json.dumps([asdict(span) for span in self.spans()]).encode()


def unpacked(texts: Iterable[bytes]) -> list[Span]:
    """Return the spans that several recorders packed, with times relative to the start of the first one."""
    spans = [Span(**fields) for text in texts for fields in json.loads(text)]
    first = min(span.start for span in spans)
    return [replace(span, start=span.start - first, end=span.end - first) for span in spans]


def span_name(action: Action) -> str:
    letter = MEANING[action.op].letter if action.op in MEANING else f"{action.op.value} "
    return f"{letter}{action.micro_batch}"


def spans_of(simulation: Simulation) -> Iterator[Span]:
    """Yield the computes and sends of a simulated table. A transfer is shown once, at its sender."""
    for rank, row in enumerate(simulation.ranks):
        for timed in row:
            action = timed.action
            if action.op in RECEIVES:
                continue
            args = {"micro_batch": action.micro_batch, "chunk": action.chunk}
            if action.op in SENDS:
                args["to"] = action.peer if action.peer is not None else -1
            track = "send" if action.op in SENDS else "compute"
            yield Span(rank, track, span_name(action), timed.start, timed.end, args)


def trace_json(spans: Iterable[Span], name: str = "", **more: int) -> str:
    """Return the JSON document: complete events ("X") in microseconds, and the names of processes and tracks ("M").

    `name` and `more` are stored as its `otherData`.
    """
    events: list[dict[str, Any]] = []
    names: dict[tuple[int, int, str], str] = {}
    for span in spans:
        tid = TRACKS[span.track]
        start, took = span.start * MICROSECONDS, (span.end - span.start) * MICROSECONDS
        details = {"name": span.name, "cat": span.track, "ts": start, "dur": took, "args": dict(span.args)}
        events.append({"ph": "X", "pid": span.rank, "tid": tid} | details)
        names[span.rank, 0, "process_name"] = f"pipeline rank {span.rank}"
        names[span.rank, tid, "thread_name"] = span.track
    for (pid, tid, kind), text in sorted(names.items()):
        events.append({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": {"name": text}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": name} | more})
