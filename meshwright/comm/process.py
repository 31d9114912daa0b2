"""The settings of a process that takes part in a run: its limits and its environment, each with the reason. No torch.

Variables that the user has set are never changed.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import MutableMapping
from contextlib import suppress

# Enough for any number of ranks. Containers may allow a thousand times as many, and programs that close every possible
# file before they start a child would take minutes.
MOST_FILES = 1 << 20
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
    """Silence two kinds of torch warnings: stack traces of lost peers, which we name ourselves, and notes about
    unbatched sends, which the pipeline makes on purpose. torch writes them from C++ at this level, which it reads when
    it is imported, or gives them to Python."""
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=r".*unbatched P2P op")


def raise_file_limit() -> int:
    """Raise the number of files that this process and its children may open as far as the system lets it, up to
    MOST_FILES, and return it. The process that keeps the store has `CONNECTIONS` of each rank: the usual limit of 1,024
    is reached at about 500 ranks; further ranks time out without an explanation."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_FILES if hard == unlimited else min(hard, MOST_FILES)
    if soft != unlimited and soft < wanted:
        with suppress(ValueError, OSError):  # some systems refuse what they said they allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return file_limit()


def file_limit() -> int:
    """Returns the number of files that this process may open; -1: as many as there can be."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
