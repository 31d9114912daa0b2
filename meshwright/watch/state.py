"""Determines the state of a run (running, finished, stopped, hung, gone, ...) and the alerts for its user. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import plural
from meshwright.record.run_notes import BAD_STEP, FAULT, ROLLBACK
from meshwright.record.run_owner import who_trains
from meshwright.record.speed import BEGINS
from meshwright.show.units import clock, percent
from meshwright.watch.run_parts import RunView

# A rank that computes longer than this many times the median is reported as slow.
SLOW_RANK = 1.25
# A run is silent if no step ended within the time of this many steps, and within this many seconds.
SILENT_STEPS, SILENT_S = 10, 60.0

Alert = dict[str, str]


def state_of(
    folder: Path, events: Sequence[Mapping[str, Any]], hang: Mapping[str, Any], last: float | None, step_s: float
) -> dict[str, str]:
    """Return a run's state: its `kind` and an explanatory `text`.

    The kinds are running, silent, finished, stopped, hung, failed and gone. `last` is the time at which the newest step
    ended, and `step_s` the time of a step.
    """
    owner_state, owner = who_trains(folder)
    began = max((e["time"] for e in events if e.get("kind") in BEGINS), default=0.0)
    # A hang recorded before the newest process started is that of an earlier one.
    if hang and float(hang.get("time", 0.0)) > began and owner_state != "alive":
        return {"kind": "hung", "text": str(hang.get("text", ""))}
    ago = time.time() - last if last else None
    if owner_state in ("alive", "unknown"):
        where = f"process {owner.pid} on {owner.host}" if owner else ""
        if ago is not None and ago > max(SILENT_S, SILENT_STEPS * step_s):
            return {"kind": "silent", "text": f"no step for {clock(ago)}; {where}"}
        return {"kind": "running", "text": where}
    ending = next((e for e in reversed(events) if e.get("kind") in ("end", "failure", *BEGINS)), None)
    kind, text = (str(ending.get("kind")), str(ending.get("text", ""))) if ending else ("", "")
    if kind == "failure":
        return {"kind": "failed", "text": text}
    if kind == "end":
        return {"kind": "finished" if text.startswith("finished") else "stopped", "text": text}
    if owner_state == "gone":
        return {"kind": "gone", "text": "its process ended without a word: killed, or the machine went down"}
    return {"kind": "stopped", "text": "no process trains in this folder"}


def alerts_of(view: RunView, ranks: Mapping[str, Any], state: Mapping[str, str], steps: int) -> list[Alert]:
    """Return the alerts for the run's user, the worst first."""
    alerts: list[Alert] = []

    def add(level: str, text: str, panel: str) -> None:
        alerts.append({"level": level, "text": text, "panel": panel})

    if state["kind"] in ("hung", "failed", "gone", "silent"):
        add("bad", f"{state['kind']}: {state['text']}", "events")
    if view.not_finite:
        add("bad", f"the loss was not finite in {plural(view.not_finite, 'step')}", "loss")
    if view.skipped:
        add("warn", f"{plural(view.skipped, 'step')} skipped ({percent(view.skipped / max(1, steps))})", "loss")
    for kind, noun in ((FAULT, "fault"), (BAD_STEP, "bad step"), (ROLLBACK, "rollback")):
        if noted := view.noted(kind):
            last = f"{plural(len(noted), noun)}, the last: {noted[-1].get('text', '')}"
            add("bad" if kind == FAULT else "warn", last, "events")
    if slow := slow_rank(ranks.get("busy_s") or []):
        add("warn", f"rank {slow[0]} {slow[1]}", "ranks")
    if restarts := view.noted("restart"):
        add("warn", f"restarted {plural(len(restarts), 'time')}", "events")
    if lost := sum(event.get("lost", 0) for event in view.noted("resume")):
        add("info", f"{plural(lost, 'step')} trained again after resumes", "loss")
    return alerts


def slow_rank(busy: Sequence[float]) -> tuple[int, str] | None:
    """Return the rank that computes much longer than the others, and how much longer in words; None if there is none.

    `busy` gives the seconds that each rank computed.
    """
    median = sorted(busy)[len(busy) // 2] if busy else 0.0
    most = max(busy, default=0.0)
    if len(busy) < 2 or median <= 0 or most <= SLOW_RANK * median:
        return None
    return list(busy).index(most), f"computes {most / median:.2f} times as long as the median"
