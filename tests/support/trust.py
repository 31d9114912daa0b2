"""Runs the quick tests under ten conditions and prints a table: `python -m tests.support.trust`, or `make test-trust`.

The conditions are five random orders, three offsets of the machine's clock, and two runs beside eight busy processes. A
suite that passes all ten need not be run again to be trusted.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ORDERS = (11, 23, 37, 41, 59)
OFFSETS = ("3.2e3", "1e6", "1e9")
BUSY, BUSY_RUNS = 8, 2


@dataclass(frozen=True)
class Condition:
    """One run of the tests: its name, its options, and the number of processes that keep the machine busy meanwhile."""

    name: str
    options: tuple[str, ...] = ()
    busy: int = 0


def conditions() -> list[Condition]:
    return [
        *(Condition(f"order {seed}", ("--shuffle", str(seed))) for seed in ORDERS),
        *(Condition(f"clock +{offset} s", ("--clock-offset", offset)) for offset in OFFSETS),
        *(Condition(f"load {BUSY} ({number})", busy=BUSY) for number in range(1, BUSY_RUNS + 1)),
    ]


@contextlib.contextmanager
def kept_busy(count: int) -> Iterator[None]:
    """Keep `count` processes computing until the end of the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run(condition: Condition, pytest_words: list[str], log: Path) -> tuple[int, float, str]:
    """Return the exit code, the seconds and the counts in pytest's last line. The whole output is in `log`."""
    command = [sys.executable, "-m", "pytest", "-m", "not wide", *condition.options, *pytest_words]
    begun = time.monotonic()
    with kept_busy(condition.busy), log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    seconds = time.monotonic() - begun
    counts = re.findall(r"^=*\s*(\d+ (?:passed|failed|error).*?) in [\d.]+s", log.read_text(), re.MULTILINE)
    return code, seconds, counts[-1] if counts else "no result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="conditions whose name contains this, e.g. clock")
    parser.add_argument("--logs", type=Path, default=ROOT / ".trust", help="folder for the logs of the runs")
    parser.add_argument("words", nargs="*", help="further words for pytest, e.g. -- -n 2 tests/train")
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in conditions() if given.only in each.name]
    passed = 0
    print(f"{'condition':<16} {'result':<8} {'seconds':>8}  tests", flush=True)
    for condition in chosen:
        log = given.logs / (re.sub(r"[^a-z0-9]+", "-", condition.name).strip("-") + ".log")
        code, seconds, counts = run(condition, given.words, log)
        passed += code == 0
        print(f"{condition.name:<16} {'pass' if code == 0 else 'FAIL':<8} {seconds:>8.0f}  {counts}", flush=True)
        if code:
            again = ["-m", "not wide", *condition.options, *given.words]
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
            print("".join(f"  {name}\n" for name in failed), end="")
            print(f"  log: {log}\n  again: {sys.executable} -m pytest {subprocess.list2cmdline(again)}", flush=True)
    print(f"{passed} of {len(chosen)} runs passed")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
