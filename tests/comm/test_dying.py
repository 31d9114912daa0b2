"""A rank that dies or hangs inside a compressed sum, or inside one of Meshwright's own algorithms, is named as in a
plain run.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.group import EXCHANGE, SHIFT, Group
from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import EXIT_CODE, Watchdog, open_store, store_keeper
from meshwright.device import Device
from tests.checkpoint.runs import steps
from tests.comm.hanging import run_hanging
from tests.support.commands import ended, ranks
from tests.support.oracle import make_trainer, small_config
from tests.support.waiting import until

TIMEOUT = 3.0
VICTIM = 1
FEW = {"model": {"layers": 2, "hidden": 24, "heads": 4, "vocab": 53, "seq": 8}}
EXPERTS = {"model": FEW["model"] | {"experts": {"count": 4, "ffn": 16}}}
BY_NODE = {"layout": {"ep": 4, "node_size": 2}, "comm": {"algorithm": {"ep": "hierarchical"}}}
LOCAL = {"layout": {"replicas": 4}, "train": {"local": {"steps": 1}, "global_batch": 4, "precision": "fp32"}}
RARE = LOCAL | {"train": LOCAL["train"] | {"local": {"steps": 1, "compress": {"kind": "int4"}}}}

# The config of a run and the call in which a rank is lost: its axis, its op, and the number of such calls before it.
Case = tuple[dict[str, Any], str, str, int]
CASES: dict[str, Case] = {
    "hierarchical": (FEW | {"comm": {"algorithm": "hierarchical"}, "layout": {"node_size": 2}}, "dp", EXCHANGE, 1),
    "ring": (FEW | {"comm": {"algorithm": "ring"}}, "dp", EXCHANGE, 3),
    "tree": (FEW | {"comm": {"algorithm": "tree"}, "zero": {"stage": 2}}, "dp", EXCHANGE, 1),
    "int8": (FEW | {"comm": {"reduce": {"kind": "int8"}}}, "dp", "all_gather", 0),
    "topk": (FEW | {"comm": {"reduce": {"kind": "topk"}}, "zero": {"stage": 2}}, "dp", "all_to_all", 1),
    "powersgd": (FEW | {"comm": {"reduce": {"kind": "powersgd"}}}, "dp", "all_reduce", 1),
    "experts-by-node": (EXPERTS | BY_NODE, "ep.across", "all_to_all", 2),
    "rare": (FEW | LOCAL, "replicas", "all_reduce", 0),
    "rare-compressed": (FEW | RARE, "replicas", "all_gather", 0),
    "server": (FEW | {"train": {"server": {"ranks": 2}, "global_batch": 4}}, "dp", "all_to_all", 1),
    "rounded-weights": (FEW | {"comm": {"gather": {"kind": "fp8"}}, "zero": {"stage": 3}}, "dp", "all_gather", 2),
    "tensor-pieces": (FEW | {"comm": {"overlap": {"tensor": True, "piece_gflop": 0.0}},
                             "layout": {"tp": 4, "sequence_parallel": True}}, "tp", SHIFT, 4),
}  # fmt: skip


def lose(rank_is_lost: bool, axis: str, op: str, before: int, dies: bool) -> None:
    """Arrange that this rank is lost when it begins the call that follows `before` others of the same kind."""
    real, left = Group._call, [before]

    def call(self: Group, name: str, *more: Any, **named: Any) -> Any:
        if rank_is_lost and (self.axis, name) == (axis, op):
            left[0] -= 1
            if left[0] < 0:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        return real(self, name, *more, **named)

    Group._call = call  # type: ignore[method-assign]


def train(mesh: Mesh, case: Case, dies: bool) -> None:
    sections, *where = case
    trainer = make_trainer(small_config(**sections), mesh.rank, mesh.layout.world)
    # The watch begins after a first step, because that step creates what later steps reuse. On a busy machine this
    # takes long.
    trainer.step()
    # A death is noticed without any limit. A short limit would only be reached on a busy machine.
    with Watchdog(trainer.ctx.mesh, 60.0 if dies else TIMEOUT, open_store(), Device("cpu"), keeper=store_keeper()):
        lose(mesh.rank == VICTIM, *where, dies)  # type: ignore[call-arg]
        trainer.step()


def check_hanging(name: str, folder: Path) -> None:
    ends = run_hanging(4, train, folder, CASES[name], False, timeout=60.0)
    lines = [line for end in ends for line in end.stderr.splitlines() if line.startswith("meshwright: ")]
    assert len(lines) == 1, "\n".join(end.stderr for end in ends)
    assert f" over {CASES[name][1]} " in lines[0], lines[0]
    assert re.search(r"rank 1 did not arrive[^;]*: it is outside any collective, in ", lines[0]), lines[0]
    assert "wait for each other" not in lines[0] and [end.code for end in ends] == [EXIT_CODE] * 4


def check_dying(name: str, folder: Path) -> None:
    """Check that all others end at once, and that one of them names the failed call and the dead rank for all."""
    ends = run_hanging(4, train, folder, CASES[name], True, timeout=60.0)
    assert ends[VICTIM].code == -signal.SIGKILL
    others = [end for rank, end in enumerate(ends) if rank != VICTIM]
    assert all(end.code == EXIT_CODE for end in others), ends
    lines = [line for end in others for line in end.stderr.splitlines() if line.startswith("meshwright: ")]
    assert len(lines) == 1, ends
    # The call may also become overdue before it fails.
    named = r"; rank 1 (did not arrive[^;]*: it )?does not answer [(]stopped or dead[)]"
    assert re.search(rf"^meshwright: \S+ number \d+ over .*{named}", lines[0]), lines


def test_a_rank_that_hangs_in_a_sum_by_node_is_named(tmp_path: Path) -> None:
    check_hanging("hierarchical", tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in CASES if name != "hierarchical"])
def test_a_rank_that_hangs_is_named(name: str, tmp_path: Path) -> None:
    check_hanging(name, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_dies_ends_the_others_with_a_sentence(name: str, tmp_path: Path) -> None:
    check_dying(name, tmp_path)


# Config words of runs through the launcher. Every message takes 20 ms, so that a rank is most likely killed inside a
# sum.
LATE = "comm.emulate.latency_us=20000"
REDUCED = ("bf16", "fp8", "int8", "int4", "onebit", "powersgd", "topk", "threshold")
RUNS: dict[str, list[str]] = {
    **{kind: [f"comm.reduce.kind={kind}"] for kind in REDUCED},
    "adaptive": ["comm.reduce.adaptive=true"],
    **{kind: [f"comm.algorithm={kind}", "layout.node_size=2"]
       for kind in ("ring", "tree", "halving_doubling", "mesh", "hierarchical")},
    "rounded-weights": ["comm.gather.kind=fp8", "zero.stage=3"],
    "local-steps": ["layout.replicas=4", "train.local.steps=2"],
    "local-steps-compressed": ["layout.replicas=4", "train.local.steps=2", "train.local.compress.kind=int4"],
    "server": ["train.server.ranks=2"],
    "experts-by-node": ["model.experts.count=4", "model.experts.ffn=16", "layout.ep=4", "layout.node_size=2",
                        "comm.algorithm.ep=hierarchical"],
    "tensor-pieces": ["layout.tp=2", "layout.sequence_parallel=true", "comm.overlap.tensor=true",
                      "comm.overlap.piece_gflop=0"],
}  # fmt: skip


def check_launched(words: list[str], folder: Path, start: Any) -> str:
    """Check that the launcher names the rank that was killed, and none of those that only lost it. Return all
    output.
    """
    process = start("--nproc", "4", "checkpoint.every=1000", "run.eval_every=0", LATE, *words)
    until(lambda: len(ranks(folder)) == 4 and len(steps(folder / "run")) >= 2, process)
    os.kill(ranks(folder)[2], signal.SIGKILL)
    code, said = ended(process)
    assert code == 1 and "Traceback" not in said, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("meshwright: rank 2 was killed by SIGKILL; the other ranks were stopped"), said
    return said


@pytest.mark.wide
def test_a_launched_run_names_the_rank_that_was_killed(folder: Path, start: Any) -> None:
    """The run also names a key without effect at its start."""
    said = check_launched([*RUNS["topk"], "comm.algorithm.ep=hierarchical"], folder, start)
    assert "meshwright: note: comm.algorithm.ep=hierarchical has no effect, since the model has no experts\n" in said


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in RUNS if name != "topk"])
def test_launched_runs_name_the_rank_that_was_killed(name: str, folder: Path, start: Any) -> None:
    check_launched(RUNS[name], folder, start)
