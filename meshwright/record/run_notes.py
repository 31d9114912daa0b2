"""What a run's folder says about how the run came about (`run.json`) and what happened in it (`events.jsonl`): faults,
and what changed where it went on. No torch."""

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


class Timed(TypedDict):
    time: float


class Event(Timed, total=False):
    """What readers know of a line."""

    kind: str
    step: int | None
    text: str
    world: int
    changed: list[str]
    lost: int  # steps that are trained again


EVENTS_FILE = "events.jsonl"
GIT_S = 2.0  # a network disk may make git slow, and a run does not wait for it


def provenance(device: str, command: str | None = None) -> dict[str, Any]:
    """With what, where and how this process trains. `command` is what a person typed, where the launcher knows it."""
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
    """The commit of the working directory, with a `+` behind it if tracked files were changed; None outside of git."""

    def asked(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=GIT_S, check=True)
        return done.stdout.strip()

    try:
        return asked("rev-parse", "HEAD") + ("+" if asked("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """Returns the events that were written whole."""
    found = []
    with contextlib.suppress(OSError):
        for line in (Path(folder) / EVENTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(of_kind(parse_json(line), Event, "the event"))
    return found


def time_between_failures(folder: str | Path) -> float:
    """Returns the seconds that a run was under way for each of its failures, by its events; infinity where there was
    none. Time between two jobs does not count."""
    under_way, failures, before = 0.0, 0, None
    for event in read_events(folder):
        now, kind = event["time"], event.get("kind")
        if before is not None and not (kind == "resume" and before[1] in ("end", "failure")):
            under_way += max(0.0, now - before[0])
        failures += kind in ("restart", "failure")
        before = (now, kind)
    return under_way / failures if failures else math.inf


def write_event(folder: str | Path, kind: str, text: str, step: int | None = None, **more: Any) -> None:
    """Adds a line to the run's events: `kind` is start, resume, checkpoint, reduce (how gradients are sent from then),
    restart, failure or end, or one of KINDS. One that can't be written stops nobody."""
    path = Path(folder) / EVENTS_FILE
    line = {"time": time.time(), "kind": kind, "step": step, "text": text} | more
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)  # one write: lines of two don't mix
        try:
            os.write(handle, (json.dumps(line) + "\n").encode())
        finally:
            os.close(handle)


# Kinds of events. bad_step: due to the data or the model; fault: laid to a rank, if one can be named; slow: a rank is.
BAD_STEP, ROLLBACK, FAULT, SLOW = KINDS = ("bad_step", "rollback", "fault", "slow")


class FaultNotes:
    """The faults that all ranks know of; the rank that `writes` adds a line to the run's events and to the display.
    `over` is what ends the run, once a step is recorded."""

    def __init__(self, folder: str | Path, most: int, writes: bool) -> None:
        self.folder, self.most, self.writes = folder, most, writes
        self.by_rank: Counter[int] = Counter()
        self.over: UserError | None = None

    def add(self, kind: str, text: str, step: int, **more: Any) -> None:
        """Notes something of one of KINDS."""
        assert kind in KINDS
        if self.writes:
            write_event(self.folder, kind, text, step, **more)
            notice(f"meshwright: step {step}: {text}")

    def fault(self, text: str, step: int, rank: int | None, **more: Any) -> None:
        """Notes a fault, and counts it if it can be attributed to one rank."""
        self.add(FAULT, text, step, rank=rank, **more)
        if rank is None:
            return
        self.by_rank[rank] += 1
        if self.by_rank[rank] >= self.most:
            self.over = UserError(
                f"rank {rank} had {self.by_rank[rank]} faults, the last in step {step}: {text}; take its machine out "
                "of the run, or raise faults.max_faults"
            )


# What decides how a step is divided, and so what ranks send and how fast they are.
SECTIONS = ("layout", "zero", "pipeline", "context", "comm", "recompute")
KEYS = ("train.global_batch", "train.micro_batch", "train.precision", "train.grad_dtype", "train.compile")

JUMP = 0.05  # the share by which a learning rate must change for a word about it


def changed_keys(file: Path, config: Config) -> list[str]:
    """Returns the keys that a run's config file, as it was left, has otherwise; none where it can't be read."""
    try:
        before = parse_yaml(file.read_text(encoding="utf-8", errors="replace"), str(file))
    except (OSError, UserError):
        return []
    theirs, ours = flat(before) if isinstance(before, Mapping) else {}, flat(to_mapping(config))
    return sorted(key for key in ours if key in theirs and theirs[key] != ours[key])


def learning_rate_words(config: Config, step: int, before: float, changed: Iterable[str]) -> str:
    """Says where the learning rate jumps after `step`, where it was `before`, as keys were changed; else nothing."""
    keys = [key for key in changed if key in ("train.steps", "optimizer.lr") or key.startswith("lr.")]
    now = learning_rate(config, step + 1)
    if not keys or math.isclose(now, before, rel_tol=JUMP):
        return ""
    why = f"the schedule now ends at step {config.train.steps}" if "train.steps" in keys else f"{keys[0]} was changed"
    return f"the learning rate goes on at {now:.1e} (it was {before:.1e}): {why}"


def layout_since(events: Iterable[Mapping[str, Any]]) -> int:
    """Returns the step after which all steps were trained with the newest layout; 0 where it never changed. Figures
    of a step mean something only among steps of one layout."""
    since, world = 0, None
    for event in events:
        if event.get("kind") not in BEGINS:
            continue
        step, ranks = event.get("step") or 0, event.get("world", world)
        other = any(key in KEYS or key.split(".")[0] in SECTIONS for key in event.get("changed", ()))
        since = step if other or world not in (None, ranks) else min(since, step)  # it may go back beyond the change
        world = ranks
    return since
