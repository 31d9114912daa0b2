"""The settings of a rank's process: enough open files for many ranks, and an environment in which NCCL works."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from meshwright.comm import process
from meshwright.comm.meeting import _remedy
from meshwright.comm.process import prepare_process, quiet_torch, rank_environment

CLIENTS = 2000
SCRIPT = Path(__file__).with_name("store_clients.py")


def start(*words: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(SCRIPT), *words], text=True, env=env, **pipes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.wide
@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < CLIENTS + 100, reason="the system allows too few open files"
)
def test_two_thousand_clients_meet_in_one_store_with_a_soft_limit_of_1024_files() -> None:
    server = start("server", str(CLIENTS))
    assert server.stdin and server.stdout
    port = server.stdout.readline().strip()
    clients = start("clients", str(CLIENTS), port)
    try:
        assert clients.stdin and clients.stdout
        assert clients.stdout.readline() == "connected\n", clients.communicate(timeout=60)[1]
        assert server.stdout.readline() == f"{CLIENTS}\n", server.communicate(timeout=60)[1]
        for process in (server, clients):
            process.communicate("", timeout=60)
        assert (server.returncode, clients.returncode) == (0, 0)
    finally:
        for process in (server, clients):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(1024, 4096, (4096, 4096)), (1024, 1 << 30, (1 << 20, 1 << 30)), (1024, -1, (1 << 20, -1)), (-1, -1, None),
     (1 << 21, 1 << 30, None), (4096, 4096, None)],
)  # fmt: skip
def test_the_limit_of_files_is_raised_within_reason(
    soft: int, hard: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of 2**30, as containers have it, would slow down programs that close every possible file."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    process.raise_file_limit()
    assert given == ([] if expected is None else [expected])


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    source = (
        "import resource\n"
        "from meshwright.comm.process import raise_file_limit\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))\n"
        "assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=SCRIPT.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_limit_that_is_too_low_is_named() -> None:
    assert _remedy(600, 1024).startswith("the limit of 1024 open files is too low for 600 ranks, raise it where rank 0")
    assert _remedy(400, 1024).endswith("MASTER_PORT (the limit of 1024 open files is enough)")
    assert _remedy(600, -1) == "start all ranks, with the same MASTER_ADDR and MASTER_PORT"


def test_the_environment_is_set_unless_the_user_has() -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    prepare_process(600.0, env)
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1260", "torch must not end a process before the watchdog does"
    assert rank_environment(600.0)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_torch_s_word_on_unbatched_sends_is_left_out() -> None:
    text = "An unbatched P2P op (send/recv) was called on this ProcessGroup with size 4."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        env: dict[str, str] = {}
        quiet_torch(env)
        warnings.warn(text, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in seen] == ["something else"] and env == {"TORCH_CPP_LOG_LEVEL": "ERROR"}
