"""Attention over a window gives the same results on every layout as one process. The core of that process is compared
with a mask (`tests/nn/test_context.py`) and with transformers. A window that is wrong on one rank is found.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.rules import check
from meshwright.models.graph_stage import GraphStage
from meshwright.nn.attention.attention import Attention
from tests.parity.cases import Case
from tests.parity.launches import Launches, data_of, reference_of
from tests.support.oracle import Outcome, Reference, compare_steps, complaints, make_trainer, small_config
from tests.support.ranks import run_ranks

WINDOW = {"model.window": 5}
HALF = {**WINDOW, "model.window_pattern": [1, 0]}
PAIRS = {"train.micro_batch": 2, "train.global_batch": 8}
TALK: dict[str, Any] = {"segments": True}


def over(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, cp: int = 1, **more: Any) -> Case:
    """Return a case. Keys with a dot are keys of the config."""
    keys = {key: value for key, value in more.items() if "." in key}
    own = {"family": "llama", **{key: value for key, value in more.items() if "." not in key}}
    extra = {**WINDOW, **({"layout.cp": cp} if cp > 1 else {}), **keys}
    found = tuple((data or {}).items())
    return Case(dp, tp, pp, label=f"window-{label}", extra=tuple(extra.items()), data=found, cp=cp, **own)


def kind(name: str, order: str = "zigzag") -> dict[str, Any]:
    inner = {"context.inner": 2} if name == "hybrid" else {}
    return {"context.kind": name, "context.order": order, **inner}


CASES = [
    over("ring", 1, 1, 1, cp=2, **HALF, **kind("ring")),
    over("dp-tp", 2, 2, 1, sp=True, **HALF, **PAIRS),
    over("pp", 1, 2, 2, sp=True, schedule="interleaved", **HALF, **{"recompute.mode": "full"}),
    over("documents", 1, 2, 1, TALK, **HALF),
    over("alibi", 1, 2, 1, family="gpt", **{"model.position": "alibi"}),
    over("selective", 2, 1, 1, **{"recompute.mode": "selective", "zero.stage": 3}),
    *(over(f"{name}-{order}", 1, 1, 1, cp=4, **kind(name, order))
      for name in ("gather", "ring", "ulysses", "hybrid") for order in ("zigzag", "striped", "contiguous")),
    *(over(f"{name}-documents", 1, 1, 1, TALK, cp=4, **HALF, **kind(name, "documents"), **PAIRS)
      for name in ("gather", "ring", "ulysses", "hybrid")),
    over("ring-tp", 1, 2, 1, cp=2, sp=True, **HALF, **kind("ring"), **{"zero.stage": 2}),
    over("gather-pp", 1, 1, 2, TALK, cp=2, **HALF, **kind("gather")),
    over("one-token", 1, 1, 1, cp=4, **kind("ring"), **{"model.window": 1}),
    over("long", 2, 1, 1, cp=2, **kind("ring"), **{"model.window": 15}),
    over("experts", 2, 1, 1, **HALF, **{"model.experts.count": 4, "layout.ep": 2}),
]  # fmt: skip
QUICK = {"window-ring"}


def _params() -> list[object]:
    return [pytest.param(c, id=c.name, marks=[] if c.label in QUICK else [pytest.mark.wide]) for c in CASES]


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


def measure(rank: int, world: int, reference: Reference) -> tuple[Outcome, Outcome]:
    """Return the outcome of this rank as it is, and the one with a window that is one token longer on rank 1."""
    config = small_config(**CASES[0].sections("fp64"))
    clean = compare_steps(make_trainer(config, rank, world, data_of(CASES[0])), reference)
    trainer = make_trainer(config, rank, world, data_of(CASES[0]))
    stage = trainer.modules[0]
    assert isinstance(stage, GraphStage)
    first = stage.blocks["0"].get_submodule("attention")
    assert isinstance(first, Attention) and first.window == 5
    first.window += rank
    return clean, compare_steps(trainer, reference)


@pytest.mark.wide
def test_the_check_finds_a_wrong_window() -> None:
    found = run_ranks(2, measure, reference_of(CASES[0]), deadline=120.0)
    assert complaints([clean for clean, _ in found]) == []
    assert any(": gradients: " in each for each in complaints([planted for _, planted in found]))
