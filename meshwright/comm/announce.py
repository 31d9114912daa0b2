"""Send texts from rank 0 to all ranks through the store. The others wait outside any collective, for as long as it
takes.

Ranks that waited for a person inside a broadcast would keep their devices busy, and be taken for a hang.
"""

from __future__ import annotations

import time

from torch.distributed import Store

from meshwright.comm.group import CommError
from meshwright.comm.watchdog import open_store

LOOK_S = 0.05  # between two looks: a person does not notice it


class Announcements:
    """One rank's side of the announcements. All ranks call `next` equally often, and each call returns rank 0's
    text."""

    def __init__(self, rank: int, store: Store | None = None) -> None:
        """`store`: a connection that nobody else waits on; None: a new one."""
        found = store or open_store()
        if found is None:
            raise CommError(f"rank {rank} does not reach the ranks' store")
        self._rank, self._store, self._count = rank, found, 0

    def next(self, text: str = "") -> str:
        """Returns the first rank's next text; what the others give is not read."""
        key = f"announcement/{self._count}"
        self._count += 1
        try:
            if self._rank == 0:
                self._store.set(key, text)
                return text
            while not self._store.check([key]):
                time.sleep(LOOK_S)
            return self._store.get(key).decode()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CommError(f"rank {self._rank} has lost the ranks' store while it waited ({reason})") from error
