"""Collects the status of a run for one screen, from its folder alone and with the figures of its page. No torch.

*Goodput* is the productive time over the active time. The productive time is that of the steps that the run has kept:
not of steps that were trained again after a resume, or will have to be, and not of skipped steps. A run is active from
each start to the last sign of life before the next one, and while a launcher restarts its ranks. Time between two jobs
is reported separately.
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
UNNAMED = "unnamed"  # The key of faults that can't be attributed to a rank.
# Matches the ranks in the texts of events, such as "rank 3" or "ranks [1, 2] and 5 more".
_RANKS = r"\branks? \[?(\d+(?:, \d+)*)(?: and \d+ more)?\]?"

Event = Mapping[str, Any]


def config_at(report: RunReport) -> Config:
    """Return the run's config with `run.dir` set to the folder's present path.

    The recorded path may be wrong: the folder may have been moved, or the path may be relative to another directory.
    """
    config = report.config
    return replace(config, run=replace(config.run, dir=str(report.path)))


def status_of(report: RunReport, verify: bool = False) -> dict[str, Any]:
    """Return the values that the status screen shows. `verify`: read and check every byte of the newest checkpoint."""
    run, plan = report.document(), report.plan()
    view, progress, planned, config = report.view, run["progress"], plan.get("step"), config_at(report)
    alive = run["state"]["kind"] in ("running", "silent")
    keys = ("step", "steps", "loss", "grad_norm", "step_time_s", "tokens_per_s", "recent_steps", "counted", "mfu",
            "seconds_left", "skipped", "not_finite")  # fmt: skip
    status: dict[str, Any] = {"run": run["name"], "folder": str(report.path), "state": run["state"]}
    status |= {"complete": complete_step(config) is not None, **{key: progress[key] for key in keys}}
    status["checkpoint"] = newest_checkpoint(config, verify)
    # The steps after the newest checkpoint are lost unless a process still trains.
    status["not_saved"] = 0 if alive else max(0, status["step"] - saved_step(config))
    done = status["complete"] or run["state"]["kind"] == "finished"
    status["seconds_left"] = None if done else view.seconds_left(again=status["not_saved"])
    status["planned"] = _planned(planned, progress["tokens_per_s"])
    status["hint"] = plan.get("hint") or plan.get("why_not")
    status["goodput"] = goodput(report, view.events, time.time() if alive else None, status["not_saved"])
    status["restarts"], status["resumes"] = (len(view.noted(kind)) for kind in ("restart", "resume"))
    status["trained_again"] = sum(event.get("lost", 0) for event in view.events)
    status["faults"] = faults_by_rank(view.events, read_small(report.path / "flight" / "hang.json"))
    status["bad_steps"] = [
        {"time": e["time"], "step": e.get("step"), "kind": e["kind"], "text": str(e.get("text", ""))}
        for e in view.noted(BAD_STEP, ROLLBACK)
    ]  # fmt: skip
    slow = slow_rank(run["ranks"].get("busy_s") or [])
    status["slow_rank"] = {"rank": slow[0], "text": slow[1]} if slow else None
    # Each rank's newest event counts. It ends in "again" if the rank has become as fast as the others again.
    last = {str(event.get("rank")): str(event.get("text", "")) for event in view.noted(SLOW)}
    status["slow"] = [text for text in last.values() if not text.endswith("again")]
    return status


def _planned(step: Mapping[str, Any] | None, tokens_per_s: float | None) -> dict[str, Any] | None:
    if not step:
        return None
    share = tokens_per_s / step["tokens_per_s"] if tokens_per_s else None
    return {"cluster": step["cluster"], "step_s": step["step_s"], "tokens_per_s": step["tokens_per_s"], "share": share}


def goodput(
    report: RunReport, events: Sequence[Event], now: float | None, not_saved: int = 0
) -> dict[str, float | None]:
    """Return the productive seconds, the active seconds, their quotient, and the seconds between jobs.

    `now` is the present time if the run is alive. Otherwise (None) the run ended with its last sign of life, and its
    last `not_saved` steps are lost.
    """
    columns = report.metrics.columns
    kept = (columns["skipped"] != 1) & (np.arange(len(columns["step"])) < len(columns["step"]) - not_saved)
    productive = float(np.nansum(columns["step_time_s"][kept]))

    # The run was certainly alive at these times, also at the ends of steps that were lost later.
    lost = [line["time"] for line in read_lines(report.path / "lost.jsonl") if is_number(line.get("time"))]
    steps = columns["time"][np.isfinite(columns["time"])].tolist()
    signs = sorted([*steps, *lost, *(event["time"] for event in events)] + ([now] if now else []))
    starts = [n for n, event in enumerate(events) if event.get("kind") in BEGINS]
    if not starts:
        return {"share": None, "counted_s": productive, "under_way_s": None, "between_s": 0.0}

    first, between = events[starts[0]]["time"], 0.0
    for n in starts[1:]:
        # A start right after one of these events is by a launcher that restarts its ranks, so the job is the same.
        if events[n - 1].get("kind") not in ("restart", "reshape"):
            at = events[n]["time"]
            between += at - max((sign for sign in signs if sign < at), default=at)
    active = signs[-1] - first - between
    share = min(1.0, productive / active) if active > 0 else None
    return {"share": share, "counted_s": productive, "under_way_s": active, "between_s": between}


def faults_by_rank(events: Sequence[Event], hang: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the faults by the rank that they are attributed to, sorted by rank with `UNNAMED` last."""
    faults: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("kind") in FAULTS:
            fault = {"time": event["time"], "step": event.get("step"), "kind": event["kind"]}
            text = str(event.get("text", ""))
            for rank in [str(event["rank"])] if isinstance(event.get("rank"), int) else ranks_in(text):
                faults[rank].append(fault | {"text": text})
    if hang.get("text"):
        for rank in ranks_in(str(hang["text"])):
            fault = {"time": hang.get("time"), "step": hang.get("step"), "kind": "hang"}
            faults[rank].append(fault | {"text": str(hang["text"])})
    # Ranks are text here: the length comes first so that "10" is sorted after "9".
    return dict(sorted(faults.items(), key=lambda item: (not item[0].isdecimal(), len(item[0]), item[0])))


def ranks_in(text: str) -> list[str]:
    """Return the ranks that a sentence names as the cause: the ones that did not arrive, otherwise the first named."""
    named = re.search(_RANKS + " did not arrive", text) or re.search(_RANKS, text)
    return named.group(1).split(", ") if named else [UNNAMED]


def newest_checkpoint(config: Config, verify: bool) -> dict[str, Any] | None:
    """Describe the newest checkpoint; None if there is none.

    `sealed` is true if the seal of its index is right and all files have their sizes. With `verify`, also check that
    every byte is as it was written. `why` explains the damage, if there is any.
    """
    checkpoints = list_checkpoints(checkpoint_folder(config))
    if not checkpoints:
        return None
    step, path = checkpoints[-1]
    newest: dict[str, Any] = {"step": step, "path": str(path), "sealed": False, "verified_bytes": None, "why": None}
    try:
        index = read_index(path)
        newest["sealed"] = True
        newest["verified_bytes"] = verify_checkpoint(path, index) if verify else None
    except DamagedCheckpoint as error:
        newest["why"] = str(error)
    return newest


def saved_step(config: Config) -> int:
    """Return the step that the run would resume from: that of its newest checkpoint with an intact index, or 0."""
    for step, path in reversed(list_checkpoints(checkpoint_folder(config))):
        with suppress(DamagedCheckpoint):
            read_index(path)
            return step
    return 0


def is_complete(folder: str | Path, steps: int | None = None) -> bool:
    """Return whether the run has trained all its steps, or the given number of them.

    Return False for a folder without a run.
    """
    if not (Path(folder) / "config.yaml").is_file():
        return False
    config = config_at(RunReport(folder))
    config = replace(config, train=replace(config.train, steps=steps)) if steps is not None else config
    return complete_step(config) is not None
