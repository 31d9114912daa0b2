"""Several blocks as one compiled graph have the gradients of uncompiled blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.config.kinds import MODEL_KINDS
from meshwright.config.rules import first_broken_rule
from meshwright.device import Device
from meshwright.dryrun.run_rank import make_rank
from meshwright.dryrun.stand_ins import fake_world, release
from meshwright.engine.compiling import blocks_together
from meshwright.engine.marks import BACKWARD, FORWARD, Marks
from meshwright.errors import UserError
from meshwright.models.stage import stage_of
from meshwright.nn.build import MODULES, run_blocks
from meshwright.nn.mlp import MLP
from meshwright.nn.unit import GATE
from meshwright.spec.model.description import gpt
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import LossTerm
from tests.support.oracle import EXACT, gather_global, made_for, make_trainer, small_config, true_gradients, worst

MODELS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "bert", "predictions": 5},
    "t5": {"kind": "t5", "layers": 8, "head_dim": 10, "t5": {"decoder_seq": 8, "encoder_layers": 4}},
    "gpt": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False},
    "glm": {"kind": "glm"},
    "window": {"window": 3, "position": "rope", "kv_heads": 2},
}
TUNES = {"none": {}, "lora": {"kind": "lora", "rank": 3}, "dora": {"kind": "dora", "rank": 3}}


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["none", "selective", "every:2"])
@pytest.mark.parametrize(
    ("kind", "tune", "documents"),
    [*((kind, "none", False) for kind in MODELS), ("gpt", "none", True), ("gpt", "lora", True), ("gpt", "dora", False)],
)
def test_gradients_are_those_of_one_eager_process(kind: str, tune: str, documents: bool, mode: str) -> None:
    """Two steps are compared, because gradients of the first one come before their number is known, and validation too.
    All runs of blocks of one stack share a graph.
    """
    torch.compiler.reset()
    counters.clear()
    given = {"model": MODELS[kind], "tune": TUNES[tune], "recompute": {"mode": mode}, "run": {"device": "cpu"}}
    plain = small_config(**given)
    together = small_config(**given, train={"compile": "true", "compile_together": 2})
    data = made_for(plain, segments=True) if documents else made_for(plain)
    alone, trainer = make_trainer(plain, data=data), make_trainer(together, data=data)
    whole = gather_global(true_gradients(alone))
    for _ in range(2):
        error, name = worst(true_gradients(trainer), whole)
        assert error <= EXACT, name
    stacks = 2 if kind == "t5" else 1
    graphs = 2 if mode == "every:2" else 1  # Recomputed blocks run without gradients first.
    graphs *= 2 if kind == "glm" else 1  # The longest part of a sample that looks both ways becomes a symbol.
    assert counters["stats"]["unique_graphs"] == stacks * graphs
    assert trainer.validate()["loss"] == pytest.approx(alone.validate()["loss"], rel=EXACT)


def test_where_blocks_communicate_they_are_compiled_one_by_one() -> None:
    own = {"compile": "auto", "compile_together": 4}
    assert first_broken_rule(small_config(train=own), 2) is None
    broken = first_broken_rule(small_config(train=own, layout={"tp": 2}), 2)
    assert broken is not None and broken.startswith("train.compile_together=4 can't be combined with layout.tp=2 yet")
    for without in ({"train": {**own, "compile": "false"}}, {"train": own, "model": {"dropout": 0.1}}):
        broken = first_broken_rule(small_config(**without), 2)
        assert broken is not None and "train.compile_together=4" in broken and "compile" in broken.split(": ")[0]
    assert first_broken_rule(small_config(train={"compile": "false"}, layout={"tp": 2}), 2) is None
    for wrong in (0, "many"):
        with pytest.raises(UserError, match=f"compile_together={wrong} must be auto or a number above zero"):
            small_config(train={"compile_together": wrong})


@pytest.mark.parametrize(
    ("changed", "together"),
    [
        ({"model": {"layers": 8}}, 4),
        ({"model": {"layers": 6}}, 3),
        ({"model": {"layers": 7}}, 1),
        ({"model": {"layers": 8}, "recompute": {"mode": "every:2"}}, 2),
        ({"model": {"layers": 8}, "recompute": {"mode": "full"}}, 1),
        ({"model": {"layers": 8, "hidden": 4096, "ffn": 16384, "seq": 4096}}, 1),
        ({"model": {"layers": 8, "experts": {"count": 4}}}, 1),
        ({"model": MODELS["t5"]}, 4),
        ({"model": {"layers": 8}, "train": {"compile_together": 2}}, 2),
        # Groups that differ more than blocks do would be compiled more often.
        ({"model": {"layers": 8, "window": 3, "window_pattern": [1, 0]}}, 4),
        ({"model": {"layers": 20, "window": 3, "window_pattern": [1, 1, 1, 1, 0]}}, 1),
        ({"model": {"layers": 6, "window": 3, "window_pattern": [1, 1, 1, 0, 0, 0]}}, 3),
        # On several ranks another rank would wait.
        ({"model": {"layers": 8}, "layout": {"pp": 2}}, 1),
        ({"model": MODELS["t5"], "layout": {"pp": 2}}, 1),
        ({"model": {"layers": 8}, "layout": {"pp": 2}, "pipeline": {"split": [8, 0]}}, 1),
        # A chunk without blocks.
        (
            {
                "model": {"layers": 8},
                "layout": {"chunks": 2},
                "pipeline": {"schedule": "interleaved", "split": [8, 0]},
            },
            1,
        ),
    ],
)
def test_small_blocks_are_compiled_together_by_themselves(changed: dict[str, Any], together: int) -> None:
    config = small_config(**changed)
    world = config.layout.pp
    with fake_world(world - 1, world):
        trainer = make_rank(config, world, world - 1, Device("meta"))
        ctx = replace(trainer.ctx, device=Device("cuda"))
        assert blocks_together(ctx, trainer.modules[-1]) == together
        assert blocks_together(trainer.ctx, trainer.modules[-1]) == changed.get("train", {}).get("compile_together", 1)
        release(trainer)


def test_norms_of_blocks_in_one_graph_are_noted_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks come after each group in forward and before it in backward, with the names of its first and its last
    block.
    """
    trainer = make_trainer(small_config(model={"layers": 4}, run={"device": "cpu"}))
    monkeypatch.setattr(trainer.modules[0], "several", (run_blocks, 2))
    marks = Marks(trainer.ctx, trainer.modules)
    marks.begin(1)
    trainer.gradients()
    names = {each: [mark.name for mark in marks.steps[1] if mark.direction == each] for each in (FORWARD, BACKWARD)}
    groups = ["layers.0 to layers.1", "layers.2 to layers.3"]
    count = trainer.micro_batches
    assert names[FORWARD] == count * ["embedding", *groups, "head"]
    assert names[BACKWARD] == count * ["head", *reversed(groups)]


def test_norms_of_recomputed_groups_are_those_of_their_micro_batch() -> None:
    """The first micro-batch's backward comes after the second one's forward, as in a pipeline."""
    trainer = make_trainer(small_config(model={"layers": 4}, recompute={"mode": "every:2"}, run={"device": "cpu"}))
    module, streams, data = trainer.modules[0], trainer.ctx.parallel.streams, made_for(trainer.ctx.config)
    module.several = (run_blocks, 2)  # type: ignore[assignment]
    module.train()
    marks = Marks(trainer.ctx, trainer.modules)
    marks.begin(1)
    trainer.data_parallel.begin(2)
    batch = {name: torch.as_tensor(value)[None] for name, value in data.sample(0).items()}
    losses = []
    for micro_batch in (0, 1):
        streams.begin(1, micro_batch, 0)
        losses.append(module(batch)[0])
    before = len(marks.steps[1])
    losses[0].backward()
    assert {mark.micro_batch for mark in marks.steps[1][before:]} == {0}


class Penalised(MLP):
    def forward(self, *given: Any) -> Any:
        x, y = super().forward(*given)
        return x, y, y.square().mean(1).sum()[None]


@dataclass(frozen=True)
class PenalisedPart(MLPPart):
    def losses(self) -> Any:
        return (LossTerm("penalty", 0.01),)


def penalised(model: Any) -> Any:
    plain = gpt(model)

    def changed(block: Any) -> Any:
        *rest, last = block.parts
        return replace(block, parts=(*rest, last._replace(part=PenalisedPart(**vars(last.part)))))

    return plain.map_units(lambda node: changed(node.unit) if node.stackable else node.unit)


def test_blocks_that_add_to_the_loss_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_KINDS, "penalised", replace(MODEL_KINDS["gpt"], describe=penalised))
    monkeypatch.setitem(MODULES, PenalisedPart, Penalised)
    trainer = make_trainer(small_config(model={"kind": "penalised"}, run={"device": "cpu"}))
    ctx, module = replace(trainer.ctx, device=Device("cuda")), trainer.modules[0]
    assert blocks_together(ctx, module) == 1
    asked = small_config(model={"kind": "penalised"}, train={"compile_together": 2})
    with pytest.raises(UserError, match="can't take blocks that add to the loss: set train.compile_together=1"):
        blocks_together(replace(ctx, config=asked), module)


@pytest.mark.wide
def test_many_kinds_of_graphs_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are five kinds of groups, each with gradients and without: more than torch compiles by default."""
    torch.compiler.reset()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **how: plain(*given, **how, backend="eager"))
    model = {"layers": 20, "window": 3, "window_pattern": [1, 1, 1, 1, 0]}
    own = {"compile": "true", "compile_together": 4}
    trainer = make_trainer(small_config(model=model, train=own, run={"device": "cpu"}))
    trainer.step()
    trainer.validate()


class CountingGate:
    """A gate of weights that stay in memory."""

    closes = False

    def __init__(self) -> None:
        self.opened = 0

    def open(self) -> None:
        self.opened += 1


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_blocks_wait_for_their_weights(kind: str) -> None:
    """ZeRO stages 1 and 2 gather the weights of the last update while the next step begins."""
    trainer = make_trainer(small_config(model=MODELS[kind], run={"device": "cpu"}))
    module, gates = trainer.modules[0], []
    module.several = (run_blocks, 2)  # type: ignore[assignment]
    for unit in stage_of(module).units():
        gates.append(CountingGate())
        setattr(unit, GATE, gates[-1])
    trainer.gradients()
    assert {gate.opened for gate in gates} == {trainer.micro_batches}
