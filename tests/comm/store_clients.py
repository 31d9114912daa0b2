"""One side of a meeting of many ranks, in a process that starts with the usual limit of 1,024 open files.

`server COUNT` prints the port of a store that is kept as Meshwright's launcher keeps it, and ends when COUNT clients
have arrived. `clients COUNT PORT` acts as COUNT ranks of that launcher, without the work.
"""

from __future__ import annotations

import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

USUAL = 1024
LIMIT = timedelta(seconds=500)


def serve(count: int) -> None:
    from torch.distributed import PrefixStore, TCPStore

    from meshwright.comm.meeting import ARRIVED, _wait_for_all

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    print(store.port, flush=True)
    ours = PrefixStore("meshwright/run/0", store)
    _wait_for_all(ours, ours.add(ARRIVED, 0), count, f"127.0.0.1:{store.port}", LIMIT.total_seconds())
    print(ours.add(ARRIVED, 0), flush=True)
    sys.stdin.read()  # The clients stay connected until all have arrived.


def connect(count: int, port: str) -> None:
    from meshwright.comm.meeting import meet

    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    with ThreadPoolExecutor(64) as threads:
        ranks = range(1, count + 1)
        stores = list(threads.map(lambda rank: meet(rank, count, False, "127.0.0.1", int(port), LIMIT), ranks))
    assert all(store is not None for store in stores), f"{stores.count(None)} of {count} ranks did not reach the store"
    print("connected", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    from meshwright.comm.process import raise_file_limit

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL, hard))
    raise_file_limit()
    if sys.argv[1] == "server":
        serve(int(sys.argv[2]))
    else:
        connect(int(sys.argv[2]), sys.argv[3])
