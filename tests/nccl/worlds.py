"""Worlds of ranks that run one case after another.

Starting a rank on a GPU takes longer than a small case, so a world lives for many cases. Its process groups live for
one case. The next case creates new ones, under new names in the store.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.nccl.transports import Transport
from tests.support.ranks import _SERVER

Body = Callable[..., Any]
END_S = 5.0  # seconds for idle ranks to end


class CaseFailed(Exception):
    """A rank raised, died or did not answer. The message says which rank, and where it was."""


def _serve(rank: int, world: int, transport: Transport, folder: str, pipe: Any) -> None:
    """Serve as one rank: wait for a case, run it, and send its result."""
    os.environ.update(transport.environment(rank, world))
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(each, signal.SIG_DFL)
    stacks = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.dup2(os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()
    store = dist.FileStore(f"{folder}/store", world)
    number = 0
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            os._exit(0)
        number += 1
        try:
            pipe.send(("ok", _run(rank, world, transport, dist.PrefixStore(f"case-{number}", store), body, args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


def _run(rank: int, world: int, transport: Transport, store: Any, body: Body, args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist

    from meshwright.device import Device

    device = Device.choose(transport.device)
    if world > 1:
        limit = timedelta(seconds=2 * transport.patience)
        dist.init_process_group(transport.name, store=store, rank=rank, world_size=world, timeout=limit)
    result = body(rank, world, *args)
    gc.collect()
    device.synchronize()
    device.empty_cache()
    if world > 1:
        # If a rank destroyed its communicators while another still uses them, the other rank's last call would fail.
        store.add("done", 1)
        while store.add("done", 0) < world:
            time.sleep(0.005)
        dist.destroy_process_group()
    return result


class World:
    """`ranks` processes that wait for cases. After a failure a world is of no use, and another one must be started."""

    def __init__(self, ranks: int, transport: Transport) -> None:
        self.ranks, self.transport, self.runs = ranks, transport, 0
        self.folder = tempfile.mkdtemp(prefix="meshwright-world-")
        self._pipes, self._children = [], []
        for rank in range(ranks):
            ours, theirs = _SERVER.Pipe()
            args = (rank, ranks, transport, self.folder, theirs)
            child = _SERVER.Process(target=_serve, args=args, daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def run(self, body: Body, *args: Any, each: list[Any] | None = None, patience: float = 0.0) -> list[Any]:
        """Return the results of body(rank, world, *args) on each rank. `each` holds one more argument for each rank."""
        patience = patience or self.transport.patience
        self.runs += 1
        for rank, pipe in enumerate(self._pipes):
            pipe.send((body, args if each is None else (*args, each[rank])))
        results: dict[int, Any] = {}
        end = time.monotonic() + patience
        while len(results) < self.ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise CaseFailed(f"no result within {patience:.0f} s from ranks {late}:\n{self._stacks()}")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionError):
                    self._children[rank].join(5.0)
                    code = self._children[rank].exitcode
                    raise CaseFailed(f"rank {rank} died with exit code {code}:\n{self._said(rank)}") from None
                if kind == "error":
                    raise CaseFailed(f"rank {rank}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(self.ranks)]

    def _said(self, rank: int) -> str:
        return Path(f"{self.folder}/said-{rank}").read_text(errors="replace")[-4000:]

    def _stacks(self) -> str:
        for child in self._children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(Path(self.folder).glob("stack-*")))

    def close(self) -> None:
        """End the ranks, including those that hang."""
        # A rank that waits for a case ends by itself when its pipe closes. A kill could leave the memory of a client of
        # the multi-process service behind, so it is only for ranks that hang.
        for pipe in self._pipes:
            pipe.close()
        patient = time.monotonic() + END_S
        for child in self._children:
            child.join(max(0.0, patient - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()
        shutil.rmtree(self.folder, ignore_errors=True)
