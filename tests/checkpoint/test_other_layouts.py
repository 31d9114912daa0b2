"""A checkpoint does not depend on a layout: a run resumes in any other layout and continues as one process would."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.comm.mesh import Mesh
from meshwright.config.sections import Config
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import layout_of
from tests.checkpoint.runs import tensors
from tests.support.oracle import EXACT, Made, load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

BEFORE, BATCH = 2, 8


# Experts as in DeepSeek-V3: the bias that balances them is saved state without a gradient.
MIXTURE = {
    "count": 8, "top_k": 3, "ffn": 16, "shared": 1, "first_dense": 1, "router": "sigmoid", "bias_balance": 0.01,
    "groups": 4, "groups_used": 2, "aux_loss": 0.05,
}  # fmt: skip
OFFLOAD = str(Path(tempfile.gettempdir()) / "meshwright-offload-tests")


@dataclass(frozen=True)
class Place:
    """A layout to train in, and the micro-batch size that the same global batch is divided into."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sp: bool = False
    micro: int = 1
    bucket: float = 0.02
    zero: int = 0
    node: int = 0
    offload: str = "none"
    experts: bool = False
    ep: int = 1
    etp: int = 0
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        dp = self.world // self.tp // self.pp
        words = [f"dp{dp}", f"tp{self.tp}", f"pp{self.pp}", f"chunks{self.chunks}" if self.chunks > 1 else ""]
        words += ["sp" if self.sp else "", f"micro{self.micro}" if self.micro > 1 else ""]
        words += [f"zero{self.zero}" if self.zero else "", f"node{self.node}" if self.node else ""]
        words += [f"offload-{self.offload}" if self.offload != "none" else ""]
        words += [f"experts-ep{self.ep}" if self.experts else "", f"etp{self.etp}" if self.etp else ""]
        words += [self.optimizer if self.optimizer != "adamw" else ""]
        return "-".join(word for word in words if word)

    def config(self, tied: bool) -> Config:
        """Return the config. With its 2 key-value heads, tp=4 holds copies. Its vocabulary of 53 needs padding."""
        return small_config(
            model={
                "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 53, "seq": 16, "norm": "rmsnorm",
                "mlp": "swiglu", "position": "rope", "ffn": 48, "tied_embeddings": tied,
                "experts": MIXTURE if self.experts else {},
            },
            layout={
                "tp": self.tp, "pp": self.pp, "chunks": self.chunks, "sequence_parallel": self.sp,
                "node_size": self.node, "ep": self.ep, "etp": self.etp,
            },
            zero={
                "stage": self.zero, "shard_group": "node" if self.node else "dp",
                "offload": {
                    "optimizer": self.offload, "params": self.offload if self.zero == 3 else "none", "path": OFFLOAD,
                    "buffer_mib": 0.05,
                },
            },
            pipeline={"schedule": "interleaved" if self.chunks > 1 else "1f1b"},
            train={"precision": "fp64", "global_batch": BATCH, "micro_batch": self.micro, "steps": 20, "clip": 0.7},
            # SOAP's small eps would amplify the rounding of its rotations.
            optimizer={"name": self.optimizer, "lr": 1e-3, "eps": 1e-5 if self.optimizer == "soap" else 1e-8},
            lr={"warmup": 5},
            comm={"bucket_mib": self.bucket},
        )  # fmt: skip


ONE = Place(micro=8)
DP2, DP4, DP8 = Place(2), Place(4, micro=2), Place(8)
TP2, TP4, PP2, PP4 = Place(2, tp=2, sp=True), Place(4, tp=4, sp=True), Place(2, pp=2, micro=2), Place(4, pp=4)
CHUNKS, DP2TP2, TP2PP2 = Place(2, pp=2, chunks=2), Place(4, tp=2, micro=4), Place(4, tp=2, pp=2)
CUBE, CUBE_CHUNKS = Place(8, tp=2, pp=2, sp=True), Place(8, tp=2, pp=2, chunks=2, micro=2)
COPIES8 = Place(8, tp=4, sp=True, bucket=1.0)
ZERO1, ZERO2, ZERO3 = Place(2, zero=1), Place(4, tp=2, sp=True, zero=2), Place(4, zero=3, micro=2)
DISK1, DISK3 = Place(2, zero=1, offload="disk"), Place(4, zero=3, offload="disk")
NODES, CUBE3 = Place(4, zero=3, node=2), Place(8, tp=2, pp=2, chunks=2, zero=3)

ONE_EXPERTS, EP2 = Place(micro=8, experts=True), Place(2, experts=True, ep=2)
EP4, EP_TP = Place(4, experts=True, ep=4, zero=1, micro=2), Place(4, tp=2, sp=True, experts=True, ep=4, etp=1)
ETP2, EP_PP = Place(4, tp=2, experts=True, ep=2, zero=3), Place(8, pp=2, tp=2, experts=True, ep=2, etp=1, zero=2)

# (layout to save in, layout to load in, whether the embeddings are tied). Tied embeddings are one tensor that the first
# and the last stage share.
PAIRS = [
    (ONE, DP8, True), (ONE, CUBE, True), (ONE, TP4, False), (ONE, ONE, True),
    (DP8, ONE, True), (CUBE, ONE, True), (COPIES8, ONE, False), (CUBE_CHUNKS, ONE, True),
    (DP2, TP2, True), (TP2, PP2, True), (PP2, CHUNKS, True), (CHUNKS, DP2, False),
    (TP4, PP4, True), (PP4, DP2TP2, True), (DP2TP2, TP4, False), (TP2PP2, DP4, True),
    (DP8, CUBE_CHUNKS, True), (CUBE, COPIES8, True), (CUBE_CHUNKS, TP2PP2, True), (TP4, CUBE, False),
    (ZERO1, ZERO3, True), (ZERO3, NODES, True), (NODES, ZERO2, False), (ZERO2, ZERO1, True),
    (DISK3, ZERO1, True), (ZERO3, DISK3, True), (DP2, DISK1, True),
    (CUBE3, ONE, True), (DP2, CUBE3, False), (ZERO3, TP2PP2, True), (DISK1, DISK3, False),
    (EP2, EP_TP, True), (EP4, ONE_EXPERTS, True), (ONE_EXPERTS, EP2, True), (EP_TP, EP4, True),
    (ONE_EXPERTS, ETP2, False), (EP_PP, EP2, True), (ETP2, EP_PP, False), (EP2, ONE_EXPERTS, False),
]  # fmt: skip
QUICK = [0, 5, 10, 14, 21, 24, 31]


class Noted(Made):
    """A dataset that records which samples were requested."""

    def __init__(self) -> None:
        super().__init__(53, 16)
        self.requested: list[int] = []

    def sample(self, n: int) -> dict[str, np.ndarray]:
        self.requested.append(n)
        return super().sample(n)

    def taken(self, consumed: int) -> list[int]:
        """Return and forget the requested samples below `consumed`. Prefetched ones belong to a later step."""
        taken = [n for n in self.requested if n < consumed]
        for n in taken:
            self.requested.remove(n)
        return taken


@dataclass(frozen=True)
class Job:
    """Train `steps` in a layout, from the checkpoint in `source` or from nothing, and save into `target`."""

    place: Place
    tied: bool
    steps: int
    source: str
    target: str


def work(rank: int, world: int, jobs: list[Job]) -> list[list[list[int]]]:
    """Run the jobs on one rank. Return the samples that it read, by job and step."""
    # Jobs of the same layout share their process groups.
    groups: dict[Layout, dict[str, Any]] = {}
    layouts = [layout_of(job.place.config(job.tied), world) for job in jobs]
    for layout in dict.fromkeys(layouts):
        made = Mesh(layout, rank).groups
        groups[layout] = {name: group.process_group for name, group in made.items() if not group.alone}
    read = []
    for job, layout in zip(jobs, layouts, strict=True):
        data = Noted()
        trainer = make_trainer(job.place.config(job.tied), rank, world, data, groups[layout])
        if job.source:
            load_into(trainer, Reader(Path(job.source)))
        by_step = []
        data.requested.clear()
        for _ in range(job.steps):
            trainer.step()
            by_step.append(data.taken(trainer.consumed))
        read.append(by_step)
        saver = Saver(trainer, Path(job.target), asynchronous=False, busy="wait", keep=0)
        saver.save()
        saver.wait_for_commit()
        # Free the memory of this trainer before the next one is made.
        del trainer, saver
        gc.collect()
    return read


def launch(jobs: list[Job]) -> dict[str, list[list[int]]]:
    """Run the jobs, with one launch per number of ranks. Return the sorted samples of each step, by target."""
    samples = {}
    for world in sorted({job.place.world for job in jobs}):
        same = [job for job in jobs if job.place.world == world]
        by_rank = run_ranks(world, work, same, deadline=60.0 + 30.0 * len(same))
        for number, job in enumerate(same):
            steps = [set().union(*(rank[number][step] for rank in by_rank)) for step in range(job.steps)]
            samples[job.target] = [sorted(step) for step in steps]
    return samples


@cache
def undisturbed(
    tied: bool, steps: int, experts: bool = False, optimizer: str = "adamw"
) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """Train on one process without interruption. Return its final state and the samples of each step."""
    data = Noted()
    trainer = make_trainer(replace(ONE_EXPERTS if experts else ONE, optimizer=optimizer).config(tied), data=data)
    read = []
    data.requested.clear()
    for _ in range(steps):
        trainer.step()
        read.append(data.taken(trainer.consumed))
    whole = {}
    for state in trainer.states():
        for slot in state.buffer.slots:
            low, high = state.holds(slot)
            if low < high:
                local = as_tensor(state.values(slot, low, high)).view(state.own_record(slot).local_shape)
                whole[f"{state.name}/{slot.record.name}"] = local.numpy()
    return whole, read


def worst(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the largest relative error of all tensors, and the tensor's name.

    An error is relative to the tensor's largest element, but at least to 1e-6 of the largest element among all tensors
    of the same kind (weights, first moments, second moments).
    """
    assert found.keys() == wanted.keys()
    largest: dict[str, float] = {}
    for name, b in wanted.items():
        kind = name.split("/")[0]
        largest[kind] = max(largest.get(kind, 0.0), float(np.abs(b).max()))
    errors = []
    for name, b in wanted.items():
        assert found[name].shape == b.shape, name
        scale = max(float(np.abs(b).max()), 1e-6 * largest[name.split("/")[0]])
        errors.append((float(np.abs(found[name] - b).max()) / scale, name))
    # max() would pass over a NaN.
    assert all(error == error for error, _ in errors)
    return max(errors)


def check_pairs(tmp_path: Path, pairs: list[tuple[Place, Place, bool]], after: int) -> None:
    """Train and save in the first layout of each pair, continue `after` steps in the second, compare with one process.

    Both the samples of each step and the final state must agree.
    """
    first: dict[tuple[Place, bool], Job] = {}
    second = []
    for number, (a, b, tied) in enumerate(pairs):
        job = Job(a, tied, BEFORE, "", str(tmp_path / f"{a.name}-{tied}"))
        first.setdefault((a, tied), job)
        source = f"{job.target}/step-{BEFORE:08d}"
        second.append(Job(b, tied, after, source, str(tmp_path / f"pair{number}")))
    samples = launch(list(first.values())) | launch(second)
    errors = []
    for (a, b, tied), job in zip(pairs, second, strict=True):
        wanted, read = undisturbed(tied, BEFORE + after, a.experts, a.optimizer)
        label = f"{a.name} -> {b.name}"
        before = samples[first[a, tied].target]
        assert before + samples[job.target] == [sorted(step) for step in read], f"{label}: the samples of each step"
        error, name = worst(tensors(Path(job.target) / f"step-{BEFORE + after:08d}"), wanted)
        errors.append((error, label, name))
    bad = [f"{label}: {name} is off by {error:.1e}" for error, label, name in errors if not error <= EXACT]
    assert not bad, bad
    print(f"reshard: {len(pairs)} pairs, largest error {max(errors)[0]:.1e}")


@pytest.mark.wide
def test_some_pairs_of_layouts(tmp_path: Path) -> None:
    check_pairs(tmp_path, [PAIRS[n] for n in QUICK], after=1)


@pytest.mark.wide
def test_all_pairs_of_layouts(tmp_path: Path) -> None:
    check_pairs(tmp_path, PAIRS, after=3)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["lion", "muon", "adafactor", "soap"])
def test_another_optimizers_states_go_to_another_layout(name: str, tmp_path: Path) -> None:
    pairs = [(ZERO3, TP2PP2), (DISK1, ZERO3), (TP2PP2, ONE), (TP4, ZERO2), (CUBE3, TP4)]
    check_pairs(tmp_path, [(replace(a, optimizer=name), replace(b, optimizer=name), True) for a, b in pairs], 2)


def test_one_process_reads_the_samples_in_order() -> None:
    _, read = undisturbed(True, 3)
    assert [n for step in read for n in step] == list(range(3 * BATCH))
