"""Send texts from rank 0 to all ranks through the store. The others wait outside any collective, for any time.

Inside a broadcast, ranks that wait for a person's input would keep their devices busy, and the watchdog would report a
hang.
"""

from __future__ import annotations

import time

from torch.distributed import Store

from meshwright.comm.group import CommError
from meshwright.comm.watchdog import open_store

# Seconds between two polls of the store. A person does not notice the delay.
LOOK_S = 0.05


class Announcements:
    """One rank's end of the channel. All ranks call `next` equally often, and each call returns rank 0's text."""

    def __init__(self, rank: int, store: Store | None = None) -> None:
        """Connect to the store. `store`: a connection that no other thread waits on; None opens a new one."""
        connection = store or open_store()
        if connection is None:
            raise CommError(f"rank {rank} does not reach the ranks' store")
        self._rank, self._store, self._count = rank, connection, 0

    def next(self, text: str = "") -> str:
        """Return the next text of rank 0. The other ranks' `text` is ignored."""
        key = f"announcement/{self._count}"
        self._count += 1
        try:
            if self._rank == 0:
                self._store.set(key, text)
                return text
            # Poll: `Store.wait` gives up after the store's time limit, and a person may take longer.
            while not self._store.check([key]):
                time.sleep(LOOK_S)
            return self._store.get(key).decode()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CommError(f"rank {self._rank} has lost the ranks' store while it waited ({reason})") from error
