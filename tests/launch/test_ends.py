"""A rank of `meshwright train` dies or stops anywhere in a run: all others end with one exit code and name it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.comm.watchdog import EXIT_CODE
from tests.checkpoint.runs import saved
from tests.support import ranks as _preload  # noqa: F401 (tells the forkserver what to import once)

_SERVER = multiprocessing.get_context("forkserver")
WORLD = 4
TIMEOUT = 6.0
# The environment of a job that starts ranks by itself. The test has the store, as a launcher would.
LAUNCHED = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip

# The places at which the victim is lost: a function, and the number of the call.
PLACES = {
    "first step": ("meshwright.nn.mlp", "MLP.forward", 1),
    "forward": ("meshwright.nn.mlp", "MLP.forward", 12),
    "save": ("meshwright.checkpoint.save", "write_part", 2),
    "validation": ("meshwright.engine.step", "Trainer.validate", 1),
}


def lose(place: str, number: int) -> None:
    """Make this process send itself the signal when it reaches a place."""
    module, name, calls = PLACES[place]
    holder = __import__(module, fromlist=["x"])
    *path, name = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    real, left = getattr(holder, name), [calls]

    def call(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return real(*args, **named)

    setattr(holder, name, call)


def body(rank: int, port: int, at: str, place: str, victim: int, number: int) -> None:
    os.chdir(at)
    os.dup2(os.open(f"stderr-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    os.environ.update(LAUNCHED | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)})
    from meshwright.cli.main import main

    if rank == victim:
        lose(place, number)
    words = [f"comm.timeout={TIMEOUT}", "checkpoint.every=2", "run.eval_every=3"]
    os._exit(main(["train", "config.yaml", *words]))


def run_until_lost(at: Path, place: str, victim: int, number: int) -> dict[int, tuple[int | None, float, str]]:
    """Return, for every rank but the victim, the exit code, the seconds until its end, and its error output."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [(rank, store.port, str(at), place, victim, number) for rank in range(WORLD)]
    children = [_SERVER.Process(target=body, args=each, daemon=True) for each in given]
    for child in children:
        child.start()
    others = [rank for rank in range(WORLD) if rank != victim]
    try:
        stat = Path(f"/proc/{children[victim].pid}/stat")
        end = time.monotonic() + 120.0
        while children[victim].is_alive() and stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, "the victim never came to the place"
            time.sleep(0.05)
        lost = time.monotonic()
        took: dict[int, float] = {}
        for rank in others:
            children[rank].join(60.0)
            took[rank] = time.monotonic() - lost
        return {r: (children[r].exitcode, took[r], (at / f"stderr-{r}").read_text()) for r in others}
    finally:
        for child in children:
            child.kill()
            child.join()


def check(at: Path, place: str, victim: int, number: int = signal.SIGKILL) -> None:
    ends = run_until_lost(at, place, victim, number)
    assert [code for code, _, _ in ends.values()] == [EXIT_CODE] * (WORLD - 1), ends
    assert max(seconds for _, seconds, _ in ends.values()) < TIMEOUT + 15, ends
    blames = [line for _, _, text in ends.values() for line in text.splitlines() if " answer (stopped or dead)" in line]
    assert len(blames) == 1, ends
    assert re.search(rf"rank {victim} [^;]*does not answer \(stopped or dead\)", blames[0]), blames
    assert not any("Traceback" in text or "destroy_process_group" in text for _, _, text in ends.values()), ends


@pytest.mark.wide
@pytest.mark.parametrize("victim", [0, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed(place: str, victim: int, folder: Path) -> None:
    """The victim is the first, a middle or the last rank. During a save the older checkpoint remains."""
    check(folder, place, victim)
    if place == "save":
        assert saved(folder / "run") == [2]


@pytest.mark.wide
@pytest.mark.parametrize(("place", "victim"), [("forward", 0), ("forward", 2), ("first step", 3), ("validation", 1)])
def test_a_rank_is_stopped(place: str, victim: int, folder: Path) -> None:
    check(folder, place, victim, signal.SIGSTOP)
