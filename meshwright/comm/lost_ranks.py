"""Detect a lost rank from the error state of process groups, and identify it as the one that does not answer.

A separate NCCL thread notices a dead peer, while the program may wait on the device for ever. torch would then end the
process by SIGABRT, a minute later and without naming the rank. `leave_errors_to_us` switches that off. Instead the
watchdog polls the error state of all groups, asks every rank through the store whether it is alive, and ends the run
with one sentence.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch.distributed import Store

from meshwright.comm.group import Group, list_ranks

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
TORCHRUN_DEFAULT = "1"  # The value that torch's elastic agent sets if the user has set none.
ASK_PAUSE_S = 0.05


def leave_errors_to_us(env: MutableMapping[str, str]) -> None:
    """Disable torch's teardown after an NCCL error, unless the user has chosen a mode. Call this before the first
    process group is made."""
    # Under torchrun, the default looks like the same value set by the user, so it counts as the default.
    by_torchrun = "TORCHELASTIC_RUN_ID" in env and env.get(ERROR_HANDLING) == TORCHRUN_DEFAULT
    if ERROR_HANDLING not in env or by_torchrun:
        env[ERROR_HANDLING] = "0"


class ErrorPoll:
    """A poll of the error states of a mesh's process groups.

    Back ends without an error state, such as Gloo, are asked once and then skipped: their calls raise by themselves.
    """

    def __init__(self, groups: Callable[[], Iterable[Group]]) -> None:
        self._groups = groups
        self._without: set[int] = set()  # The ids of process groups that have no error state.

    def look(self) -> str | None:
        """Return a sentence about the first group that has failed, or None if none has."""
        for group in self._groups():
            process_group = group.process_group
            if process_group is None or id(process_group) in self._without:
                continue
            states = [state for backend in _backends(process_group) if (state := _error_of(backend)) is not None]
            if not states:
                self._without.add(id(process_group))
            failed = next((state for state in states if state != "SUCCESS"), None)
            if failed is not None:
                what = f"communication over {group.axis} of ranks {list_ranks(group.ranks)}"
                return f"{what} failed on rank {group.rank} ({failed})"
        return None


def _backends(process_group: Any) -> list[Any]:
    """Return the back ends of a process group, one for each kind of device that it serves."""
    backends: list[Any] = []
    for device in getattr(process_group, "_device_types", None) or [torch.device("cpu")]:
        with contextlib.suppress(RuntimeError, AttributeError):
            backends.append(process_group._get_backend(device))
    return backends


def _error_of(backend: Any) -> str | None:
    """Return the name of a back end's error state (`SUCCESS` if all is well), or None if it has no such state."""
    ask = getattr(backend, "get_error", None)
    if ask is None:
        return None
    try:
        return str(ask().name)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def record_presence(store: Store, rank: int, left: str | None = None) -> None:
    """Record in the store that a rank answers or, with `left`, why it has left the run. `describe_lost_ranks` reads it.

    These few bytes are separate from the rank's state, so that one request can ask thousands of ranks.
    """
    store.set(_presence_key(rank), json.dumps(left))


def describe_lost_ranks(store: Store, world: int, deadline: float) -> str:
    """Wait until every rank answers in the store, up to `deadline` (of the monotonic clock). Return a clause that names
    the ranks that do not answer, or that have left the run."""
    ranks = list(range(world))
    while not store.check([_presence_key(rank) for rank in ranks]) and time.monotonic() < deadline:
        time.sleep(ASK_PAUSE_S)
    silent = _silent(store, ranks)
    answering = sorted(set(ranks) - set(silent))
    values = store.multi_get([_presence_key(rank) for rank in answering]) if answering else []
    left = {rank: why for rank, value in zip(answering, values, strict=True) if (why := json.loads(value)) is not None}
    clauses = [_silence(silent)] if silent else []
    clauses += [f"rank {rank} has left ({why})" for rank, why in left.items()]
    return "; ".join(clauses) or "every rank answers, so the network between them is probably disturbed"


def _presence_key(rank: int) -> str:
    return f"here/{rank}"


def _silent(store: Store, ranks: list[int]) -> list[int]:
    """Return the ranks that have not answered. The store only reports whether all of the given keys exist, so a binary
    search finds a few ranks among thousands with a few dozen requests."""
    if store.check([_presence_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return ranks
    half = len(ranks) // 2
    return _silent(store, ranks[:half]) + _silent(store, ranks[half:])


def _silence(ranks: list[int]) -> str:
    who = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {list_ranks(ranks)} do"
    return f"{who} not answer (stopped or dead)"
