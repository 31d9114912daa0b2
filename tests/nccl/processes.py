"""Ranks as separate processes, each its own host: commands that run to their end, and runs that lose a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nccl.faulty import MARK, PLANT, Plant
from tests.nccl.sharing import without_service
from tests.nccl.transports import Transport, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
# No log may contain these: torch's complaint about groups that were left behind, and its own ways to end a process.
FORBIDDEN = ("destroy_process_group", "core dumped", "Fatal Python error", "terminate called")
POLL_S = 0.05


@dataclass
class Ended:
    """The end of a process: its exit code (None if it had to be killed), its stderr, its end time (monotonic clock),
    and its stdout.
    """

    code: int | None
    said: str
    at: float
    out: str = ""

    @property
    def complaints(self) -> list[str]:
        return [f"its log says '{word}'" for word in FORBIDDEN if word in self.said]


class Processes:
    """The ranks of one command. Python runs `module`, which is the command itself or one with a planted fault."""

    def __init__(
        self, transport: Transport, ranks: int, folder: Path, words: Sequence[str], plant: Plant | None = None,
        module: str = "meshwright", env: Mapping[str, str] | None = None, tag: str = "rank",
    ) -> None:  # fmt: skip
        self.folder, self.tag, self.mark = folder, tag, folder / f"{tag}-mark"
        port = free_port() if ranks > 1 else 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, tuple[int, float]] = {}
        planted = {MARK: str(self.mark), **({PLANT: plant.text()} if plant else {})}
        for rank in range(ranks):
            given = transport.environment(rank, ranks, port) if ranks > 1 else {"OMP_NUM_THREADS": "1"}
            paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
            whole = without_service() | {"PYTHONPATH": paths, "TMPDIR": str(folder)} | given | planted | dict(env or {})
            with open(folder / f"{tag}-{rank}.err", "wb") as err, open(folder / f"{tag}-{rank}.out", "wb") as out:
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-m", module, *words], cwd=folder, env=whole, stdout=out, stderr=err,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                ))  # fmt: skip

    def poll(self) -> set[int]:
        """Return the ranks that are still running."""
        for rank, process in enumerate(self.processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = (process.returncode, time.monotonic())
        return set(range(len(self.processes))) - set(self._ended)

    def wait(self, until: float, but: int | None = None) -> bool:
        """Wait until all ranks but `but` have ended. Return False if this is not so at `until` of the monotonic
        clock.
        """
        while self.poll() - {but}:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def wait_for_mark(self, until: float) -> float | None:
        """Return the time of the planted fault, or None if it did not happen by `until` or a rank ended before it."""
        while not self.mark.exists():
            if time.monotonic() > until or len(self.poll()) < len(self.processes):
                return float(self.mark.read_text()) if self.mark.exists() else None
            time.sleep(POLL_S)
        return float(self.mark.read_text())

    def end(self) -> list[Ended]:
        """Kill all ranks that are still running, and return how each rank ended."""
        left = self.poll()
        for rank in left:
            os.killpg(self.processes[rank].pid, signal.SIGKILL)
            self.processes[rank].wait()
        found = []
        for rank in range(len(self.processes)):
            code, at = self._ended.get(rank, (None, time.monotonic()))
            said, out = (
                (self.folder / f"{self.tag}-{rank}.{kind}").read_text(errors="replace") for kind in ("err", "out")
            )
            found.append(Ended(code, said, at, out))
        return found


def finished(transport: Transport, ranks: int, folder: Path, words: Sequence[str], **more: Any) -> list[Ended]:
    """Run a command to its end, for at most as long as the transport's patience."""
    processes = Processes(transport, ranks, folder, words, **more)
    try:
        processes.wait(time.monotonic() + transport.patience)
    finally:
        ended = processes.end()
    return ended
