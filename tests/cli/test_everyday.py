"""Runs as people handle them: two at once, a launcher that is killed, Ctrl-C, a closed terminal; and what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import saved, steps
from tests.support.commands import ended, folder, start, torchrun, until

__all__ = ["folder", "start"]  # fixtures

LAUNCHERS = [
    pytest.param("meshwright", marks=pytest.mark.wide), pytest.param("torchrun", marks=pytest.mark.wide),
]  # fmt: skip


def begin(start: Any, launcher: str, *words: str) -> subprocess.Popen[str]:
    if launcher == "torchrun":
        return start(*words, launcher=torchrun(2))  # type: ignore[no-any-return]
    return start(*words, "--nproc", "2" if launcher == "meshwright" else "1")  # type: ignore[no-any-return]


@pytest.mark.parametrize("launcher", ["alone", *LAUNCHERS])
def test_a_second_run_in_the_same_folder_is_refused(launcher: str, folder: Path, start: Any) -> None:
    """Also one that finds the folder free before it starts its ranks, since both start at once."""
    begun = [begin(start, launcher) for _ in range(2)]
    end = time.monotonic() + 120.0
    while all(process.poll() is None for process in begun):
        assert time.monotonic() < end, "both train"
        time.sleep(0.05)
    refused = next(process for process in begun if process.poll() is not None)
    trains = next(process for process in begun if process is not refused)
    code, said = ended(refused)
    assert code != 0 and said.count("belongs to a run that is still training (process") == 1, said
    assert code == 2 or launcher == "torchrun"
    until(lambda: len(steps(folder / "run")) >= 3, trains)
    code, said = ended(start("--nproc", "2"))
    assert code == 2 and "still training" in said and "Traceback" not in said
    os.killpg(trains.pid, signal.SIGTERM)
    code, said = ended(trains)
    assert code == 0 or launcher == "torchrun", said  # whose own exit code is never 0 then
    done = steps(folder / "run")
    assert done == list(range(1, len(done) + 1)) and saved(folder / "run")[-1] == done[-1]
