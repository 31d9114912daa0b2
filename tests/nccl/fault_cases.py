"""Ranks that die, stop, sleep, raise or disagree in real runs, and how the others must end."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config.load import to_yaml
from meshwright.record.checkpoint_format import list_checkpoints
from tests.nccl.faulty import Plant
from tests.nccl.lanes import Found, Lane
from tests.nccl.processes import Ended, Processes
from tests.support.oracle import small_config
from tests.support.token_files import write_documents

# The limit comm.timeout, and how long after it the last rank may end.
TIMEOUT_S, MORE_S = 30.0, 15.0
LOST = 75
STEPS = 100000

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "pp4": {"layout": {"pp": 4}}, "tp2": {"layout": {"tp": 2}, "zero": {"stage": 2}},
    "cp2": {"layout": {"cp": 2}, "context": {"kind": "ring"}}, "dp4": {"zero": {"stage": 3}},
    "ep2": {"layout": {"ep": 2}, "model": {"experts": {"count": 4, "ffn": 16, "top_k": 2}}},
    "ring": {"comm": {"algorithm": "ring"}}, "tp4": {"layout": {"tp": 4}},
}  # fmt: skip
# The words with which a sentence names a rank that is gone, or is not where it should be.
ABSENT = re.compile(
    r"ranks? \[?([\d, ]+)\]?[^;]*?"
    r"(?:does not answer|do not answer|did not arrive|has left|stopped or dead|is lost|has died|has called)"
)


@dataclass(frozen=True)
class Fault:
    """A run that meets a planted fault. `codes` are the allowed exit codes of the other ranks, by default that of a
    loss. `says` is a pattern that one of them must print. `names` requires a sentence that names the rank. `limit` is
    the number of seconds until all must have ended.
    """

    label: str
    layout: str
    plant: Plant
    codes: tuple[int, ...] = (LOST,)
    says: str = ""
    names: bool = True
    # The allowed exit codes on Gloo. If they are given, the logs are not checked there.
    gloo_codes: tuple[int, ...] = ()
    timeout: float = TIMEOUT_S  # The config's comm.timeout.
    limit: float = TIMEOUT_S + MORE_S
    ranks: int = 4
    layers: int = 4
    subject: str = "fault"

    @property
    def name(self) -> str:
        p = self.plant
        return f"{self.subject}/{self.label}-{self.layout}-rank{p.rank}"


def config_of(folder: Path, device: str, named: str, layers: int = 4, /, **more: dict[str, Any]) -> Any:
    """Return the config of a small run in float64 that saves every second step in the background and validates every
    fourth.
    """
    write_documents(folder / "tokens", list(np.random.default_rng(0).integers(0, 31, (50, 100))))
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": layers, "hidden": 16, "heads": 4, "vocab": 31, "seq": 8},
        "data": {"prefixes": [str(folder / "tokens")], "split": [0.8, 0.2, 0]},
        "train": {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": STEPS},
        "optimizer": {"lr": 1e-2}, "lr": {"warmup": 2, "schedule": "constant"},
        "checkpoint": {"every": 2, "keep": 2, "async": True}, "comm": {"timeout": TIMEOUT_S, "bucket_mib": 0.02},
        "run": {"dir": str(folder / "run"), "tensorboard": False, "device": device, "eval_every": 4,
                "eval_samples": 8},
    }  # fmt: skip
    for name, keys in (*LAYOUTS[named].items(), *more.items()):
        base[name] = base.get(name, {}) | keys
    return small_config(**base)


def check_fault(lane: Lane, case: Fault) -> Found:
    """Start the ranks, wait for the fault, and check how and when each of the others ends."""
    folder = lane.folder(case.name)
    comm = {"timeout": case.timeout, "bucket_mib": 0.02} | LAYOUTS[case.layout].get("comm", {})
    config = config_of(folder, lane.transport.device, case.layout, case.layers, comm=comm)
    (folder / "config.yaml").write_text(to_yaml(config))
    plant = case.plant
    processes = Processes(
        lane.transport, case.ranks, folder, ["train", "config.yaml"], plant, module="tests.nccl.faulty"
    )
    # A rank that raises or leaves ends by itself. One that disagrees continues as the others do.
    absent = plant.rank if plant.deed in ("kill", "stop", "sleep") else None
    try:
        began = processes.wait_for_mark(time.monotonic() + lane.transport.patience)
        if began is not None:
            # The verdict is about `limit`. A longer wait shows by how much it was missed.
            processes.wait(began + 3 * case.limit, but=absent)
    finally:
        ended = processes.end()
    if began is None:
        last = [each.said.strip().splitlines()[-3:] for each in ended]
        return Found([f"the fault did not come about: {last}"])
    if case.gloo_codes and lane.transport.name == "gloo":
        return Found(list(_ends(case, case.gloo_codes, ended, began, logs=False)))
    return Found([*_ends(case, case.codes, ended, began), *_words(case, ended), *_disk(folder, case)])


def _ends(case: Fault, codes: tuple[int, ...], ended: list[Ended], began: float, logs: bool = True) -> Iterator[str]:
    gone = case.plant.deed in ("kill", "stop")
    for rank, each in enumerate(ended):
        if rank == case.plant.rank and (gone or case.plant.deed in ("sleep", "raise", "leave")):
            continue
        took = each.at - began
        if each.code not in codes:
            yield f"rank {rank} ended with {each.code} after {took:.1f} s, not with {' or '.join(map(str, codes))}"
        if took > case.limit:
            yield f"rank {rank} ended after {took:.1f} s, later than {case.limit:.0f}"
        if logs:
            yield from (f"rank {rank}: {text}" for text in each.complaints)


def _words(case: Fault, ended: list[Ended]) -> Iterator[str]:
    lines = [line for each in ended for line in each.said.splitlines() if line.startswith("meshwright: ")]
    named = {int(n) for line in lines for found in ABSENT.findall(line) for n in re.findall(r"\d+", found)}
    if case.names and case.plant.rank not in named:
        yield f"no sentence names rank {case.plant.rank}: {lines[:2] or [each.said[-200:] for each in ended[:2]]}"
    if case.says and not any(re.search(case.says, each.said) for each in ended):
        yield f"nobody says '{case.says}': {lines[:2]}"


def _disk(folder: Path, case: Fault) -> Iterator[str]:
    if list(folder.glob("core*")):
        yield "there is a core dump"
    if case.plant.place in ("save", "validation") and not list_checkpoints(folder / "run" / "checkpoints"):
        yield "the older checkpoint is gone"


def _lost() -> Iterator[Fault]:
    """Yield losses of a rank in every phase with every layout. The victims include the rank that keeps the store and
    the last rank.
    """
    kills = (
        ("forward", "pp4", 0), ("forward", "pp4", 3), ("forward", "pp4", 1), ("forward", "tp2", 0),
        ("forward", "tp2", 3), ("forward", "cp2", 0), ("forward", "cp2", 2), ("forward", "ep2", 0),
        ("forward", "ep2", 3), ("forward", "dp4", 1), ("forward", "ring", 2),
    )  # fmt: skip
    for _, layout, rank in kills:
        yield Fault("kill-forward", layout, Plant(rank, "forward", "kill"))
    for layout, rank in (("pp4", 2), ("tp2", 0), ("cp2", 3), ("ep2", 1)):
        yield Fault("kill-first-step", layout, Plant(rank, "forward", "kill", step=1))
    for layout, rank in (("dp4", 0), ("tp2", 3), ("pp4", 1), ("ep2", 2)):
        yield Fault("kill-save", layout, Plant(rank, "save", "kill"))
    for layout, rank in (("tp2", 1), ("pp4", 0), ("cp2", 3), ("ep2", 2)):
        yield Fault("kill-validation", layout, Plant(rank, "validation", "kill", step=4))
    for layout, rank in (("pp4", 0), ("pp4", 2), ("tp2", 3), ("cp2", 1), ("ep2", 2), ("dp4", 0)):
        yield Fault("stop-forward", layout, Plant(rank, "forward", "stop"))
    for layout, rank in (("tp2", 1), ("pp4", 3)):
        yield Fault("stop-first-step", layout, Plant(rank, "forward", "stop", step=1))
        yield Fault("stop-validation", layout, Plant(rank, "validation", "stop", step=4))
    # All ranks wait in one call, so that any of them that raises the alarm names its layer.
    yield Fault("stop-layer", "tp4", Plant(2, "call", "stop", layer=5), says=r"layer 5\b", layers=16)
    yield Fault("stop-layer", "tp2", Plant(2, "call", "stop", layer=5), layers=16)


def _wrong() -> Iterator[Fault]:
    """Yield programs that go wrong by themselves."""
    yield Fault("disagree-other", "tp4", Plant(2, "call", "other", layer=3), says="so the ranks disagree", names=False)
    for deed in ("skip", "size"):
        # Gloo itself aborts a rank that receives a message of another size, so only the time is checked there.
        yield Fault(f"disagree-{deed}", "tp4", Plant(2, "call", deed, layer=3), gloo_codes=(LOST, 1, -6))
    slow = r"rank 1 did not arrive[^;]*(outside any collective, in \S+:\d+|does not answer)"
    # The ranks of tp get their samples from the first of them. In this layout each rank reads its own samples.
    yield Fault("sleep-data", "dp4", Plant(1, "data", "sleep"), says=slow)
    # The others learn of it at once, without waiting for a timeout.
    soon: dict[str, Any] = {"names": False, "timeout": 60.0, "limit": 20.0}
    for layout in ("tp2", "pp4"):
        yield Fault("raise", layout, Plant(1, "forward", "raise"), (LOST, 1), "a planted error", **soon)
    yield Fault("leave", "tp2", Plant(1, "forward", "leave"), (LOST, 1, 3), **soon)


FAULT_CASES = [*_lost(), *_wrong()]
