"""The limits and environment variables of a process that takes part in a run. This module does not import torch.

Variables that the user has set are never changed.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import MutableMapping
from contextlib import suppress

# Enough for any number of ranks. Containers may allow a thousand times as many, but programs that close every possible
# file descriptor before they start a child would then take minutes.
MAX_FILES = 1 << 20
# The connections of a rank to the store: one of torch's process groups, and one of the watchdog.
CONNECTIONS = 2


def prepare_process(timeout: float, env: MutableMapping[str, str] = os.environ) -> None:
    """Prepare this process to be a rank whose calls may take `timeout` seconds. Call this before using a device."""
    raise_file_limit()
    for name, value in rank_environment(timeout).items():
        env.setdefault(name, value)
    quiet_torch(env)


def rank_environment(timeout: float) -> dict[str, str]:
    """Return the variables that a rank needs in addition to those of its launcher."""
    return {
        # torch ends a process whose NCCL thread has made no progress for this time (480 s by default). If a driver is
        # stuck, that must not precede the watchdog's report, after which the process ends anyway.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(int(2 * timeout + 60)),
        # CUDA has 8 hardware queues by default, and every communicator has a stream. Streams that share a queue wait
        # for each other: two ranks that launch in different orders would deadlock. CUDA reads this when it starts.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }


def quiet_torch(env: MutableMapping[str, str] = os.environ) -> None:
    """Suppress two kinds of torch warnings: stack traces about lost peers, which we report ourselves, and notes about
    unbatched sends, which the pipeline makes on purpose.

    torch logs the former from C++, at a level that it reads on import, and issues others as Python warnings.
    """
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", message=r".*unbatched P2P op")


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and its children as far as the system allows, up to MOST_FILES.
    Return the new limit.

    The process that hosts the store has `CONNECTIONS` per rank. About 500 ranks reach the usual limit of 1,024, and
    further ranks would time out without an explanation.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_FILES if hard == unlimited else min(hard, MAX_FILES)
    if soft != unlimited and soft < wanted:
        with suppress(ValueError, OSError):  # Some systems refuse their own hard limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return file_limit()


def file_limit() -> int:
    """Return the number of files that this process may open, or -1 if there is no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
