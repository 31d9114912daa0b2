"""What a run's folder says about how the run came about (`run.json`) and what happened in it (`events.jsonl`)."""

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
from pathlib import Path
from typing import Any, TypedDict

import meshwright
from meshwright.outside import of_kind, parse_json


class Event(TypedDict, total=False):
    """What readers know of a line."""

    kind: str
    step: int | None
    text: str
    world: int
    changed: list[str]


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
        now, kind = event.get("time"), event.get("kind")
        if not isinstance(now, (int, float)):
            continue
        if before is not None and not (kind == "resume" and before[1] in ("end", "failure")):
            under_way += max(0.0, now - before[0])
        failures += kind in ("restart", "failure")
        before = (now, kind)
    return under_way / failures if failures else math.inf


def write_event(folder: str | Path, kind: str, text: str, step: int | None = None, **more: Any) -> None:
    """Adds a line to the run's events: `kind` is start, resume, checkpoint, reduce (how gradients are sent from then),
    restart, failure or end, or what `fault_notes` says. One that can't be written stops nobody."""
    path = Path(folder) / EVENTS_FILE
    line = {"time": time.time(), "kind": kind, "step": step, "text": text} | more
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)  # one write: lines of two don't mix
        try:
            os.write(handle, (json.dumps(line) + "\n").encode())
        finally:
            os.close(handle)
