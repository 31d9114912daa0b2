"""Timelines as a trace that Perfetto and Chrome's tracing page open: the trace event format, as JSON. No torch.

One process per pipeline rank, with a track for computes, one for sends and one for what is done beside and after the
pipeline. A step that was measured has one more, for what a rank waited for, and its sends are as long as it takes to
post them; else the simulated and the measured trace can be laid over each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.schedule.simulate import Simulation
from meshwright.schedule.table import MEANING, RECEIVES, SENDS, Action

TRACKS = {"compute": 0, "send": 1, "step": 2, "wait": 3}
MICROSECONDS = 1e6
# What follows the pipeline in a step.
REDUCED, UPDATED = "gradients and parameters (dp)", "optimizer"


@dataclass(frozen=True)
class Span:
    """Something a rank does from `start` to `end`, in seconds."""

    rank: int
    track: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


def span_name(action: Action) -> str:
    letter = MEANING[action.op].letter if action.op in MEANING else f"{action.op.value} "
    return f"{letter}{action.micro_batch}"


def spans_of(simulation: Simulation) -> Iterator[Span]:
    """The computes and sends of a simulated table; a transfer is shown once, at its sender."""
    for rank, row in enumerate(simulation.ranks):
        for timed in row:
            action = timed.action
            if action.op in RECEIVES:
                continue
            args = {"micro_batch": action.micro_batch, "chunk": action.chunk}
            if action.op in SENDS:
                args["to"] = action.peer if action.peer is not None else -1
                yield Span(rank, "send", span_name(action), timed.start, timed.end, args)
            else:
                yield Span(rank, "compute", span_name(action), timed.start, timed.end, args)


def trace(spans: Iterable[Span], name: str = "") -> dict[str, Any]:
    """The document: complete events ("X") in microseconds, and the names of processes and tracks ("M")."""
    events: list[dict[str, Any]] = []
    seen: set[tuple[int, str]] = set()
    for span in spans:
        tid = TRACKS[span.track]
        events.append(
            {
                "ph": "X", "pid": span.rank, "tid": tid, "name": span.name, "cat": span.track,
                "ts": span.start * MICROSECONDS, "dur": (span.end - span.start) * MICROSECONDS, "args": dict(span.args),
            }
        )  # fmt: skip
        seen.add((span.rank, span.track))
    for rank in sorted({rank for rank, _ in seen}):
        events.append(_meta("process_name", rank, 0, f"pipeline rank {rank}"))
    for rank, track in sorted(seen):
        events.append(_meta("thread_name", rank, TRACKS[track], track))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": name}}


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": {"name": name}}


def trace_json(spans: Iterable[Span], name: str = "") -> str:
    return json.dumps(trace(spans, name))
