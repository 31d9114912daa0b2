"""How ranks meet: through a store on rank 0's machine, or the launcher's, where rank 0 says for whom it waits."""

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

FIRST_WORD_S, NEXT_WORD_S = 5.0, 30.0  # of waiting, until it is said, and said again
ARRIVED = "arrived"
OTHER_FILES = 64  # Rough number of other files that a process keeps open.


def meet(rank: int, world: int, first_on_node: bool, host: str, port: int, limit: timedelta) -> Store | None:
    """The store that all ranks share; rank 0 gets it when all have come. (None: torch must find one.)"""
    # A launcher's store outlives its ranks, and those it starts again must not read what the dead ones wrote.
    if store_keeper() is None:
        store = open_store()
        if store is None:
            return None
        store.set_timeout(limit)  # torch leaves a store that it is given as it is; NCCL's ranks meet through it
    else:
        with _saying(f"waiting for rank 0 at {host}:{port}", rank > 0 and first_on_node):
            server = TCPStore(host, port, is_master=rank == 0, wait_for_workers=False, timeout=limit, multi_tenant=True)
        store = PrefixStore("meshwright", server)
    come = store.add(ARRIVED, 1)
    if rank == 0:
        _wait_for_all(store, come, world, f"{host}:{port}", limit.total_seconds())
    return store


def _wait_for_all(store: Store, come: int, world: int, where: str, limit: float) -> None:
    begun, next_word = time.monotonic(), FIRST_WORD_S
    while come < world:
        time.sleep(0.02)
        waited, come = time.monotonic() - begun, store.add(ARRIVED, 0)
        if waited >= limit:
            missed = f"only {come} of {world} ranks met at {where} within {waited:.0f} s"
            raise UserError(f"{missed}: {_remedy(world, file_limit())}")
        if waited >= next_word and come < world:
            notice(f"waiting for {world - come} of {world} ranks at {where}, {waited:.0f} s")
            next_word += NEXT_WORD_S


def _remedy(world: int, files: int) -> str:
    """Says what to do about ranks that did not come. `files`: how many the store's process may open."""
    start = "start all ranks, with the same MASTER_ADDR and MASTER_PORT"
    if files < 0 or files > CONNECTIONS * world + OTHER_FILES:
        return f"{start} (the limit of {files} open files is enough)" if files >= 0 else start
    return f"the limit of {files} open files is too low for {world} ranks, raise it where rank 0 runs (ulimit -n)"


@contextmanager
def _saying(text: str, says: bool) -> Iterator[None]:
    """Says it, with the seconds, while the body lasts."""
    ended, begun = threading.Event(), time.monotonic()

    def speak() -> None:
        pause = FIRST_WORD_S
        while not ended.wait(pause):
            notice(f"{text}, {time.monotonic() - begun:.0f} s")
            pause = NEXT_WORD_S

    if says:
        threading.Thread(target=speak, name="meshwright-waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
