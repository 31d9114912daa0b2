"""Runs the wide tests of the areas that a change touches, for some minutes: `python -m tests.support.areas`.

The most relevant areas go first. Neither the end of the budget nor a checkout without history is a failure: the report
says which areas were covered. A test that fails is run once more, alone and without workers, before it counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's exit code where nothing was selected

# The test folders of each folder of the package, the most relevant first. A folder without an entry has the tests of
# its own name.
TESTS_OF: dict[str, tuple[str, ...]] = {
    "bench": ("bench", "cli"),
    "checkpoint": ("checkpoint", "train"),
    "cli": ("cli", "docs", "fuzz"),
    "comm": ("comm", "parity"),
    "config": ("config", "cli", "fuzz"),
    "device": ("train", "nn"),
    "dryrun": ("dryrun", "plan"),
    "kernels": ("nn", "parity"),
    "layout": ("layout", "comm", "plan"),
    "models": ("models", "parity"),
    "nn": ("nn", "parity", "models"),
    "optim": ("optim", "sharding", "parity"),
    "parts": ("parts", "plan", "parity"),
    "pipeline": ("pipeline", "parity"),
    "schedule": ("pipeline", "plan"),
    "sharding": ("sharding", "parity", "checkpoint"),
    "train": ("train", "checkpoint", "tune", "cli"),
    "watch": ("watch", "show"),
}
OTHERS: dict[str, tuple[str, ...]] = {"docs": ("docs",), "examples": ("docs",), "benchmarks": ("bench",)}


def git(*words: str) -> list[str] | None:
    """Return the lines that git says, or None where it can't: no repository, no such commit, no history."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def base_of(given: str) -> str | None:
    """Return the commit that landed last: as given, else where the main branch was left, else the first parent."""
    head = (git("rev-parse", "HEAD") or [""])[0]
    for name in filter(None, (given, "origin/main", "main", "origin/HEAD")):
        found = git("merge-base", "HEAD", name) or git("rev-parse", "--verify", f"{name}^{{commit}}")
        if found and found[0] != head:
            return found[0]
    parent = git("rev-parse", "--verify", "HEAD~1^{commit}")
    return parent[0] if parent else None


def changed_files(base: str | None) -> list[str] | None:
    """Return the files that differ from `base`, those not committed included; None if that can't be told."""
    committed = git("diff", "--name-only", base, "HEAD") if base else None
    pending = git("status", "--porcelain", "--no-renames")
    if committed is None:
        return None
    return sorted({*committed, *(line[3:] for line in pending or [])})


def areas_of(files: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the test folders that the files concern, by how many files and how directly; `known` are all there are."""
    weight: dict[str, float] = {}
    for file in files:
        parts = Path(file).parts
        top, room = parts[0], Path(parts[1]).stem if len(parts) > 1 else ""
        if top == "meshwright":
            folders = TESTS_OF.get(room, (room,))
        elif top == "tests":
            folders = (room,)
        else:
            folders = OTHERS.get(top, ())
        for place, folder in enumerate(folders):
            weight[folder] = weight.get(folder, 0.0) + 0.3**place
    return sorted(set(weight) & set(known), key=lambda folder: (-weight[folder], folder))


def descendants(process: int) -> list[int]:
    """Return the processes that a process and its children have started and that still run (Linux)."""
    try:
        words = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, words) for found in (child, *descendants(child))]


def run_pytest(words: list[str], seconds: float) -> tuple[int | None, list[str]]:
    """Return pytest's exit code (None: the time was up) and the tests that failed until then."""
    with tempfile.TemporaryDirectory() as folder:
        failures = Path(folder) / "failures"
        command = [sys.executable, "-m", "pytest", *words, f"--failures={failures}"]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            # Workers, their ranks, and the commands that tests have started, some of them in sessions of their own.
            below = descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for each in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            code = None
        return code, failures.read_text().split("\n")[:-1] if failures.exists() else []


def repeats(test: str, seconds: float) -> bool:
    """Return whether a test fails again, or does not end, when it is alone."""
    return run_pytest([test], seconds)[0] != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40.0, help="for all wide tests together")
    parser.add_argument("--base", default=os.environ.get("CI_BASE", ""), help="the commit that landed last")
    parser.add_argument("--workers", default="2")
    given = parser.parse_args()
    known = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py")))
    base = base_of(given.base)
    files = changed_files(base)
    areas = known if files is None else areas_of(files, known)
    told = "what changed can't be told, so all areas are tried" if files is None else f"{len(files)} files changed"
    print(f"wide tests: {told} (base {base or 'unknown'}); areas: {', '.join(areas) or 'none'}", flush=True)
    end = time.monotonic() + 60 * given.minutes
    state: dict[str, str] = {}
    broken: list[str] = []
    for area in areas:
        left = end - time.monotonic()
        if left <= 0:
            state[area] = "not run: the time was up"
            continue
        words = [f"tests/{area}", "-m", "wide", "-n", given.workers, "--dist", "loadfile"]
        code, failed = run_pytest(words, left)
        state[area] = {None: "in part: the time was up", NO_TESTS: "has no wide tests"}.get(code, "covered")
        if code not in (0, None, NO_TESTS) and not failed:
            broken.append(f"tests/{area}")  # pytest itself failed
        for test in dict.fromkeys(failed):
            if repeats(test, 600.0):
                broken.append(test)
            else:
                print(f"wide tests: {test} failed once and passed alone", flush=True)
    for area in known:
        print(f"  {area:<12} {state.get(area, 'not touched by this change')}")
    for test in broken:
        print(f"  FAILED {test}\n    again: {sys.executable} -m pytest {test!r}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
