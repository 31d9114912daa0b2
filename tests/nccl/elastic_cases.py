"""Elastic runs of launchers with one rank each, every one its own host: one is killed entirely, and returns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.config.load import to_yaml
from tests.faults.planted import lines
from tests.nccl.fault_cases import config_of
from tests.nccl.lanes import Found, Lane
from tests.nccl.processes import FORBIDDEN, ROOT, finished
from tests.nccl.run_cases import EXACT, Story
from tests.nccl.transports import Transport
from tests.support.oracle import relative

OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
WORDS = ("faults.elastic=true", "faults.lost_after=6s", "run.eval_every=0", "checkpoint.every=1")


class Launcher:
    """One launcher with its rank, at its own loopback address. The number of the launcher also names its host."""

    def __init__(self, transport: Transport, folder: Path, number: int, of: int) -> None:
        address = f"127.0.0.{number + 1}"
        (folder / address).mkdir(exist_ok=True)
        env = {key: value for key, value in transport.environment(number, of).items() if key not in OF_RANKS}
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        whole = os.environ | env | {"PYTHONPATH": paths, "TMPDIR": str(folder / address)}
        self.log = folder / f"{address}.log"
        with self.log.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "meshwright", "train", "config.yaml", "--nproc", "1", "--nodes", f"1:{of}",
                 "--address", address, *WORDS],
                cwd=folder, env=whole, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """Kill the launcher and everything that it has started, as if a machine died."""
        pids = [self.process.pid]
        while pids:
            asked = ["ps", "-o", "pid=", "--ppid", ",".join(map(str, pids))]
            found = subprocess.run(asked, capture_output=True, text=True, check=False)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # The process has ended by itself.
                    os.kill(pid, signal.SIGKILL)
            pids = [int(pid) for pid in found.stdout.split()]
        self.process.wait()


def world(run: Path) -> int:
    """Return the number of ranks that the run last started or resumed with."""
    if not (run / "events.jsonl").exists():
        return 0
    found = [event["world"] for event in lines(run, "events.jsonl") if event["kind"] in ("start", "resume")]
    return int(found[-1]) if found else 0


def steps(run: Path) -> int:
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def check_returning(lane: Lane, case: Story) -> Found:
    """Kill one of the launchers, so that the run continues with fewer ranks. Start it again, and all of them must
    train. Every step must be in the metrics once, with the loss of one undisturbed process.
    """
    folder, transport, of = lane.folder(case.name), lane.transport, case.ranks
    train = {"precision": "fp64", "global_batch": 12, "micro_batch": 1, "steps": 100000}
    config = config_of(folder, transport.device, "dp4", train=train, zero={"stage": 1})
    (folder / "config.yaml").write_text(to_yaml(config))
    run, launchers = folder / "run", [Launcher(transport, folder, number, of) for number in range(of)]
    try:
        wrong = _story(transport, folder, run, launchers)
    finally:
        for each in launchers:
            if each.process.poll() is None:
                each.kill()
    said = "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
    wrong += [f"a log says '{word}'" for word in FORBIDDEN if word in said]
    return Found(wrong) if wrong else _undisturbed(lane, folder, config)


def _story(transport: Transport, folder: Path, run: Path, launchers: list[Launcher]) -> list[str]:
    of, end = len(launchers), time.monotonic() + 2 * transport.patience

    def until(what: str, ready: Callable[[], Any]) -> list[str]:
        while not ready():
            if time.monotonic() > end or any(each.process.poll() is not None for each in launchers):
                return [f"never: {what}; {[each.log.read_text()[-300:] for each in launchers]}"]
            time.sleep(0.1)
        return []

    wrong = until("all ranks train", lambda: world(run) == of and steps(run) >= 3)
    if wrong:
        return wrong
    lost = launchers.pop()
    lost.kill()
    wrong = until("the others continue", lambda: world(run) == of - 1)
    before = steps(run)
    wrong = wrong or until("they make steps", lambda: steps(run) > before + 2)
    if wrong:
        return wrong
    launchers.append(Launcher(transport, folder, of - 1, of))
    wrong = until("it returns", lambda: world(run) == of)
    before = steps(run)
    wrong = wrong or until("all make steps", lambda: steps(run) > before + 2)
    if wrong:
        return wrong
    launchers[0].process.send_signal(signal.SIGTERM)
    for each in launchers:
        code = each.process.wait(max(1.0, end - time.monotonic()))
        if code:
            wrong.append(f"a launcher ended with {code}: {each.log.read_text()[-300:]}")
    return wrong


def _undisturbed(lane: Lane, folder: Path, config: Any) -> Found:
    found = lines(folder / "run")
    if [line["step"] for line in found] != list(range(1, len(found) + 1)):
        return Found([f"steps {[line['step'] for line in found]}"])
    words = ["train", "config.yaml", f"train.steps={len(found)}", "run.dir=alone", "checkpoint.every=0"]
    (alone,) = finished(lane.transport, 1, folder, [*words, "run.eval_every=0"], tag="alone")
    if alone.code:
        return Found([alone.said[-300:]])
    error = relative([line["loss"] for line in found], [line["loss"] for line in lines(folder / "alone")])
    return Found([] if error <= EXACT else [f"losses differ by {error:.1e} from an undisturbed run"], error)


ELASTIC_CASES = [Story("elastic", f"launcher-returns-{ranks}", ranks, check_returning) for ranks in (2, 4)]
