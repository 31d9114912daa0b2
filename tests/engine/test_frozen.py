"""Frozen parameters and modules of mixed precision: untrained weights are left alone, and wide weights stay wide."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.comm.mesh import Mesh
from meshwright.config.optimizer import OptimizerConfig
from meshwright.config.rules import check
from meshwright.device import Device
from meshwright.dryrun.run_rank import state_bytes
from meshwright.engine.context import build_context
from meshwright.engine.optim.flat import FlatOptimizer
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.plan.communication import Line, Traffic, by_line, stage_calls
from meshwright.plan.job import job_of
from meshwright.plan.memory import rank_memory
from meshwright.record import checkpoint_format as fmt
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout import Layout
from meshwright.spec.model.graph import Model
from meshwright.spec.model.part import BlockUnit, Unit
from tests.support.oracle import (
    EXACT,
    Made,
    gather_global,
    load_into,
    make_trainer,
    parameters,
    small_config,
    worst,
)
from tests.support.ranks import run_ranks

INTERLEAVED = {"layout": {"pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "recomputed": (1, {"recompute": {"mode": "full"}}),
    "recomputed in runs, divided": (2, {"recompute": {"mode": "every:2"}, "zero": {"stage": 3}}),
    "a stage without a weight": (2, {"layout": {"pp": 2}}),
    "a chunk without a weight": (2, INTERLEAVED),
    "a chunk without a weight, divided": (4, INTERLEAVED | {"zero": {"stage": 3}}),
}


def provider(ctx: Any, stage: Any) -> nn.Module:
    """Build the model with the embedding and the first half of the layers frozen."""
    module = model_provider(ctx, stage)
    if module.embedding is not None:
        module.embedding.requires_grad_(False)
    for name, block in module.blocks.items():
        block.requires_grad_(int(name) >= 2)
    return module


def steps(rank: int, world: int, sections: dict[str, Any]) -> list[tuple[float, float]]:
    config = small_config(**({"model": {"tied_embeddings": False, "layers": 4}} | sections))
    check(config, world)
    ctx = build_context(config, rank, world, Device("cpu"), trains=True)
    data = Made(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, provider), forward_step, data, data)
    return [(result.loss, result.grad_norm) for result in (trainer.step() for _ in range(3))]


@pytest.mark.parametrize("name", list(CASES))
def test_frozen_layers_train_alike_everywhere(name: str) -> None:
    world, sections = CASES[name]
    plain = steps(0, 1, {})
    for found in [steps(0, 1, sections)] if world == 1 else run_ranks(world, steps, sections):
        assert found == [pytest.approx(pair, rel=1e-9) for pair in plain]


MODEL = {"tied_embeddings": False, "layers": 4}
KINDS = ("parameters", "gradients", "master", "optimizer")
LAYOUTS: list[dict[str, Any]] = [
    {}, {"zero": {"stage": 1}}, {"zero": {"stage": 3}}, {"zero": {"stage": 2}}, {"layout": {"pp": 2}},
    {"layout": {"tp": 2, "sequence_parallel": True}}, {"zero": {"stage": 3}, "recompute": {"mode": "every:2"}},
]  # fmt: skip


def frozen(name: str) -> bool:
    return name.startswith(("embedding", "position", "layers.0", "layers.1"))


def frozen_trainer(rank: int, world: int, sections: dict[str, Any], seed: int = 1, precision: str = "fp64") -> Trainer:
    train = {"seed": seed, "precision": precision, "global_batch": 8}
    config = small_config(**({"model": MODEL, "train": train} | sections))
    ctx = build_context(config, rank, world, Device("cpu"), trains=True)
    data = Made(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, provider), forward_step, data)


def save(trainer: Trainer, folder: Path) -> None:
    saver = Saver(trainer, folder, asynchronous=True, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()


def load(trainer: Trainer, folder: Path) -> None:
    load_into(trainer, Reader(fmt.find_checkpoint(str(folder))))


def from_layout_to_layout(rank: int, world: int, folder: str) -> list[Any]:
    """Take two steps and save a checkpoint with each layout. Then resume each checkpoint with the next layout and other
    random weights. Return by layout: loss and norm, all parameters, the ledger of the step, and the bytes of the
    states.
    """
    found: list[Any] = []
    for number, sections in enumerate(LAYOUTS):
        trainer = frozen_trainer(rank, world, sections)
        trainer.step(), trainer.step()
        save(trainer, Path(folder, str(number)))
    for number, sections in enumerate(LAYOUTS):
        trainer = frozen_trainer(rank, world, sections, seed=2)
        load(trainer, Path(folder, str(number - 1 if number else len(LAYOUTS) - 1)))
        result = trainer.step()
        lines: dict[Line, Traffic] = {}
        for entry, t in trainer.ctx.ledger.entries.items():
            line = Line(entry.phase, entry.axis, entry.op)
            lines[line] = lines.get(line, Traffic()).plus(Traffic(t.calls, t.payload_bytes, t.wire_bytes))
        found.append(((result.loss, result.grad_norm), parameters(trainer), lines, state_bytes(trainer)))
    return found


class FrozenUnit(Unit):
    def records(self, *where: Any) -> Any:
        return {key: replace(record, trained=False) for key, record in super().records(*where).items()}


class FrozenBlock(FrozenUnit, BlockUnit):
    pass


def with_frozen_units(model: Model) -> Model:
    """Return the model as the planner must see it, with the parts frozen that `provider` freezes."""
    copy = lambda kind, unit: kind(**{field.name: getattr(unit, field.name) for field in fields(unit)})  # noqa: E731
    kinds = {"embedding": FrozenUnit, "blocks.0": FrozenBlock, "blocks.1": FrozenBlock}
    return model.map_units(lambda node: copy(kinds[node.key], node.unit) if node.key in kinds else node.unit)


def test_frozen_parameters_are_loaded_saved_sharded_and_planned(tmp_path: Path) -> None:
    plain = frozen_trainer(0, 1, {})
    plain.step(), plain.step()
    result, values = plain.step(), gather_global(parameters(plain))
    ranks = run_ranks(2, from_layout_to_layout, str(tmp_path))
    for number in range(len(LAYOUTS)):
        index = fmt.read_index(fmt.find_checkpoint(str(tmp_path / str(number))))
        names = [name.split("/", 1) for name in index.tensors]
        assert {name for state, name in names if state == "param"} == set(values)
        assert {name for state, name in names if state != "param"} == {n for n in values if not frozen(n)}
    for rank, cases in enumerate(ranks):
        for sections, (found, own, lines, sizes) in zip(LAYOUTS, cases, strict=True):
            assert found == pytest.approx((result.loss, result.grad_norm), rel=EXACT), sections
            assert worst(own, values)[0] <= EXACT, sections
            train = {"precision": "fp64", "global_batch": 8}
            job = job_of(small_config(**({"model": MODEL, "train": train, "run": {"device": "cpu"}} | sections)), 2)
            vars(job)["model"] = with_frozen_units(job.model)
            pp_rank = job.layout.coordinate(rank)["pp"]
            planned = by_line(stage_calls(job, pp_rank))
            sharding = ("reduce", "gather")
            assert {k: v for k, v in lines.items() if k.phase in sharding} == {
                k: v for k, v in planned.items() if k.phase in sharding
            }, sections
            said = rank_memory(job, pp_rank)
            assert {kind: getattr(said, kind) for kind in KINDS} == {kind: sizes[kind] for kind in KINDS}, sections


def half_a_tie(rank: int, world: int) -> str:
    def without_embedding(ctx: Any, stage: Any) -> nn.Module:
        module = model_provider(ctx, stage)
        if stage.first:
            module.embedding.requires_grad_(False)  # type: ignore[union-attr, operator]
        return module

    config = small_config(layout={"pp": 2})
    ctx = build_context(config, rank, world, Device("cpu"), trains=True)
    try:
        Trainer(ctx, build_modules(ctx, without_embedding), forward_step, Made(53, 16))
    except UserError as error:
        return str(error)
    return ""


def test_a_tie_that_is_frozen_at_one_end_is_refused() -> None:
    said = run_ranks(2, half_a_tie, deadline=60.0)
    assert said[0] == "" and "embedding.weight is tied and frozen on one of its two stages only" in said[1]


def test_a_frozen_weight_has_no_master(tmp_path: Path) -> None:
    """It is saved in bf16 as it is. A run that later trains it starts with zero moments."""
    trainer = frozen_trainer(0, 1, {}, precision="bf16")
    trainer.step()
    save(trainer, tmp_path)
    index = fmt.read_index(fmt.find_checkpoint(str(tmp_path)))
    dtypes = {frozen(name[6:]): tensor["dtype"] for name, tensor in index.tensors.items() if name.startswith("param/")}
    assert dtypes == {True: "bfloat16", False: "float32"}
    again = frozen_trainer(0, 1, {}, seed=2, precision="bf16")
    load(again, tmp_path)
    for (record, value), (_, other) in zip(parameters(trainer), parameters(again), strict=True):
        assert torch.equal(value, other), record.name
    config = small_config(model=MODEL, train={"precision": "bf16", "global_batch": 8})
    unfrozen = make_trainer(config)
    load(unfrozen, tmp_path)
    zero = {state.name for state in unfrozen.states() if state.name != "param" for slot in state.buffer.slots
            if frozen(slot.record.name) and not state.values(slot, *state.holds(slot)).any()}  # fmt: skip
    assert zero == {"exp_avg", "exp_avg_sq"} and unfrozen.step().loss == again.step().loss


class Mixed(nn.Module):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, dtype=low)
        self.norm = nn.LayerNorm(64)


def filled(module: nn.Module, grad_dtype: torch.dtype, value: float) -> DataParallel:
    parallel = DataParallel([module], Mesh(Layout(1), 0), grad_dtype=grad_dtype)
    fill(parallel, value)
    return parallel


def fill(parallel: DataParallel, value: float) -> None:
    parallel.begin(1)
    for slot in (slot for buffer in parallel.buffers for slot in buffer.slots):
        slot.sink.add(torch.full(slot.record.local_shape, value, dtype=slot.grad.dtype))
    parallel.finish()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_the_norm_of_gradients_of_two_precisions(low: torch.dtype) -> None:
    """Each is summed at least in float32, because 64 x 64 squares of 3000 exceed the range of fp16."""
    parallel = filled(Mixed(low), low, 3000.0)
    grads = [slot.grad.double() for buffer in parallel.buffers for slot in buffer.slots]
    true = sum(float(grad.square().sum()) for grad in grads)
    assert float(parallel.square_sum()) == pytest.approx(true, rel=1e-5)


def test_wide_weights_keep_their_width_without_masters() -> None:
    """master_dtype=bf16 means no masters rather than narrow ones. Adam's steps of 1e-3 would vanish in a bf16
    weight.
    """
    module = Mixed(torch.bfloat16)
    parallel = filled(module, torch.float32, 1.0)
    optimizer = FlatOptimizer(parallel.buffers, OptimizerConfig(master_dtype="bf16", lr=1e-3, weight_decay=0.0))
    for _ in range(50):
        fill(parallel, 1.0)
        optimizer.step(1e-3, 1.0)
    assert module.norm.weight.detach() == pytest.approx(0.95, abs=1e-3)
