"""Runs the wide tests of the areas that a change touches, within a limit of time: `python -m tests.support.areas`.

The most relevant areas run first. Neither the end of the time nor a checkout without history is a failure: the report
says which areas were covered. A test that fails is run once more, alone and without workers, before it counts. These
second tries may take GRACE_S seconds in total beyond the limit, and end after MOST_CONFIRMED confirmed failures.
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
from types import FrameType
from typing import Any

from tests.support.processes import tree_below

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's exit code if no test was selected
GRACE_S = 600.0  # for the second tries of all failed tests together
MOST_CONFIRMED = 3  # after this many confirmed failures, further second tries would teach nothing new
RECENT_HOURS, RECENT_COMMITS = 12, 50  # commits of the main branch that count as one change

# The test folders for each folder of the package, the most relevant first. A folder without an entry has its tests in
# the test folder of the same name.
SHARED = ("parity", "run", "comm")  # for files that everything uses
TESTS_OF: dict[str, tuple[str, ...]] = {
    "bench": ("bench", "cli"),
    "check": ("check", "cli"),
    "checkpoint": ("checkpoint", "run"),
    "cli": ("cli", "check", "docs", "fuzz"),
    "comm": ("comm", "parity"),
    "config": ("config", "check", "cli", "fuzz"),
    "device": ("run", "nn"),
    "disk": ("checkpoint", "data", "cli"),
    "dryrun": ("dryrun", "plan"),
    "engine": ("engine", "parity", "checkpoint", "check", "tune"),
    "errors": SHARED,
    "faults": ("faults", "launch"),
    "infer": ("infer", "tune", "cli"),
    "__init__": SHARED,
    "interop": ("interop", "models", "tune"),
    "__main__": ("cli",),
    "kernels": ("nn", "parity"),
    "launch": ("launch", "faults"),
    "layers": ("nn",),
    "models": ("models", "parity"),
    "nn": ("nn", "parity", "models"),
    "outside": ("data", "models", "cli"),
    "plugins": ("config", "docs", "cli"),
    "recipes": ("check", "config"),
    "record": ("record", "run", "checkpoint"),
    "run": ("run", "check", "checkpoint", "tune", "cli"),
    "spec": ("spec", "plan", "parity"),
    "watch": ("watch", "show"),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "docs": ("docs",), "examples": ("docs",), "benchmarks": ("bench",),
    "pyproject.toml": SHARED, "constraints.txt": SHARED,
}  # fmt: skip
SHARED_TESTS = ("support", "conftest")
# Without history the areas run in this order, and areas that are not listed run last.
IMPORTANCE = (
    *SHARED, "check", "checkpoint", "engine", "launch", "faults", "nn", "models", "spec", "cli", "plan", "tune", "data",
)  # fmt: skip


def git(*words: str) -> list[str] | None:
    """Return the lines that git prints, or None if it fails: no repository, no such commit, no history."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def base_of(given: str) -> str | None:
    """Return the commit that landed last.

    It is the given commit, else the one where the main branch was left, else (HEAD is the main branch itself) the one
    before its recent commits.
    """
    head = (git("rev-parse", "HEAD") or [""])[0]
    for name in filter(None, (given, "origin/main", "main", "origin/HEAD")):
        found = git("merge-base", "HEAD", name) or git("rev-parse", "--verify", f"{name}^{{commit}}")
        if found and found[0] != head:
            return found[0]
    return recent_base()


def recent_base() -> str | None:
    """Return the commit before the recent ones, or None if there is none.

    At most RECENT_COMMITS are recent, from the RECENT_HOURS before HEAD was committed. A change often lands as several
    commits, of which the last one alone would hide the others. If the whole history is recent, its first commit is the
    base, unless that is HEAD.
    """
    time_of_head = git("log", "-1", "--format=%ct")
    if not time_of_head:
        return None
    since = f"--since={int(time_of_head[0]) - RECENT_HOURS * 3600}"
    recent = git("log", "--first-parent", f"--max-count={RECENT_COMMITS}", since, "--format=%H")
    if not recent:
        return None
    parent = git("rev-parse", "--verify", f"{recent[-1]}~1^{{commit}}")
    if parent:
        return parent[0]
    return recent[-1] if len(recent) > 1 else None


def changed_files(base: str | None) -> list[str] | None:
    """Return the files that differ from `base`, uncommitted ones included, or None if they are unknown."""
    committed = git("diff", "--name-only", base, "HEAD") if base else None
    pending = git("status", "--porcelain", "--no-renames")
    if committed is None:
        return None
    return sorted({*committed, *(line[3:] for line in pending or [])})


def areas_of(files: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the test folders that the files concern, ordered by the number of files and how directly they concern
    them.

    `known` lists all test folders.
    """
    weight: dict[str, float] = {}
    for file in files:
        parts = Path(file).parts
        top, room = parts[0], Path(parts[1]).stem if len(parts) > 1 else ""
        if top == "meshwright":
            folders = TESTS_OF.get(room, (room,))
        elif top == "tests":
            folders = SHARED if room in SHARED_TESTS else (room,)
        else:
            folders = OTHERS.get(top, ())
        for place, folder in enumerate(folders):
            weight[folder] = weight.get(folder, 0.0) + 0.3**place
    return sorted(set(weight) & set(known), key=lambda folder: (-weight[folder], folder))


def by_importance(known: Iterable[str]) -> list[str]:
    """Return all areas, the most important first."""
    place = {area: number for number, area in enumerate(IMPORTANCE)}
    return sorted(known, key=lambda area: (place.get(area, len(place)), area))


def end_tree(process: subprocess.Popen[Any]) -> None:
    """End pytest, its workers, their ranks and the commands of tests, some of which run in separate sessions."""
    below = tree_below(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for each in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def run_pytest(words: list[str], seconds: float) -> tuple[int | None, list[str]]:
    """Return pytest's exit code (None: the time was up) and the tests that had failed until then."""
    with tempfile.TemporaryDirectory() as folder:
        failures = Path(folder) / "failures"
        command = [sys.executable, "-m", "pytest", *words, f"--failures={failures}"]
        # In a separate session, the whole process group can be ended at once.
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Ctrl-C and SIGTERM do not reach a process in a separate session, so it is ended here.
            if process.poll() is None:
                end_tree(process)
        return code, failures.read_text().split("\n")[:-1] if failures.exists() else []


class WideRun:
    """The wide tests of some areas within a limit of time: the state of each area, and the failures."""

    def __init__(self, seconds: float, workers: str) -> None:
        self.end = time.monotonic() + seconds
        self.grace = GRACE_S
        self.workers = workers
        self.state: dict[str, str] = {}
        self.broken: list[str] = []  # tests that failed twice, and areas in which pytest itself failed twice
        self.not_repeated: list[str] = []  # tests that failed once and were not tried again

    def run_area(self, area: str) -> None:
        if time.monotonic() >= self.end:
            self.state[area] = "not run: the time was up"
            return
        code, failed = self._try(area)
        if self._is_error(code, failed) and time.monotonic() < self.end:
            print(f"wide tests: pytest itself failed in tests/{area}, which runs once more", flush=True)
            code, failed = self._try(area)
        self.state[area] = {None: "in part: the time was up", NO_TESTS: "has no wide tests"}.get(code, "covered")
        if self._is_error(code, failed):
            self.state[area] = "failed: pytest itself ended with an error"
            self.broken.append(f"tests/{area}")
        for test in dict.fromkeys(failed):
            self._repeat(test)

    def _try(self, area: str) -> tuple[int | None, list[str]]:
        words = [f"tests/{area}", "-m", "wide", "-n", self.workers, "--dist", "loadfile"]
        return run_pytest(words, self.end - time.monotonic())

    @staticmethod
    def _is_error(code: int | None, failed: list[str]) -> bool:
        """Return True for an error without a failed test, such as a lost worker or an INTERNALERROR."""
        return code not in (0, None, NO_TESTS) and not failed

    def _repeat(self, test: str) -> None:
        """Run a failed test alone. It has failed if it fails again, does not end, or can't be tried again."""
        if self.grace <= 0 or len(self.broken) >= MOST_CONFIRMED:
            self.not_repeated.append(test)
            return
        begin = time.monotonic()
        code, _ = run_pytest([test], self.grace)
        self.grace -= time.monotonic() - begin
        if code == 0:
            print(f"wide tests: {test} failed once and passed alone", flush=True)
        else:
            self.broken.append(test)

    def report(self, known: Iterable[str]) -> int:
        """Print the state of every area and all failures, and return the exit code."""
        for area in known:
            print(f"  {area:<12} {self.state.get(area, 'not touched by this change')}")
        for test in self.broken:
            print(f"  FAILED {test}\n    again: {sys.executable} -m pytest {test!r}")
        for test in self.not_repeated:
            print(f"  FAILED {test} (not repeated)\n    again: {sys.executable} -m pytest {test!r}")
        return 1 if self.broken or self.not_repeated else 0


def leave(number: int, frame: FrameType | None) -> None:
    """Turn a signal into an exception, so that child processes are ended."""
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, leave)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40.0, help="for all wide tests together")
    parser.add_argument("--base", default=os.environ.get("CI_BASE", ""), help="the commit that landed last")
    parser.add_argument("--workers", default="2")
    given = parser.parse_args()
    known = sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py")))
    base = base_of(given.base)
    files = changed_files(base)
    areas = by_importance(known) if files is None else areas_of(files, known)
    unknown = "the changed files are unknown, so all areas are tried"
    summary = unknown if files is None else f"{len(files)} files changed"
    print(f"wide tests: {summary} (base {base or 'unknown'}); areas: {', '.join(areas) or 'none'}", flush=True)
    run = WideRun(60 * given.minutes, given.workers)
    for area in areas:
        run.run_area(area)
    return run.report(known)


if __name__ == "__main__":
    sys.exit(main())
