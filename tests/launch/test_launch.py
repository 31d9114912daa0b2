"""The end of a rank's process after an error, and the rank that a launcher blames."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import device
from meshwright.comm.watchdog import EXIT_CODE
from meshwright.launch import launch
from meshwright.launch.launch import Outcome, _failed_outcome

# A rank of another launcher. Its interpreter would wait for ten minutes at its end.
RANK = """
import atexit, os, sys, time
from meshwright.comm.group import CommError
from meshwright.errors import UserError
from meshwright.launch import launch
launch.LAUNCHER_SEES_S = 0.0
os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
atexit.register(time.sleep, 600)
def body():
    print("printed", end="")
    raise {"mistake": UserError("no such file"), "weak": CommError("a peer is gone"), "bug": ValueError("oops"),
           "exit": SystemExit(2), "text": SystemExit("no data today"),
           "refused": CommError("torch refused it", lost=False)}[sys.argv[1]]
launch.run_guarded(None, False, body)
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [("mistake", 2, "rank 1: no such file"), ("weak", EXIT_CODE, "rank 1: a peer is gone"),
     ("bug", 1, "ValueError: oops"), ("exit", 2, ""), ("text", 1, "rank 1: no data today"),
     ("refused", 1, "CommError: torch refused it")],
)  # fmt: skip
def test_a_rank_that_fails_ends_at_once_and_loses_nothing(kind: str, code: int, said: str) -> None:
    """The rank skips handlers at the end of the interpreter, such as torch's teardown, but flushes its streams."""
    done = subprocess.run([sys.executable, "-c", RANK, kind], capture_output=True, text=True, timeout=120)
    assert done.returncode == code and done.stdout == "printed", done
    assert said in done.stderr and "destroy_process_group" not in done.stderr


def failure(folder: Path, exit_code: int, rank: int = 3, local: int = 1, **reports: str) -> Outcome:
    for each in (2, 3):
        (folder / f"pid-0-{each}").write_text("1")
    for kind, text in reports.items():
        (folder / f"{kind}-0-{rank}").write_text(text)
    first = SimpleNamespace(exitcode=exit_code, local_rank=local)
    return _failed_outcome(folder, SimpleNamespace(get_first_failure=lambda: (rank, first)))


def test_a_killed_rank_is_to_blame(tmp_path: Path) -> None:
    ended = failure(tmp_path, -signal.SIGKILL)
    assert ended == Outcome(1, "rank 3 was killed by SIGKILL; the other ranks were stopped", 1, certain=True)


@pytest.mark.parametrize(("accelerators", "blamed"), [(8, None), (0, 1)])
def test_an_abort_under_nccl_is_no_fault_of_the_device(
    accelerators: int, blamed: int | None, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(device, "accelerator_count", lambda: accelerators)
    ended = failure(tmp_path, -signal.SIGABRT)
    assert ended.failed == blamed and "rank 3 was killed by SIGABRT" in ended.why


def test_ranks_that_stopped_in_their_first_step_did_not_fail(tmp_path: Path) -> None:
    ended = failure(tmp_path, 128 + signal.SIGTERM)
    assert (ended.code, ended.why) == (128 + signal.SIGTERM, "stopped by SIGTERM")


def test_a_rank_that_only_lost_others_is_not_to_blame(tmp_path: Path) -> None:
    assert failure(tmp_path, EXIT_CODE, weak="rank 0 does not answer") == Outcome(EXIT_CODE, "rank 0 does not answer")
    assert failure(tmp_path, -signal.SIGSEGV, weak="rank 0 does not answer").failed is None


def test_after_a_hang_the_launcher_has_nothing_to_add(tmp_path: Path) -> None:
    assert failure(tmp_path, EXIT_CODE) == Outcome(EXIT_CODE)


def test_a_bug_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    (tmp_path / "weak-0-2").write_text("rank 3 has left")
    text = "Traceback\nValueError: oops"
    assert failure(tmp_path, 1, bug=text) == Outcome(1, f"rank 3: {text}", 1)
    assert failure(tmp_path, 2, mistake="no such file").code == 2


def test_the_launcher_s_ranks_get_the_error_handling_of_ours(monkeypatch: Any, tmp_path: Path) -> None:
    """torch's agent reads the launcher's environment, and sets another default if it finds nothing there."""
    env: dict[str, str] = {}
    monkeypatch.setattr(launch.os, "environ", env)
    seen: list[str | None] = []

    def launched(config: Any, body: Any) -> Any:
        seen.append(env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        return lambda *args: None

    import torch.distributed.launcher.api as api

    monkeypatch.setattr(api, "elastic_launch", launched)
    assert launch.attempt_of(launch.Team(1), tmp_path, False, lambda: None, ()) == Outcome(0)
    assert seen == ["0"]


def test_the_logger_s_values_are_not_lost_after_an_error(tmp_path: Path) -> None:
    from meshwright.record.run_folder import RunFolder
    from tests.support.oracle import small_config

    config = small_config(run={"dir": str(tmp_path), "loggers": ["csv"], "tensorboard": False})
    folder = RunFolder(config, 1)
    with pytest.raises(ValueError, match="oops"), folder.closed_after_error():
        folder.step({"step": 1, "loss": 2.5, "comm": {}})
        raise ValueError("oops")
    assert "2.5" in (tmp_path / "metrics.csv").read_text()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.5
