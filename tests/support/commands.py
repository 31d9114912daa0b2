"""`meshwright train` as a process that a test can signal and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.config.load import to_yaml
from tests.checkpoint.runs import Sections, tiny
from tests.support.oracle import small_config
from tests.support.ports import reserved_port
from tests.support.token_files import write_documents
from tests.support.waiting import HANG_S

LONG = 100000  # steps of a run that ends only on request


def sections(folder: Path, run: str, steps: int = LONG, **more: dict[str, Any]) -> Sections:
    data = {"prefixes": [str(folder / "tokens")], "split": [0.8, 0.2, 0]}
    return tiny(folder / run, data=data, train={"steps": steps}, lr={"schedule": "constant"}, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_documents(tmp_path / "tokens", list(np.random.default_rng(0).integers(0, 31, (50, 100))))
    (tmp_path / "config.yaml").write_text(to_yaml(small_config(**sections(tmp_path, "run"))))
    return tmp_path


def torchrun(ranks: int) -> list[str]:
    words = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(ranks)]
    return [*words, "--master_addr", "127.0.0.1", "--master_port", str(reserved_port())]


def command(folder: Path, *words: str, launcher: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "PYTHONFAULTHANDLER": "1"}
    env |= options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "meshwright", "train", "config.yaml", *words],
        cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts `meshwright train` in the folder. The processes are killed at the end of the test."""
    made: list[subprocess.Popen[str]] = []

    def starting(*words: str, **options: Any) -> subprocess.Popen[str]:
        made.append(command(folder, *words, start_new_session=True, **options))
        return made[-1]

    yield starting
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ranks(folder: Path, attempt: int = 0) -> dict[int, int]:
    """Return the process number of each rank that the launcher has started."""
    paths = list((folder / "tmp").glob(f"meshwright-*/pid-{attempt}-*"))
    found = {int(path.name.split("-")[-1]): path.read_text() for path in paths}
    return {rank: int(pid) for rank, pid in found.items() if pid}  # an empty file is about to be written


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the error output. If the process does not end, fail with the stacks of its processes."""
    try:
        _, said = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        _, said = process.communicate(timeout=HANG_S)
        raise AssertionError(f"not ended within {HANG_S:.0f} s:\n{said}") from None
    return process.returncode, said
