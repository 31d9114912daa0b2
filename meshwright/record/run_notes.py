"""Record how a run was started (`run.json`), and the events in it (`events.jsonl`), such as faults.

It also finds the settings that changed when a run was resumed. No torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import meshwright
from meshwright.config.load import flat, to_mapping
from meshwright.config.sections import Config
from meshwright.config.step_schedules import learning_rate
from meshwright.config.yaml_text import parse_yaml
from meshwright.errors import UserError, notice
from meshwright.outside import of_kind, parse_json
from meshwright.record.speed import BEGINS


class EventFields(TypedDict):
    """The fields that every event has."""

    time: float


class Event(EventFields, total=False):
    """The fields of an event that readers use."""

    kind: str
    step: int | None
    text: str
    world: int
    changed: list[str]
    lost: int  # steps that will be trained again


EVENTS_FILE = "events.jsonl"
GIT_S = 2.0  # time limit for git, which may be slow on a network disk


def provenance(device: str, command: str | None = None) -> dict[str, Any]:
    """Return the versions, host, device and command of this process, for run.json.

    `command` is the command that the user typed, if the launcher knows it.
    """
    torch = sys.modules.get("torch")
    return {
        "version": meshwright.__version__,
        "command": shlex.join(sys.argv) if command is None else command,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": str(torch.__version__) if torch else None,
        "device": device,
        "git": git_commit(),
        "started": time.time(),
    }


def git_commit() -> str | None:
    """Return the commit of the working directory, followed by `+` if tracked files were changed.

    Return None outside of a git repository.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=GIT_S, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Return a run's events. Lines that were not written completely are skipped."""
    events = []
    with contextlib.suppress(OSError):
        for line in (Path(folder) / EVENTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                events.append(of_kind(parse_json(line), Event, "the event"))
    return events


def time_between_failures(folder: str | Path) -> float:
    """Return the mean seconds of running time per failure, from a run's events; infinity if none failed.

    Time between two jobs does not count.
    """
    running_s, failures, before = 0.0, 0, None
    for event in read_events(folder):
        now, kind = event["time"], event.get("kind")
        is_between_jobs = before is not None and kind == "resume" and before[1] in ("end", "failure")
        if before is not None and not is_between_jobs:
            running_s += max(0.0, now - before[0])
        failures += kind in ("restart", "failure")
        before = (now, kind)
    return running_s / failures if failures else math.inf


def write_event(folder: str | Path, kind: str, text: str, step: int | None = None, **more: Any) -> None:
    """Append a line to the run's events. An event that can't be written is dropped without an error.

    `kind` is start, resume, checkpoint, reduce (how gradients are reduced from then on), restart, failure or end, or
    one of KINDS.
    """
    path = Path(folder) / EVENTS_FILE
    line = {"time": time.time(), "kind": kind, "step": step, "text": text} | more
    with contextlib.suppress(OSError):
        # A single write in append mode, so that the lines of two processes don't mix.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, (json.dumps(line) + "\n").encode())
        finally:
            os.close(handle)


# Kinds of events. bad_step: caused by the data or the model. fault: attributed to a rank if possible. slow: a rank is
# slower than the others.
BAD_STEP, ROLLBACK, FAULT, SLOW = KINDS = ("bad_step", "rollback", "fault", "slow")


class FaultNotes:
    """A record of the faults, which is the same on all ranks.

    The rank with `writes` adds them to the run's events and to the display. A rank with `most` faults sets `over`: the
    error that ends the run once the step is recorded.
    """

    def __init__(self, folder: str | Path, most: int, writes: bool) -> None:
        self.folder, self.most, self.writes = folder, most, writes
        self.by_rank: Counter[int] = Counter()
        self.over: UserError | None = None

    def add(self, kind: str, text: str, step: int, **more: Any) -> None:
        """Record an event of one of KINDS."""
        assert kind in KINDS
        if self.writes:
            write_event(self.folder, kind, text, step, **more)
            notice(f"meshwright: step {step}: {text}")

    def fault(self, text: str, step: int, rank: int | None, **more: Any) -> None:
        """Record a fault, and count it if it is attributed to one rank."""
        self.add(FAULT, text, step, rank=rank, **more)
        if rank is None:
            return
        self.by_rank[rank] += 1
        if self.by_rank[rank] >= self.most:
            self.over = UserError(
                f"rank {rank} had {self.by_rank[rank]} faults, the last in step {step}: {text}; take its machine out "
                "of the run, or raise faults.max_faults"
            )


# Sections and keys that change how a step is divided among ranks, and so the traffic and speed of each rank.
SECTIONS = ("layout", "zero", "pipeline", "context", "comm", "recompute")
KEYS = ("train.global_batch", "train.micro_batch", "train.precision", "train.grad_dtype", "train.compile")

JUMP = 0.05  # relative change of the learning rate above which a notice is given


def changed_keys(file: Path, config: Config) -> list[str]:
    """Return the keys whose values differ from those in a run's old config file; none if it can't be read."""
    try:
        before = parse_yaml(file.read_text(encoding="utf-8", errors="replace"), str(file))
    except (OSError, UserError):
        return []
    theirs = flat(before) if isinstance(before, Mapping) else {}
    ours = flat(to_mapping(config))
    return sorted(key for key in ours if key in theirs and theirs[key] != ours[key])


def learning_rate_words(config: Config, step: int, before: float, changed: Iterable[str]) -> str:
    """Return a notice if changed keys make the learning rate jump after `step`, or an empty string.

    `before` is the learning rate of `step`.
    """
    keys = [key for key in changed if key in ("train.steps", "optimizer.lr") or key.startswith("lr.")]
    now = learning_rate(config, step + 1)
    if not keys or math.isclose(now, before, rel_tol=JUMP):
        return ""
    why = f"the schedule now ends at step {config.train.steps}" if "train.steps" in keys else f"{keys[0]} was changed"
    return f"the learning rate continues at {now:.1e} (it was {before:.1e}): {why}"


def layout_since(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the step after which all steps were trained with the newest layout; 0 if it never changed.

    Speeds and traffic of steps can only be compared within one layout.
    """
    since, world = 0, None
    for event in events:
        if event.get("kind") not in BEGINS:
            continue
        step = event.get("step") or 0
        ranks = event.get("world", world)
        other = any(key in KEYS or key.split(".")[0] in SECTIONS for key in event.get("changed", ()))
        # A run may resume from a step before the change of the layout. Its later steps are trained again.
        since = step if other or world not in (None, ranks) else min(since, step)
        world = ranks
    return since
