"""Several blocks as one compiled graph: the gradients are those of blocks that nobody compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.config.rules import first_broken_rule
from meshwright.models.stage import stage_of
from meshwright.nn.build import run_blocks
from meshwright.nn.unit import GATE
from tests.support.oracle import EXACT, gather_global, make_trainer, small_config, true_gradients, worst

MODELS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "bert", "predictions": 5},
    "t5": {"kind": "t5", "layers": 8, "head_dim": 10, "t5": {"decoder_seq": 8, "encoder_layers": 4}},
    "gpt": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False},
}


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["none", "every:2"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_one_eager_process(kind: str, mode: str) -> None:
    """Twice, since gradients of the first step come before anybody knows how many there will be; validation, too. All
    runs of blocks of one stack share a graph."""
    torch.compiler.reset()
    counters.clear()
    plain = small_config(model=MODELS[kind], recompute={"mode": mode}, faults={"locate": False}, run={"device": "cpu"})
    own = {"compile": "true", "compile_together": 2}
    together = small_config(
        model=MODELS[kind], recompute={"mode": mode}, faults={"locate": False}, run={"device": "cpu"}, train=own
    )
    alone, trainer = make_trainer(plain), make_trainer(together)
    whole = gather_global(true_gradients(alone))
    for _ in range(2):
        error, name = worst(true_gradients(trainer), whole)
        assert error <= EXACT, name
    stacks = 2 if kind == "t5" else 1
    graphs = 1 if mode == "none" else 2  # recomputed blocks run without gradients first
    assert counters["stats"]["unique_graphs"] == stacks * graphs
    assert trainer.validate()["loss"] == pytest.approx(alone.validate()["loss"], rel=EXACT)


def test_where_blocks_communicate_they_are_compiled_one_by_one() -> None:
    own, quiet = {"compile": "auto", "compile_together": 4}, {"locate": False}
    assert first_broken_rule(small_config(train=own, faults=quiet), 2) is None
    broken = first_broken_rule(small_config(train=own, faults=quiet, layout={"tp": 2}), 2)
    assert broken == "train.compile_together=4 needs layout.tp=1: set that, or train.compile_together=1"
    noted = first_broken_rule(small_config(train=own), 2)
    assert noted == "train.compile_together=4 needs faults.locate=false: set that, or train.compile_together=1"
    for without in ({"train": {**own, "compile": "false"}}, {"train": own, "model": {"dropout": 0.1}}):
        broken = first_broken_rule(small_config(**without, faults=quiet), 2)
        assert broken is not None and broken.startswith("train.compile_together=4 needs compiled blocks")


class CountingGate:
    """A gate of weights that stay in memory."""

    closes = False

    def __init__(self) -> None:
        self.opened = 0

    def open(self) -> None:
        self.opened += 1


@pytest.mark.parametrize("kind", ["gpt", "t5"])
def test_blocks_wait_for_their_weights(kind: str) -> None:
    """In ZeRO stages 1 and 2, those of the last update arrive while the next step begins."""
    trainer = make_trainer(small_config(model=MODELS[kind], faults={"locate": False}, run={"device": "cpu"}))
    module, gates = trainer.modules[0], []
    module.several = (run_blocks, 2)  # type: ignore[assignment]
    for unit in stage_of(module).units():
        gates.append(CountingGate())
        setattr(unit, GATE, gates[-1])
    trainer.gradients()
    assert {gate.opened for gate in gates} == {trainer.micro_batches}
