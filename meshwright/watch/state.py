"""How a run stands: running, finished, stopped, hung or gone; and what of it needs a person's attention. No torch."""

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

SLOW_RANK = 1.25  # times the median's computing, from which on a rank is named
SILENT_STEPS, SILENT_S = 10, 60.0  # a run that wrote nothing for so many steps' time, and so long, is called silent

Alert = dict[str, str]


def state_of(
    folder: Path, events: Sequence[Mapping[str, Any]], hang: Mapping[str, Any], last: float | None, step_s: float
) -> dict[str, str]:
    """`kind` is running, silent, finished, stopped, hung, failed or gone; `text` says it in words. `last` is when the
    newest step ended."""
    trains, owner = who_trains(folder)
    began = max((e["time"] for e in events if e.get("kind") in BEGINS), default=0.0)
    if hang and float(hang.get("time", 0.0)) > began and trains != "alive":
        return {"kind": "hung", "text": str(hang.get("text", ""))}
    ago = time.time() - last if last else None
    if trains in ("alive", "unknown"):
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
    if trains == "gone":
        return {"kind": "gone", "text": "its process ended without a word: killed, or the machine went down"}
    return {"kind": "stopped", "text": "no process trains in this folder"}


def alerts_of(view: RunView, ranks: Mapping[str, Any], state: Mapping[str, str], steps: int) -> list[Alert]:
    """What a person should look at, the worst first."""
    found: list[Alert] = []

    def add(level: str, text: str, panel: str) -> None:
        found.append({"level": level, "text": text, "panel": panel})

    if state["kind"] in ("hung", "failed", "gone", "silent"):
        add("bad", f"{state['kind']}: {state['text']}", "events")
    if view.not_finite:
        add("bad", f"the loss was not finite in {plural(view.not_finite, 'step')}", "loss")
    if view.skipped:
        add("warn", f"{plural(view.skipped, 'step')} skipped ({percent(view.skipped / max(1, steps))})", "loss")
    for kind, what in ((FAULT, "fault"), (BAD_STEP, "bad step"), (ROLLBACK, "rollback")):
        if noted := view.noted(kind):
            last = f"{plural(len(noted), what)}, the last: {noted[-1].get('text', '')}"
            add("bad" if kind == FAULT else "warn", last, "events")
    if slow := slow_rank(ranks.get("busy_s") or []):
        add("warn", f"rank {slow[0]} {slow[1]}", "ranks")
    if restarts := view.noted("restart"):
        add("warn", f"restarted {plural(len(restarts), 'time')}", "events")
    if lost := sum(event.get("lost", 0) for event in view.noted("resume")):
        add("info", f"{plural(lost, 'step')} trained again after resumes", "loss")
    return found


def slow_rank(busy: Sequence[float]) -> tuple[int, str] | None:
    """The rank that computes much longer than the others, from each rank's seconds, and how much longer in words."""
    middle, most = sorted(busy)[len(busy) // 2] if busy else 0.0, max(busy, default=0.0)
    if len(busy) < 2 or middle <= 0 or most <= SLOW_RANK * middle:
        return None
    return list(busy).index(most), f"computes {most / middle:.2f} times as long as the median"
