"""Runs a function on Gloo ranks with a deadline. The ranks start from a forkserver that has torch preloaded.

A hang becomes a failure that shows every rank's stack. `body` must be a function at the top of a module. It is called
as body(rank, world, *args) with the process group joined, and its results are returned in the order of the ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.waiting import HANG_S

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([
    "torch._dynamo", "meshwright.run.pretrain", "meshwright.engine.providers", "tests.support.oracle",
    # A rank imports the file of its test. Modules that many of those files import are loaded once here, since loading
    # them took each rank up to 0.1 s.
    "pytest", "meshwright.dryrun.run_rank", "meshwright.plan.cost", "meshwright.interop.upcycle",
    "meshwright.checkpoint.merged", "meshwright.comm.process", "tests.checkpoint.runs",
])  # fmt: skip


class RankFailed(AssertionError):
    """An error on one rank, with its number and traceback."""


def _child(body: Any, rank: int, world: int, folder: str, args: tuple[Any, ...], pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    # The server is shared, and its handlers may have been changed. Ranks start with the default ones.
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signal_number, signal.SIG_DFL)
    stacks = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # The preloaded objects are never garbage, and scanning them takes a third of a second.
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = body(rank, world, *args)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
    pipe.send(("ok", result))
    # If this rank exited while others still connect their groups, they would fail. Wait until the parent ends it (or
    # ends).
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]


def run_ranks(world: int, body: Any, *args: Any, deadline: float = HANG_S) -> list[Any]:
    """Return the results of `body` on all ranks. `deadline` can only lengthen the wait: it tells a hang from a busy
    machine.
    """
    deadline = max(deadline, HANG_S)
    with tempfile.TemporaryDirectory() as folder:
        pipes, children = [], []
        for rank in range(world):
            ours, theirs = _SERVER.Pipe(duplex=False)
            child = _SERVER.Process(target=_child, args=(body, rank, world, folder, args, theirs), daemon=True)
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        try:
            return _collect(pipes, children, folder, deadline)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                child.join()


def _collect(pipes: list[Any], children: list[Any], folder: str, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + deadline
    while len(results) < len(pipes):
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = f"no result within {deadline:.0f} s from ranks {sorted(waiting.values())}"
            raise RankFailed(f"{late}:\n{_stacks(children, folder)}")
        pipe: Any
        for pipe in ready:
            rank = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word (exit code {children[rank].exitcode})") from None
            if kind == "error":
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _stacks(children: list[Any], folder: str) -> str:
    for child in children:
        if child.is_alive():
            os.kill(child.pid, signal.SIGUSR1)
    # The ranks write their stacks when they handle the signal.
    time.sleep(0.5)
    return "\n".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(Path(folder).glob("stack-*")))
