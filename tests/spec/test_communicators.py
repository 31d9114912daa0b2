"""The communicators that a run connects early, and that the plan counts, are those of the calls in its ledger."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright.comm.mesh as mesh_module
from meshwright.comm.group import Group
from meshwright.comm.mesh import Mesh
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.meta_mode import MetaMode
from meshwright.dryrun.run_rank import make_rank
from meshwright.dryrun.stand_ins import fake_world
from meshwright.plan.job import checked_job
from meshwright.plan.memory import COMMUNICATOR_GIB, SMALL_COMMUNICATOR_GIB, communicators_gib
from meshwright.run.pretrain import connect
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import layout_of
from meshwright.spec.traffic.communicators import PP_BACK, SEQUENCE, Communicator, communicators, is_urgent
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

LLAMA = {
    "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "kv_heads": 4, "tied_embeddings": False,
}  # fmt: skip
MIXTURE = {**LLAMA, "experts": {"count": 4, "ffn": 16, "capacity": 1.0}}
BALANCED = {**LLAMA, "experts": {"count": 4, "ffn": 16, "capacity": 1.0, "aux_loss": 0.01}}
T5 = {"kind": "t5", "layers": 6, "seq": 32, "t5": {"encoder_layers": 2, "decoder_seq": 32}}
NODES = {"node_size": 2}
SP = {"tp": 2, "sequence_parallel": True}

Sections = dict[str, dict[str, Any]]
CASES: dict[str, tuple[int, Sections]] = {
    "one": (1, {}),
    "dp": (4, {}),
    "zero3": (4, {"zero": {"stage": 3}}),
    "tp": (2, {"layout": {"tp": 2}}),
    "tp-dp": (4, {"layout": SP, "zero": {"stage": 1}}),
    "key-value copies": (8, {"layout": {"tp": 4}, "model": {**LLAMA, "kv_heads": 2}}),
    "pp tied": (2, {"layout": {"pp": 2}}),
    "pp": (8, {"layout": {"pp": 4}, "model": LLAMA}),
    "pp4 tied": (8, {"layout": {"pp": 4}}),
    "interleaved": (2, {"layout": {"pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}, "model": LLAMA}),
    "ring of stages": (4, {
        "layout": {"pp": 4, "chunks": 2}, "pipeline": {"schedule": "interleaved"}, "model": {**LLAMA, "layers": 8},
    }),
    "cp": (2, {"layout": {"cp": 2}, "model": LLAMA}),
    "cp-tp-dp": (8, {"layout": {"cp": 2, "tp": 2}, "model": LLAMA}),
    "ulysses": (4, {"layout": {"cp": 2}, "model": LLAMA, "context": {"kind": "ulysses"}}),
    "hybrid": (8, {"layout": {"cp": 4}, "model": LLAMA, "context": {"kind": "hybrid", "inner": 2}}),
    "hybrid experts": (8, {
        "layout": {"cp": 4}, "model": MIXTURE, "context": {"kind": "hybrid", "inner": 2},
    }),
    "hybrid dropless": (8, {
        "layout": {"cp": 4}, "model": {**LLAMA, "experts": {"count": 4, "ffn": 16}},
        "context": {"kind": "hybrid", "inner": 2},
    }),
    "ep": (4, {"layout": {"ep": 2}, "model": MIXTURE}),
    "ep-tp": (8, {"layout": {"ep": 2, **SP}, "model": MIXTURE}),
    "ep-cp-tp balanced": (8, {"layout": {"ep": 2, "cp": 2, **SP}, "model": BALANCED, "zero": {"stage": 3}}),
    "etp1": (8, {"layout": {"ep": 4, "etp": 1, **SP}, "model": MIXTURE}),
    "etp2": (8, {"layout": {"tp": 4, "etp": 2, "ep": 2, "sequence_parallel": True}, "model": MIXTURE}),
    "ep by node": (8, {"layout": {"ep": 4, **NODES}, "model": MIXTURE, "comm": {"algorithm": {"ep": "hierarchical"}}}),
    "shards of a node": (4, {"layout": NODES, "zero": {"stage": 3, "shard_group": "node"}}),
    "copies of a node": (4, {"layout": NODES, "zero": {"stage": 3}, "comm": {"gather": {"node_copy": True}}}),
    "replicas": (4, {"layout": {"replicas": 2}}),
    "replicas-pp": (8, {"layout": {"replicas": 2, "pp": 2}}),
    "2d": (4, {"layout": {"tp": 4, "tp_kind": "2d", "tp_grid": [2, 2]}, "model": LLAMA, "train": {"micro_batch": 4}}),
    "3d": (16, {
        "layout": {"tp": 8, "tp_kind": "3d", "tp_grid": [2, 2, 2]}, "model": {**LLAMA, "heads": 8, "kv_heads": 8},
        "train": {"micro_batch": 4},
    }),
    "encoder-decoder": (4, {"layout": {"pp": 4}, "model": T5}),
}  # fmt: skip


def config_of(name: str) -> Config:
    sections = {key: dict(value) for key, value in CASES[name][1].items()}
    # Without a pipeline two micro-batches make the same calls as four.
    batch = 16 if "pp" in sections.get("layout", {}) else 8
    sections["train"] = {"precision": "fp32", "global_batch": batch} | sections.get("train", {})
    return small_config(**sections)


class Noted:
    """A recorder of the process groups that calls go through, and of the pair for sends and receives of a pipeline."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.seen = mesh, set[tuple[int, tuple[int, ...], bool]]()
        for group in mesh.groups.values():
            group._call = self._noting(group, group._call)  # type: ignore[method-assign]

    def _noting(self, group: Group, call: Any) -> Any:
        def noted(*args: Any, peer: int | None = None, **named: Any) -> Any:
            ranks = group.ranks if peer is None else tuple(sorted((group.rank, peer)))
            self.seen.add((id(group.process_group), ranks, peer is not None))
            return call(*args, peer=peer, **named)

        return noted

    def communicators(self, wanted: list[Communicator]) -> set[tuple[int, tuple[int, ...], bool]]:
        groups = self.mesh.groups
        return {(id(groups[each.group].process_group), each.ranks, each.is_pair) for each in wanted}


@pytest.mark.parametrize("name", list(CASES))
def test_a_step_uses_the_stated_communicators(name: str) -> None:
    world, config = CASES[name][0], config_of(name)
    for rank in sorted({0, world // 2, world - 1}):
        with fake_world(rank, world), MetaMode():
            trainer = make_rank(config, world, rank, Device("meta"))
            noted = Noted(trainer.ctx.mesh)
            if trainer.outer is not None:
                trainer.step_number = config.train.local.steps - 1  # replicas synchronise at the end of a round
            trainer.step()
            wanted = communicators(config, trainer.ctx.layout, rank)
            assert noted.communicators(wanted) == noted.seen, f"rank {rank}: {wanted}"
            assert len(wanted) == len(set(wanted)) == len(noted.seen)


def real(rank: int, world: int, config: Config) -> tuple[Any, Any, int]:
    trainer = make_trainer(config, rank, world)
    noted = Noted(trainer.ctx.mesh)
    connect(trainer.ctx)
    connected, noted.seen = noted.seen, set()
    trainer.step()
    return connected == noted.seen, sorted(each[1:] for each in connected), len(trainer.ctx.mesh.flight.open)


@pytest.mark.parametrize("name", ["ring of stages", "pp4 tied"])
def test_warming_up_connects_what_a_real_step_uses(name: str) -> None:
    """Every rank makes its calls in the same order, or this would hang."""
    world, config = CASES[name][0], config_of(name)
    for same, connected, left in run_ranks(world, real, config):
        assert same and left == 0, connected


def test_a_traced_step_has_its_pipeline_connected() -> None:
    config = small_config(layout={"pp": 2, "tp": 2}, run={"trace": True})
    layout = layout_of(config, 8)
    whole = [(rank, Communicator("pp", layout.group("pp", rank))) for rank in range(8)]
    assert [rank for rank, wanted in whole if wanted in communicators(config, layout, rank)] == [0, 4]


def test_world_uses_the_process_group_of_equal_ranks() -> None:
    for layout, twin in ((Layout(8), "dp"), (Layout(2, tp=2), "tp"), (Layout(8, tp=2), None)):
        with fake_world(0, layout.world):
            mesh = Mesh(layout, 0)
            shared = [name for name, group in mesh.groups.items() if group.process_group is mesh.world.process_group]
            assert shared == [*([twin] if twin else []), "world"]


def test_both_directions_of_a_pipeline_have_a_group_that_counts_as_one_axis() -> None:
    with fake_world(1, 4):
        mesh = Mesh(Layout(4, pp=4), 1)
    assert mesh.pp_back.process_group is not mesh.pp.process_group
    assert (mesh.pp_back.axis, mesh.pp_back.ranks) == ("pp", mesh.pp.ranks)
    assert mesh.pp_back.label != mesh.pp.label, "the two are counted apart where a hang is looked into"


def test_options_of_groups_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small communicators have few thread blocks, and calls that the compute stream waits for have priority."""
    made: dict[tuple[int, ...], list[Any]] = {}

    def new_group(ranks: list[int], pg_options: Any = None, **_: Any) -> Any:
        made.setdefault(tuple(ranks), []).append(pg_options)
        return object()

    def options() -> Any:
        config = SimpleNamespace(max_ctas=None)
        return SimpleNamespace(config=config, is_high_priority_stream=False, _timeout=timedelta(minutes=10))

    backend = SimpleNamespace(Options=options)
    monkeypatch.setattr(mesh_module.dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(mesh_module.dist, "new_group", new_group)
    monkeypatch.setattr(mesh_module.dist, "get_backend", lambda: "nccl")
    Mesh(Layout(8, tp=2, pp=2), 0, timeout=5.0)
    # torch warns on every rank if the options and the argument have different limits.
    assert {each._timeout for options in made.values() for each in options} == {mesh_module.call_limit(5.0)}
    found = {ranks: [(each.config.max_ctas, each.is_high_priority_stream) for each in made[ranks]] for ranks in made}
    assert found == {
        (0, 2): [(None, False)], (0, 1): [(None, True)], tuple(range(8)): [(2, False)],
        (0, 4): [(4, False), (4, True), (4, True)],  # the embedding, and both directions of the pipeline
    }  # fmt: skip
    made.clear()
    monkeypatch.setattr(mesh_module.dist, "get_backend", lambda: "gloo")
    Mesh(Layout(8, tp=2, pp=2), 0)
    assert {each for options in made.values() for each in options} == {None}


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "cp-tp-ep-dp-pp"])
def test_sums_over_a_sequence_are_small_in_every_order_of_the_axes(order: str) -> None:
    layout = Layout(8, tp=2, cp=2, order=order)
    assert Communicator(layout.without_ones(SEQUENCE), (0, 1, 2, 3)).is_small


def test_gradients_do_not_go_first() -> None:
    assert all(map(is_urgent, ("tp", "tp.col", "cp", "cp.inner", "tp-cp", "ep.node", "etp", "pp", PP_BACK)))
    assert not any(map(is_urgent, ("dp", "cp-dp", "edp", "world", "embedding", "replicas", "tp-cp-dp-pp")))


def test_the_plan_counts_the_communicators_of_the_busiest_rank() -> None:
    dense = checked_job(small_config(layout={"tp": 2, "pp": 4}, model=LLAMA), 16)
    # The large ones are tp and dp. The small ones are world and, in the middle, two neighbours in both directions.
    assert communicators_gib(dense) == pytest.approx(2 * COMMUNICATOR_GIB + 5 * SMALL_COMMUNICATOR_GIB)
    assert communicators_gib(checked_job(small_config(), 8)) == COMMUNICATOR_GIB, "world is dp"
    assert communicators_gib(checked_job(small_config(), 1)) == 0.0
    mixture = checked_job(small_config(layout={"tp": 2, "cp": 2, "ep": 2, "pp": 2}, model=BALANCED), 16)
    # The large ones are tp, cp, cp-dp, ep and edp. The small ones are tp-cp, world and one neighbour in both
    # directions.
    assert communicators_gib(mixture) == pytest.approx(5 * COMMUNICATOR_GIB + 4 * SMALL_COMMUNICATOR_GIB)


def test_the_first_rank_says_what_connecting_takes() -> None:
    said: list[str] = []
    with fake_world(0, 4):
        mesh = Mesh(Layout(4, tp=2), 0)
        wanted = [Communicator("tp", (0, 1)), Communicator("dp", (0, 2))]
        mesh.warm_up(wanted, torch.device("cpu"), said.append)
    assert len(said) == 1 and "Connecting 2 communicators" in said[0]
