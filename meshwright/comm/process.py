"""The settings of a process that takes part in a run: its limits and its environment, each with the reason. No torch.

What the user has set is left as it is.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import MutableMapping
from contextlib import suppress

CONNECTIONS = 2  # of a rank to the store: torch's process groups have one, the watchdog has one of its own


def prepare_process(timeout: float, env: MutableMapping[str, str] = os.environ) -> None:
    """Prepares this process to be a rank whose calls may take `timeout` seconds. Call it before a device is used."""
    raise_file_limit()
    for name, value in rank_environment(timeout).items():
        env.setdefault(name, value)
    quiet_torch(env)


def rank_environment(timeout: float) -> dict[str, str]:
    """Returns the variables that a rank needs besides those of its launcher."""
    return {
        # torch ends a process whose NCCL thread has not moved for so long (480 s by default). Where a driver is stuck
        # that must not come before the watchdog's report, after which the process ends anyway.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(2 * timeout + 60)),
        # CUDA has 8 hardware queues by default, and every communicator has a stream. Streams that share a queue wait
        # for each other: two ranks that launch in different orders would lock. CUDA reads it when it starts.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


def quiet_torch(env: MutableMapping[str, str] = os.environ) -> None:
    """Leaves out warnings of torch's that say nothing to our users: stack traces of lost peers, whom we name ourselves,
    and that an unbatched send makes a communicator of two ranks, which the pipeline wants. torch writes them from C++
    at this level, which it reads when it is imported, or gives them to Python."""
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=r".*unbatched P2P op")


def raise_file_limit() -> int:
    """Raises the number of files that this process and its children may open as far as the system lets it, and returns
    it. The process that keeps the store has `CONNECTIONS` of each rank; the usual limit of 1,024 is at its end with
    some 500 ranks, of whom the others time out without a reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS calls it unlimited and refuses that
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return file_limit()


def file_limit() -> int:
    """Returns the number of files that this process may open; -1: as many as there can be."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
