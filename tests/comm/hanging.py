"""Runs ranks that may hang, die or be stopped as separate processes with a deadline, the way a launcher starts them.

`body(mesh, *args)` is a top-level function of a module. It runs on every rank under a watchdog. The result says how
each rank ended: its exit code (None if it had to be killed), its stderr, and the seconds until it ended.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import Watchdog, open_store, store_keeper
from meshwright.device import Device
from meshwright.spec.layout import Layout
from tests.support import ranks as _preload  # noqa: F401 (tells the forkserver what to import once)
from tests.support.waiting import HANG_S, until

# torch prints this if the machine's resolver is too busy to name the other end of a socket.
_NOISE = re.compile(r"^\[W.*The hostname of the client socket cannot be retrieved.*\n", re.MULTILINE)
_SERVER = multiprocessing.get_context("forkserver")


@dataclass
class Ended:
    code: int | None
    stderr: str
    seconds: float


def _store(rank: int, folder: Path) -> dist.TCPStore:
    """Return the store that rank 0 keeps, on a port that the kernel gave it."""
    note = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        note.with_suffix(".part").write_text(str(store.port))
        note.with_suffix(".part").replace(note)
        return store
    until(note.exists)
    return dist.TCPStore("127.0.0.1", int(note.read_text()), is_master=False, wait_for_workers=False)


def _child(body: Any, rank: int, world: int, folder: str, timeout: float, axes: Any, args: Any) -> None:
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    try:
        torch.set_num_threads(1)
        store = _store(rank, Path(folder))
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"})
        limit = timedelta(seconds=2 * timeout + HANG_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        mesh = Mesh(Layout(world=world, **axes), rank)
        # The watch begins when all ranks have arrived, however long a busy machine took to start them.
        dist.barrier()
        with Watchdog(mesh, timeout, open_store(), Device("cpu"), Path(folder) / "flight", store_keeper()):
            body(mesh, *args)
        dist.destroy_process_group()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def run_hanging(
    world: int, body: Any, folder: Path, *args: Any, timeout: float, stopped: int = -1, **axes: int
) -> list[Ended]:
    """Run `body` on `world` ranks and return how each one ended. The rank `stopped` does not end by itself, and is
    killed once the others have ended.
    """
    children = []
    for rank in range(world):
        given = (body, rank, world, str(folder), timeout, axes, args)
        children.append(_SERVER.Process(target=_child, args=given, daemon=True))
    for child in children:
        child.start()
    begin, seconds = time.monotonic(), [HANG_S] * world
    waiting = set(range(world)) - {stopped}
    while waiting and time.monotonic() - begin < HANG_S:
        for rank in list(waiting):
            if children[rank].exitcode is not None:
                seconds[rank] = time.monotonic() - begin
                waiting.discard(rank)
        time.sleep(0.02)
    codes = [child.exitcode for child in children]
    for child in children:
        if child.is_alive():
            child.kill()
        child.join()
    texts = [_NOISE.sub("", (folder / f"stderr-{rank}").read_text()) for rank in range(world)]
    return [Ended(*parts) for parts in zip(codes, texts, seconds, strict=True)]
