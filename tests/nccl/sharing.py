"""Lets the ranks of several processes compute on one GPU at the same time, by NVIDIA's multi-process service (MPS)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"  # how the processes of this one find the service


@contextmanager
def shared_gpu() -> Iterator[bool]:
    """Run the service for the processes that are started inside, if it is installed; yield whether it runs.

    Without it the GPU's time goes to one process after another. A rank's NCCL kernel then spins through its turn while
    the rank that it waits for has none, and the small cases of this suite take about ten times as long.
    """
    if shutil.which(CONTROL) is None or PIPES in os.environ:
        yield PIPES in os.environ
        return
    folder = tempfile.mkdtemp(prefix="meshwright-mps-")
    os.environ |= {PIPES: folder, LOGS: folder}
    try:
        started = subprocess.run([CONTROL, "-d"], capture_output=True).returncode == 0
        if not started:
            _forget()
        yield started
        if started:
            subprocess.run([CONTROL], input=b"quit -t 5\n", capture_output=True)
    finally:
        _forget()
        shutil.rmtree(folder, ignore_errors=True)


def _forget() -> None:
    for name in (PIPES, LOGS):
        os.environ.pop(name, None)


def without_service() -> dict[str, str]:
    """Return an environment for ranks that may be killed: a client that dies can end the others of the service."""
    return {name: value for name, value in os.environ.items() if name not in (PIPES, LOGS)}
