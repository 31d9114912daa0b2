"""Tests of `meshwright train` when it is stopped, killed or restarted, or finds a damaged checkpoint or a full disk.

Also tests `meshwright inspect`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.record import checkpoint_format as fmt
from tests.checkpoint.runs import assert_same, complete, saved, steps, tiny
from tests.support.commands import ended, ranks, sections
from tests.support.waiting import until


def assert_stopped_cleanly(run: Path, process: subprocess.Popen[str], at_least: int) -> None:
    """Assert that the command ends with exit code 0 and a complete checkpoint of the last step in the metrics."""
    code, output = ended(process)
    assert code == 0 and "Traceback" not in output, output
    done = steps(run)
    assert done == list(range(1, len(done) + 1)) and len(done) > at_least
    assert saved(run)[-1] == done[-1]
    assert main(["inspect", str(run)]) == 0


def test_the_command_is_asked_to_stop_and_goes_on_when_it_is_started_again(folder: Path, start: Any) -> None:
    """The signal first goes to all of its processes, as a scheduler sends it, and then to the command alone."""
    run = folder / "run"
    process = start("--nproc", "2")
    until(lambda: len(steps(run)) >= 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert_stopped_cleanly(run, process, 3)
    first = steps(run)[-1]

    process = start("--nproc", "1")
    until(lambda: len(steps(run)) >= first + 2, process)
    process.send_signal(signal.SIGTERM)
    assert_stopped_cleanly(run, process, first + 2)
    assert not (run / "lost.jsonl").exists()


@pytest.mark.wide
def test_one_rank_is_asked_to_stop_while_saves_are_skipped(folder: Path, start: Any) -> None:
    process = start("--nproc", "2", "checkpoint.busy=skip", "checkpoint.every=1")
    until(lambda: len(steps(folder / "run")) >= 2, process)
    os.kill(ranks(folder)[1], signal.SIGUSR1)
    assert_stopped_cleanly(folder / "run", process, 2)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "target"),
    [(signal.SIGTERM, target) for target in ("command", *range(8))]
    + [(signal.SIGUSR1, target) for target in ("command", 5)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else str(value),
)
def test_eight_ranks_asked_to_stop(number: signal.Signals, target: str | int, folder: Path, start: Any) -> None:
    process = start("--nproc", "8", "layout.tp=2", "layout.pp=2")
    until(lambda: len(steps(folder / "run")) >= 2, process)
    os.kill(process.pid if isinstance(target, str) else ranks(folder)[target], number)
    assert_stopped_cleanly(folder / "run", process, 2)


@pytest.mark.wide
def test_a_request_that_comes_before_the_first_step(folder: Path, start: Any) -> None:
    process = start("--nproc", "2")
    until(lambda: len(ranks(folder)) >= 1, process)
    process.send_signal(signal.SIGTERM)
    assert_stopped_cleanly(folder / "run", process, 0)
    assert len(steps(folder / "run")) <= 2


@pytest.mark.wide
def test_restarts(folder: Path, start: Any) -> None:
    """The launcher restarts all ranks after each of two kills, and the run ends like an undisturbed one."""
    run = folder / "run"
    process = start("--nproc", "2", "train.steps=16", "checkpoint.every=4", "--restarts", "3")
    for attempt, goal in ((0, 5), (1, 9)):
        until(lambda goal=goal: len(steps(run)) >= goal and saved(run), process)
        until(lambda attempt=attempt: attempt in ranks(folder, attempt), process)
        os.kill(ranks(folder, attempt)[attempt], signal.SIGKILL)
    code, output = ended(process)
    assert code == 0, output
    for attempt in (0, 1):
        again = f"all ranks start again (restart {attempt + 1} of 3, from the newest checkpoint)"
        assert f"rank {attempt} was killed by SIGKILL; the other ranks were stopped; {again}\n" in output, output
    assert_same(run, complete(2, sections(folder, "straight", 16, checkpoint={"every": 4})))
    assert len(ranks(folder)) == 0, "the launcher removes its files"


@pytest.mark.wide
def test_restarts_of_a_run_from_other_weights(folder: Path, start: Any) -> None:
    """Restarted ranks resume from their own checkpoint, not from the other run's weights."""
    assert ended(start("--nproc", "2", "train.steps=4", "run.dir=base"))[0] == 0
    words = ("--nproc", "2", "train.steps=16", "checkpoint.every=2", "--from", "base")
    assert ended(start(*words, "run.dir=straight"))[0] == 0
    process = start(*words, "--restarts", "1")
    until(lambda: len(steps(folder / "run")) >= 8 and saved(folder / "run"), process)
    os.kill(ranks(folder)[0], signal.SIGKILL)
    code, output = ended(process)
    assert code == 0, output
    assert_same(folder / "run", folder / "straight")
    assert not list((folder / "run" / "checkpoints").glob("lost-*"))


@pytest.mark.wide
def test_no_restarts_left(folder: Path, start: Any) -> None:
    process = start("--nproc", "2", "--restarts", "1")
    for attempt in (0, 1):
        until(lambda attempt=attempt: len(ranks(folder, attempt)) == 2, process)
        time.sleep(0.5)
        os.kill(ranks(folder, attempt)[1], signal.SIGKILL)
    code, output = ended(process)
    assert code == 1 and "rank 1 was killed by SIGKILL" in output and "Traceback" not in output


@pytest.mark.wide
def test_a_damaged_checkpoint_is_passed_over(folder: Path, start: Any) -> None:
    """All ranks skip it together, though only one of them reads the damaged file. The warning is printed once."""
    more: dict[str, dict[str, Any]] = {"layout": {"tp": 2}, "checkpoint": {"every": 2, "keep": 0}}
    run = complete(2, sections(folder, "run", 4, **more))
    path = run / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(bytes(data))
    words = ("--nproc", "2", "layout.tp=2", "checkpoint.every=2", "checkpoint.keep=0", "train.steps=6")
    code, output = ended(start(*words))
    assert code == 0, output
    warnings = [line for line in output.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "step-00000004/rank-00000.safetensors is damaged" in warnings[0], output
    assert "going back to step-00000002" in warnings[0]
    assert steps(run) == [1, 2, 3, 4, 5, 6] and saved(run) == [2, 4, 6]


@pytest.mark.wide
def test_all_checkpoints_are_damaged(folder: Path, start: Any) -> None:
    more: dict[str, dict[str, Any]] = {"layout": {"tp": 2}, "checkpoint": {"every": 2, "keep": 0}}
    run = complete(2, sections(folder, "run", 4, **more))
    for step in (2, 4):
        path = run / "checkpoints" / fmt.folder_name(step) / "rank-00001.safetensors"
        os.truncate(path, path.stat().st_size - 1)
    code, output = ended(start("--nproc", "2", "layout.tp=2", "--restarts", "2"))
    errors = [line for line in output.splitlines() if "no checkpoint that can be used" in line]
    assert code == 2 and len(errors) == 1 and "rank-00001.safetensors" in errors[0] and "Traceback" not in output
    assert saved(run) == [2, 4], "nothing was set aside"


def limit_files(size: int) -> Callable[[], None]:
    """Return a function that limits the size of files, which acts like a disk that is full at `size` bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.wide
def test_a_full_disk(folder: Path, start: Any) -> None:
    words = ("--nproc", "2", "checkpoint.every=1", "--restarts", "1")
    code, output = ended(start(*words, preexec_fn=limit_files(20_000)))
    messages = [line for line in output.splitlines() if line.startswith("meshwright: ")]
    warnings = [line for line in messages if "warning" in line]
    assert code == 2 and 1 <= len(warnings) <= 2 and len(messages) - len(warnings) in (1, 2), output
    failed = r"the checkpoint can't be written to \S+checkpoints\S* \(File too large\): .*choose another checkpoint.dir"
    assert any(re.search(failed, line) for line in warnings), output
    assert saved(folder / "run") == []


def test_folders_that_cannot_be_written(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are reported before the first step, not at the first checkpoint."""
    (folder / "file").write_text("")
    monkeypatch.chdir(folder)
    for word, name in (("checkpoint.dir=file/here", "file/here"), ("run.dir=file/run", "file/run")):
        assert main(["train", "config.yaml", word]) == 2
        (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("meshwright: ")]
        assert name in error and "Not a directory" in error
    assert steps(folder / "run") == []


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny(folder / "run", train={"steps": 3, "precision": "bf16"}, layout={"tp": 2})
    run = complete(2, made)
    assert main(["inspect", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    index = fmt.read_index(run / "checkpoints" / "step-00000003")
    assert (result["step"], result["consumed"], result["world"], result["precision"]) == (3, 24, 2, "bf16")
    assert result["layout"]["tp"] == 2 and result["counters"]["updates"] == 3
    assert set(result["states"]) == {"param", "exp_avg", "exp_avg_sq"}
    elements = sum(int(np.prod(t["shape"])) for n, t in index.tensors.items() if n.startswith("param/"))
    assert result["states"]["param"]["elements"] == elements and result["states"]["param"]["dtypes"] == ["float32"]
    assert result["tensor_bytes"] == result["verified_bytes"] == 12 * elements
    assert result["tensors"] == len(index.tensors) and result["blocks"] == len(index.blocks)
    assert set(result["files"]) == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert main(["inspect", f"{run}@2"]) == 0
    page = capsys.readouterr().out
    assert "step        2, after 16 samples" in page and "every checksum is right" in page and "tp=2" in page
    # The counter of steps since the last change is only shown with a loss scale.
    assert "  counters    updates 2\n" in page
    assert main(["inspect", str(run / "checkpoints" / "step-00000002"), "--no-verify"]) == 0
    assert "not verified" in capsys.readouterr().out
    assert main(["inspect", f"{run}@1"]) == 2
    assert "it has 2, 3" in capsys.readouterr().err
    assert main(["inspect", str(folder)]) == 2
    assert "neither a run nor a complete checkpoint" in capsys.readouterr().err
    source = "import sys, meshwright.cli.inspect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0, "it needs no torch"
