"""Runs cases in several lanes, prints a line for each and a table of all."""

from __future__ import annotations

import json
import math
import platform
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from tests.nccl.checks import check_exact, check_same
from tests.nccl.elastic_cases import ELASTIC_CASES
from tests.nccl.exact_cases import EXACT_CASES, Exact
from tests.nccl.fault_cases import FAULT_CASES, Fault, check_fault
from tests.nccl.lanes import Found, Lane, Shared, Verdict
from tests.nccl.run_cases import RUN_CASES, Story, check_story
from tests.nccl.same_cases import SAME_CASES, Same
from tests.nccl.sharing import shared_gpu
from tests.nccl.transports import Transport
from tests.nccl.worlds import CaseFailed

BATCH = 16  # Cases with the same number of ranks that a lane takes at a time.
# Four lanes have a world of 8 ranks and one more rank each. The multi-process service has room for 48 processes.
LANES = {"nccl": 4, "gloo": 1}
WIDTH = 76

Case = Any  # An object with `name`, `subject` and `ranks`.

CHECKS: dict[type, Callable[[Lane, Any], Found]] = {
    Exact: check_exact, Same: check_same, Story: check_story, Fault: check_fault,
}  # fmt: skip


def all_cases() -> list[Case]:
    return [*EXACT_CASES, *SAME_CASES, *RUN_CASES, *ELASTIC_CASES, *FAULT_CASES]


def chosen(cases: Sequence[Case], patterns: Sequence[str], shard: tuple[int, int] = (1, 1)) -> list[Case]:
    """Return the cases whose name contains one of the patterns, and of these every n-th for shard k of n."""
    exact = {case.name: case for case in cases}
    if patterns and all(pattern in exact for pattern in patterns):
        found = [exact[pattern] for pattern in patterns]
    else:
        found = [case for case in cases if not patterns or any(pattern in case.name for pattern in patterns)]
    number, of = shard
    return found[number - 1 :: of]


def batches(cases: Iterable[Case]) -> list[list[Case]]:
    """Group the cases that can share a world, with the largest worlds first. Cases that start processes themselves are
    alone.
    """
    by_world: dict[int, list[Case]] = {}
    alone = []
    for case in cases:
        if isinstance(case, Exact | Same):
            by_world.setdefault(case.ranks, []).append(case)
        else:
            alone.append([case])
    found = []
    for _, same in sorted(by_world.items(), reverse=True):
        found += [same[first : first + BATCH] for first in range(0, len(same), BATCH)]
    # Processes that wait for a timeout need no processor, so they run beside the others from the start.
    return [each for pair in _alternating(found, alone) for each in pair]


def _alternating(many: list[list[Case]], alone: list[list[Case]]) -> Iterable[list[list[Case]]]:
    for number in range(max(len(many), len(alone))):
        yield [*many[number : number + 1], *alone[number : number + 1]]


def judge(lane: Lane, case: Case) -> Verdict:
    """Run one case. If a rank fails, close the lane's worlds, which are of no use to the next case."""
    begun = time.monotonic()
    try:
        found = CHECKS[type(case)](lane, case)
    except CaseFailed as error:
        lane.close()
        found = Found([str(error)])
    except Exception:
        lane.close()
        found = Found([traceback.format_exc()])
    took = time.monotonic() - begun
    note = "; ".join(found.complaints)
    return Verdict(case.name, case.ranks, not note, took, found.worst, found.sent, note)


class Runner:
    """A runner of cases on a transport. `say` gets each line, and verdicts are in the order in which cases end.

    No case is started after `limit` seconds, so that a machine that is lent for some minutes delivers its verdicts.
    `left` names the cases that did not run. Everything is written to `path` as JSON after every case.
    """

    def __init__(
        self, transport: Transport, lanes: int = 0, say: Callable[[str], None] = print, keep: Path | None = None,
        limit: float = math.inf, path: Path | None = None,
    ) -> None:  # fmt: skip
        self.transport, self.lanes, self.say = transport, lanes or LANES[transport.name], say
        self.keep, self.limit, self.path = keep, limit, path
        self.verdicts: list[Verdict] = []
        self.left: list[str] = []
        self.begun = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def run(self, cases: Sequence[Case]) -> list[Verdict]:
        self.left = [case.name for case in cases]
        left: queue.Queue[list[Case]] = queue.Queue()
        for batch in batches(cases):
            left.put(batch)
        self.say(header())
        shared = Shared()
        # Ranks in separate processes may be killed, so they do not use the service.
        shares = self.transport.device == "cuda" and any(isinstance(case, Exact | Same) for case in cases)
        with shared_gpu() if shares else nullcontext():
            threads = [
                threading.Thread(target=self._serve, args=(left, shared), daemon=True) for _ in range(self.lanes)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return self.verdicts

    def _serve(self, left: queue.Queue[list[Case]], shared: Shared) -> None:
        lane = Lane(self.transport, shared, self.keep)
        try:
            while True:
                try:
                    batch = left.get_nowait()
                except queue.Empty:
                    return
                for case in batch:
                    if self.seconds > self.limit:
                        return
                    self._note(judge(lane, case))
        finally:
            lane.close()

    def _note(self, verdict: Verdict) -> None:
        with self._lock:
            self.verdicts.append(verdict)
            self.left.remove(verdict.name)
            self.say(line(verdict))
            if self.path is not None:
                self._report(self.path)

    def _report(self, path: Path) -> None:
        found = {"transport": self.transport.name, **machine(), "seconds": self.seconds, "command": sys.argv,
                 "cases": [verdict.plain() for verdict in self.verdicts], "left": self.left}  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def header() -> str:
    return f"{'case':{WIDTH}} {'ranks':>5} {'worst':>8} {'sent':>10} {'s':>6}  verdict"


def line(verdict: Verdict) -> str:
    """Return a line such as `layout/dp2-tp1-pp1-1f1b-gpt-tied 2 4.4e-16 1,234,567 1.2 ok`."""
    worst = "" if verdict.worst is None else f"{verdict.worst:.1e}"
    sent = "" if verdict.sent is None else f"{verdict.sent:,}"
    first = verdict.note.strip().splitlines()[0] if verdict.note else ""
    if "Traceback" in first:
        first = f"{first} {verdict.note.strip().splitlines()[-1]}"
    word = "ok" if verdict.ok else f"FAILED {first[:300]}"
    return f"{verdict.name:{WIDTH}} {verdict.ranks:5} {worst:>8} {sent:>10} {verdict.seconds:6.1f}  {word}"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a line for each subject: how many cases passed, the worst difference, and the seconds."""
    by_subject: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_subject.setdefault(verdict.name.split("/")[0], []).append(verdict)
    lines = [f"{'subject':14} {'cases':>5} {'passed':>6} {'ranks':>6} {'worst':>8} {'s':>7}"]
    for subject, each in [*by_subject.items(), ("all", list(verdicts))]:
        worst = [v.worst for v in each if v.worst is not None]
        ranks = sorted({v.ranks for v in each})
        span = "-".join(str(n) for n in dict.fromkeys((*ranks[:1], *ranks[-1:])))
        figure = f"{max(worst):.1e}" if worst else ""
        passed, seconds = sum(v.ok for v in each), sum(v.seconds for v in each)
        lines.append(f"{subject:14} {len(each):5} {passed:6} {span:>6} {figure:>8} {seconds:7.0f}")
    return "\n".join(lines)


@cache
def machine() -> dict[str, Any]:
    """Return the machine and the versions that the figures belong to."""
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found
