"""Several blocks as one compiled graph: the gradients are those of blocks that nobody compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from meshwright.config.rules import first_broken_rule
from tests.support.oracle import EXACT, gather_global, make_trainer, small_config, true_gradients, worst

MODELS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "bert", "predictions": 5},
    "t5": {"kind": "t5", "layers": 8, "head_dim": 10, "t5": {"decoder_seq": 8, "encoder_layers": 4}},
    "gpt": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False},
}
ALL = [pytest.param(kind, mode, marks=[pytest.mark.wide] if (kind, mode) != ("bert", "none") else [])
       for kind in MODELS for mode in ("none", "every:2")]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), ALL)
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
    assert trainer.validate() == pytest.approx(alone.validate(), rel=EXACT)


def test_where_blocks_communicate_they_are_compiled_one_by_one() -> None:
    given = {"train": {"compile_together": 4}, "faults": {"locate": False}}
    assert first_broken_rule(small_config(**given), 2) is None
    broken = first_broken_rule(small_config(**given, layout={"tp": 2}), 2)
    assert broken == "train.compile_together=4 needs layout.tp=1: set that, or train.compile_together=1"
    noted = first_broken_rule(small_config(train={"compile_together": 4}), 2)
    assert noted == "train.compile_together=4 needs faults.locate=false: set that, or train.compile_together=1"
