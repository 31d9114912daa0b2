"""How a run stands, in one screen: from its folder alone, by the figures of its page. No torch.

*Goodput* is the time that counted over the time the run was under way. What counted are the steps that the run keeps:
not those that a resume trained again or will have to, nor skipped ones. Under way is all time from a start to the last
sign of life before the next one, and the time in which a launcher started ranks again; time between two jobs is told
beside it.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config.sections import Config
from meshwright.record.checkpoint_format import DamagedCheckpoint, checkpoint_folder, list_checkpoints, read_index
from meshwright.record.run_folder import complete_step
from meshwright.record.run_notes import BAD_STEP, FAULT, ROLLBACK, SLOW
from meshwright.record.speed import BEGINS
from meshwright.record.verify import verify_checkpoint
from meshwright.watch.read import is_number, read_lines, read_small
from meshwright.watch.report import RunReport
from meshwright.watch.state import slow_rank

FAULTS = ("restart", "failure", FAULT)
UNNAMED = "unnamed"  # where nothing says which rank it was
_RANKS = r"\branks? \[?(\d+(?:, \d+)*)(?: and \d+ more)?\]?"

Event = Mapping[str, Any]


def config_at(report: RunReport) -> Config:
    """The run's config, with the run's folder where it is now: it may have been moved, or be named from elsewhere."""
    config = report.config
    return replace(config, run=replace(config.run, dir=str(report.path)))


def status_of(report: RunReport, verify: bool = False) -> dict[str, Any]:
    """All that the screen shows. With `verify` every byte of the newest checkpoint is read and checked."""
    run, plan = report.document(), report.plan()
    view, progress, planned, config = report.view, run["progress"], plan.get("step"), config_at(report)
    alive = run["state"]["kind"] in ("running", "silent")
    keys = ("step", "steps", "loss", "grad_norm", "step_time_s", "tokens_per_s", "recent_steps", "counted", "mfu",
            "seconds_left", "skipped", "not_finite")  # fmt: skip
    found: dict[str, Any] = {"run": run["name"], "folder": str(report.path), "state": run["state"]}
    found |= {"complete": complete_step(config) is not None, **{key: progress[key] for key in keys}}
    found["checkpoint"] = newest_checkpoint(config, verify)
    found["not_saved"] = 0 if alive else max(0, found["step"] - saved_step(config))
    found["seconds_left"] = view.seconds_left(again=found["not_saved"])
    found["planned"] = _planned(planned, progress["tokens_per_s"])
    found["hint"] = plan.get("hint") or plan.get("why_not")
    found["goodput"] = goodput(report, view.events, time.time() if alive else None, found["not_saved"])
    found["restarts"], found["resumes"] = (len(view.noted(kind)) for kind in ("restart", "resume"))
    found["trained_again"] = sum(event.get("lost", 0) for event in view.events)
    found["faults"] = faults_by_rank(view.events, read_small(report.path / "flight" / "hang.json"))
    found["bad_steps"] = [
        {"time": e["time"], "step": e.get("step"), "kind": e["kind"], "text": str(e.get("text", ""))}
        for e in view.noted(BAD_STEP, ROLLBACK)
    ]  # fmt: skip
    slow = slow_rank(run["ranks"].get("busy_s") or [])
    found["slow_rank"] = {"rank": slow[0], "text": slow[1]} if slow else None
    last = {str(event.get("rank")): str(event.get("text", "")) for event in view.noted(SLOW)}
    found["slow"] = [text for text in last.values() if not text.endswith("again")]
    return found


def _planned(step: Mapping[str, Any] | None, tokens_per_s: float | None) -> dict[str, Any] | None:
    if not step:
        return None
    share = tokens_per_s / step["tokens_per_s"] if tokens_per_s else None
    return {"cluster": step["cluster"], "step_s": step["step_s"], "tokens_per_s": step["tokens_per_s"], "share": share}


def goodput(
    report: RunReport, events: Sequence[Event], now: float | None, not_saved: int = 0
) -> dict[str, float | None]:
    """Seconds that counted and seconds under way, their quotient, and the seconds between jobs. `now` is the time if
    the run is alive; otherwise it ends with its last sign of life, and its last `not_saved` steps are lost."""
    columns = report.metrics.columns
    kept = (columns["skipped"] != 1) & (np.arange(len(columns["step"])) < len(columns["step"]) - not_saved)
    counted = float(np.nansum(columns["step_time_s"][kept]))
    lost = [line["time"] for line in read_lines(report.path / "lost.jsonl") if is_number(line.get("time"))]
    steps = columns["time"][np.isfinite(columns["time"])].tolist()
    signs = sorted([*steps, *lost, *(event["time"] for event in events)] + ([now] if now else []))
    begun = [n for n, event in enumerate(events) if event.get("kind") in BEGINS]
    if not begun:
        return {"share": None, "counted_s": counted, "under_way_s": None, "between_s": 0.0}
    first, between = events[begun[0]]["time"], 0.0
    for n in begun[1:]:
        if events[n - 1].get("kind") not in ("restart", "reshape"):  # a launcher that starts ranks again is under way
            at = events[n]["time"]
            between += at - max((sign for sign in signs if sign < at), default=at)
    under_way = signs[-1] - first - between
    share = min(1.0, counted / under_way) if under_way > 0 else None
    return {"share": share, "counted_s": counted, "under_way_s": under_way, "between_s": between}


def faults_by_rank(events: Sequence[Event], hang: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What went wrong, by the rank that it is laid to."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("kind") in FAULTS:
            said = {"time": event["time"], "step": event.get("step"), "kind": event["kind"]}
            text = str(event.get("text", ""))
            for rank in [str(event["rank"])] if isinstance(event.get("rank"), int) else ranks_in(text):
                found[rank].append(said | {"text": text})
    if hang.get("text"):
        for rank in ranks_in(str(hang["text"])):
            when = {"time": hang.get("time"), "step": hang.get("step"), "kind": "hang"}
            found[rank].append(when | {"text": str(hang["text"])})
    return dict(sorted(found.items(), key=lambda item: (not item[0].isdecimal(), len(item[0]), item[0])))


def ranks_in(text: str) -> list[str]:
    """The ranks that a sentence names as the cause: those that did not arrive, or else the first that it names."""
    named = re.search(_RANKS + " did not arrive", text) or re.search(_RANKS, text)
    return named.group(1).split(", ") if named else [UNNAMED]


def newest_checkpoint(config: Config, verify: bool) -> dict[str, Any] | None:
    """The newest checkpoint: whether the seal of its index is right and its files have their sizes, and with `verify`
    whether every byte is as it was written."""
    found = list_checkpoints(checkpoint_folder(config))
    if not found:
        return None
    step, path = found[-1]
    said: dict[str, Any] = {"step": step, "path": str(path), "sealed": False, "verified_bytes": None, "why": None}
    try:
        index = read_index(path)
        said["sealed"] = True
        said["verified_bytes"] = verify_checkpoint(path, index) if verify else None
    except DamagedCheckpoint as error:
        said["why"] = str(error)
    return said


def saved_step(config: Config) -> int:
    """The step from which the run would go on: that of its newest checkpoint whose index is right, or 0."""
    for step, path in reversed(list_checkpoints(checkpoint_folder(config))):
        with suppress(DamagedCheckpoint):
            read_index(path)
            return step
    return 0


def is_complete(folder: str | Path, steps: int | None = None) -> bool:
    """Whether nothing is left to do in this run, of its own number of steps or of another one; a folder without a run
    has everything left."""
    if not (Path(folder) / "config.yaml").is_file():
        return False
    config = config_at(RunReport(folder))
    config = replace(config, train=replace(config.train, steps=steps)) if steps is not None else config
    return complete_step(config) is not None
