"""Rendezvous of the ranks through a store, which rank 0 or the launcher hosts. Rank 0 reports how many are missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from meshwright.comm.process import CONNECTIONS, file_limit
from meshwright.comm.watchdog import open_store, store_keeper
from meshwright.errors import UserError, notice

# Seconds of waiting until the first notice, and between further ones.
FIRST_WORD_S, NEXT_WORD_S = 5.0, 30.0
ARRIVED = "arrived"
OTHER_FILES = 64  # The approximate number of other files that a process keeps open.


def meet(rank: int, world: int, first_on_node: bool, host: str, port: int, limit: timedelta) -> Store | None:
    """Return the store that all ranks share, or None if torch must find one. Rank 0 waits until all have arrived."""
    # A launcher's store outlives its ranks. `open_store` separates the keys of each restart, so that restarted ranks
    # do not read those of the dead ones.
    if store_keeper() is None:
        store = open_store()
        if store is None:
            return None
        # torch does not set a time limit on a store that it is given, and NCCL's ranks meet through it.
        store.set_timeout(limit)
    else:
        with _repeat_notice(f"waiting for rank 0 at {host}:{port}", rank > 0 and first_on_node):
            server = TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=limit, multi_tenant=True)
        store = PrefixStore("meshwright", server)
    arrived = store.add(ARRIVED, 1)
    if rank == 0:
        _wait_for_all(store, arrived, world, f"{host}:{port}", limit.total_seconds())
    return store


def _wait_for_all(store: Store, arrived: int, world: int, where: str, limit: float) -> None:
    """Wait until all ranks have arrived. `arrived`: the present number; `limit`: the most seconds to wait."""
    begun, next_notice = time.monotonic(), FIRST_WORD_S
    while arrived < world:
        time.sleep(0.02)
        waited = time.monotonic() - begun
        arrived = store.add(ARRIVED, 0)
        if waited >= limit:
            missed = f"only {arrived} of {world} ranks met at {where} within {waited:.0f} s"
            raise UserError(f"{missed}: {_remedy(world, file_limit())}")
        if waited >= next_notice and arrived < world:
            notice(f"waiting for {world - arrived} of {world} ranks at {where}, {waited:.0f} s")
            next_notice += NEXT_WORD_S


def _remedy(world: int, files: int) -> str:
    """Return advice about ranks that did not arrive. `files`: the number of files that the store's process may open,
    or a negative number if there is no limit."""
    start = "start all ranks, with the same MASTER_ADDR and MASTER_PORT"
    if files < 0 or files > CONNECTIONS * world + OTHER_FILES:
        return f"{start} (the limit of {files} open files is enough)" if files >= 0 else start
    return f"the limit of {files} open files is too low for {world} ranks, raise it where rank 0 runs (ulimit -n)"


@contextmanager
def _repeat_notice(text: str, enabled: bool) -> Iterator[None]:
    """Repeat a notice with the elapsed seconds while the body runs, if it is enabled."""
    finished, begun = threading.Event(), time.monotonic()

    def repeat() -> None:
        pause = FIRST_WORD_S
        while not finished.wait(pause):
            notice(f"{text}, {time.monotonic() - begun:.0f} s")
            pause = NEXT_WORD_S

    if enabled:
        threading.Thread(target=repeat, name="meshwright-waiting", daemon=True).start()
    try:
        yield
    finally:
        finished.set()
