"""A part that Meshwright doesn't know, and a model that uses it in every second block, both in this one file.

The model trains on every axis and ZeRO stage and equals one process, resumes on another layout, and is planned as it is
run dry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.cli.dryrun import compare
from meshwright.comm.ops import all_reduce_
from meshwright.config.kinds import MODEL_KINDS, ModelKind
from meshwright.config.sections import Config, ModelConfig
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.nn.build import MODULES
from meshwright.nn.linear import Linear
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.plan.job import job_of
from meshwright.plan.memory import rank_parameters
from meshwright.plan.rank import planned_rank
from meshwright.spec.layout.params import Init, rows_of
from meshwright.spec.model.description import gpt
from meshwright.spec.model.graph import Model, parameter_count
from meshwright.spec.model.linear import column_calls, row_calls, row_records
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import (
    SINGLE_RANK,
    Collective,
    Coordinate,
    Kernels,
    MicroBatch,
    NamedPart,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)
from tests.support.oracle import (
    EXACT,
    WholeTensors,
    gather_global,
    load_into,
    make_trainer,
    parameters,
    small_config,
    true_gradients,
    worst,
)
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Mixer(Part):
    """A gated layer that divides its inner features, which are cut over tp, by their common magnitude.

    That needs an all-reduce over tp of one number per token, in forward and in backward.
    """

    hidden: int
    width: int
    init: Init

    def records(self, at: Coordinate, name: str) -> Records:
        rows = self.width // at.size("tp")
        cut = ((at.index("tp") * rows, rows, 0),)
        return {
            "value.weight": rows_of(f"{name}.value.weight", cut, self.width, (self.hidden,), self.init),
            "gate": rows_of(f"{name}.gate", cut, self.width, (), Init("ones"), decay=False),
        } | row_records(at, name, "out", (self.hidden, self.width), self.init, bias=False)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        width, tokens = self.width // at.size("tp"), batch.tokens(at)
        products = (
            Product("value", tokens, width, self.hidden), Product("out", tokens, self.hidden, width, scattered=True),
        )  # fmt: skip
        return Work(products, moved=4.0 * tokens * width * batch.element, kernels=8)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        width = self.width // at.size("tp")
        yield from column_calls(at, batch, self.hidden, width)
        yield from row_calls(at, batch, self.hidden, width)
        for phase in ("forward", "backward"):
            yield Collective(phase, "tp", "all_reduce", batch.tokens(at) * batch.element)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        yield SavedTensor("mixed", 4.0 * batch.tokens(at) * (self.width // at.size("tp")) * batch.element)


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks. Every rank uses the sum, so its gradient is a sum over the ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        total = x.clone()
        all_reduce_(total, group, "sum")
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.forward(ctx, grad, ctx.group), None


class MixerModule(nn.Module):
    def __init__(self, parallel: Parallel, part: Mixer, records: Records) -> None:
        super().__init__()
        self.value = Linear(parallel, records["value.weight"], None, "column")
        self.gate = parallel.parameter(records["gate"])
        self.out = Linear(parallel, records["out.weight"], None, "row")
        self.width, self.tp = part.width, parallel.tp

    def forward(self, x: Tensor, norm: Norm, *unused: object) -> tuple[Tensor, Tensor]:
        x, inner = self.value.after_norm(x, norm)
        inner = inner * torch.sigmoid(self.gate)
        squares = inner.square().sum(1)
        if not self.tp.alone:
            squares = _SumOverRanks.apply(squares, self.tp.name)
        return x, self.out(inner * torch.rsqrt(squares / self.width + 1e-3)[:, None])


def every_second(model: ModelConfig) -> Model:
    """Return a GPT with a mixer in place of the MLP in every second block."""
    plain = gpt(model)
    mlp = plain.blocks[0].parts[-1].part
    assert isinstance(mlp, MLPPart)
    mixer = NamedPart("mixer", "mixer", Mixer(model.hidden, model.ffn, mlp.init))
    other = replace(plain.blocks[0], parts=(*plain.blocks[0].parts[:-1], mixer))
    return plain.map_units(lambda node: other if node.layer is not None and node.layer % 2 else node.unit)


MODEL_KINDS.register("every-second", ModelKind(every_second, ("causal",), MODEL_KINDS["gpt"].supports))
MODULES[Mixer] = MixerModule

CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "tp-sp-zero0": (4, {"layout": {"tp": 2, "sequence_parallel": True}}),
    "pp-zero1": (4, {"layout": {"pp": 2}, "zero": {"stage": 1}}),
    "tp-zero2": (4, {"layout": {"tp": 2}, "zero": {"stage": 2}, "recompute": {"mode": "full"}}),
    "tp-pp-zero3": (8, {"layout": {"tp": 2, "pp": 2}, "zero": {"stage": 3}}),
}
SAVED, RESUMED = "pp-zero1", "tp-zero2"


def config_of(name: str, precision: str = "fp64") -> Config:
    sections = {} if name == "one" else CASES[name][1]
    train = {"precision": precision, "compile": "false"}
    return small_config(model={"kind": "every-second"}, train=train, run={"device": "cpu"}, **sections)


@dataclass(frozen=True)
class Task:
    name: str
    source: str = ""
    target: str = ""


Errors = dict[str, tuple[float, str]]


def work(rank: int, world: int, tasks: list[Task], gradients: WholeTensors, after: WholeTensors) -> list[Errors]:
    """Return the errors of a rank against one process: gradients of the first batch, and parameters after two steps."""
    found = []
    for task in tasks:
        trainer = make_trainer(config_of(task.name), rank, world)
        errors = {}
        if task.source:
            load_into(trainer, Reader(Path(task.source)))
        else:
            errors["gradients"] = worst(true_gradients(trainer), gradients)
            trainer.step()
        if task.target:
            saver = Saver(trainer, Path(task.target), asynchronous=False, busy="wait", keep=0)
            saver.save()
            saver.wait_for_commit()
        trainer.step()
        errors["parameters"] = worst(parameters(trainer), after)
        found.append(errors)
    return found


@pytest.fixture(scope="module")
def one_process() -> tuple[WholeTensors, WholeTensors]:
    trainer = make_trainer(config_of("one"))
    gradients = gather_global(true_gradients(trainer))
    for _ in range(2):
        trainer.step()
    return gradients, gather_global(parameters(trainer))


@pytest.mark.wide
def test_it_trains_on_every_axis_and_resumes_on_another_layout(
    one_process: tuple[WholeTensors, WholeTensors], tmp_path: Path
) -> None:
    assert {"layers.1.mixer.gate", "layers.0.mlp.up.weight"} <= one_process[0].keys()
    saved = str(tmp_path / "run")
    first = [Task(name, target=saved if name == SAVED else "") for name in CASES]
    again = [Task(RESUMED, source=f"{saved}/step-00000001")]
    for tasks in (first, again):
        for world in (4, 8):
            same = [task for task in tasks if CASES[task.name][0] == world]
            for rank, found in enumerate(run_ranks(world, work, same, *one_process) if same else []):
                for task, errors in zip(same, found, strict=True):
                    for what, (error, name) in errors.items():
                        assert error <= EXACT, f"{task.name}, rank {rank}: {what} of {name} are off by {error:.1e}"


@pytest.mark.parametrize("name", list(CASES))
def test_a_dry_run_equals_the_plan_in_every_exact_line(name: str) -> None:
    world, config = CASES[name][0], config_of(name, "bf16")
    job = job_of(config, world)
    for rank in (0, world - 1):
        one = compare(rank, run_rank(config, world, rank, Device("meta")), planned_rank(job, rank))
        assert one["equal"], one


def test_a_part_that_forgets_its_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run shows which call the part did not state."""
    plain = Mixer.collectives
    monkeypatch.setattr(Mixer, "collectives", lambda *args: [call for call in plain(*args) if call.op != "all_reduce"])
    config = config_of("tp-sp-zero0", "bf16")
    from meshwright.plan.communication import unit_collectives

    unit_collectives.cache_clear()
    one = compare(0, run_rank(config, 4, 0, Device("meta")), planned_rank(job_of(config, 4), 0))
    unit_collectives.cache_clear()
    wrong = {(call["phase"], call["axis"], call["op"]) for call in one["calls"] if not call["equal"]}
    assert wrong == {("forward", "tp", "all_reduce"), ("backward", "tp", "all_reduce")}


def test_the_planner_sums_over_both_kinds_of_blocks() -> None:
    model = config_of("one").model
    h, f = model.hidden, model.ffn
    more = parameter_count(gpt(model)) - parameter_count(every_second(model))
    # The MLP has biases, and the mixer has a gate.
    assert more == model.layers // 2 * ((2 * h * f + f + h) - (2 * h * f + f))
    job = job_of(config_of("pp-zero1"), 4)
    assert [rank_parameters(job, rank) for rank in range(2)] != [0, 0]
    assert every_second(model).records(SINGLE_RANK)["blocks.1.mixer.gate"].name == "layers.1.mixer.gate"


@pytest.mark.parametrize(("old", "new"), [("kept", "saved"), ("working", "workspace")])
def test_a_part_with_a_method_of_an_old_name_is_refused(old: str, new: str) -> None:
    with pytest.raises(TypeError, match=f"Own.{old} is called {new} now: rename it"):
        type("Own", (Part,), {old: lambda self: ()})
