"""Compiled blocks give the gradients of one process that compiles nothing, in float64 and on every layout whose layers
add their weight gradients to sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from torch import nn

from tests.parity.cases import LLAMA, Case, cut, special
from tests.parity.expert_cases import EXPERTS
from tests.parity.test_grids import grid_case
from tests.support.oracle import EXACT, gather_global, made_for, make_trainer, small_config, true_gradients, worst
from tests.support.ranks import run_ranks

# Each of two ranks has one micro-batch, whose gradients are released.
_ONE_BATCH = {"train__global_batch": 2}
_MIXTURES = {case.name: case for case in EXPERTS}

CASES = [
    grid_case("2d", (1, 2), "rows", **LLAMA, tied=False),
    grid_case("2d", (2, 2), **LLAMA),
    grid_case("3d", (2, 2, 1), "flat"),
    grid_case("2.5d", (1, 2, 2), "deep", **LLAMA, tied=False),
    grid_case("2d", (1, 2), "zero1", dp=2, zero__stage=1),
    grid_case("2d", (2, 1), "zero2", dp=2, zero__stage=2, **LLAMA),
    grid_case("3d", (2, 1, 1), "pp", pp=2, **LLAMA),
    grid_case("3d", (1, 2, 1), "one-micro-batch", dp=2, train__micro_batch=2, train__global_batch=4),
    *(special(f"zero{stage}", cut(2, 1, 1, **LLAMA), zero__stage=stage) for stage in (0, 1, 2, 3)),
    *(special(f"zero{stage}-one-micro-batch", cut(2, 1, 1), zero__stage=stage, **_ONE_BATCH) for stage in (0, 1, 2)),
    special("zero3-recomputed", cut(2, 1, 1, **LLAMA), zero__stage=3, recompute__mode="full"),
    special("", cut(1, 1, 2, **LLAMA)),
    special("", cut(1, 2, 1, sp=True, **LLAMA)),
    special("overlapped", cut(1, 2, 1, sp=True), comm__overlap__tensor=True, comm__overlap__piece_gflop=0),
    special("mlp-in-pieces", cut(1, 2, 1, sp=True, **LLAMA), recompute__pieces=3),
    special("lora", cut(2, 1, 1, **LLAMA), tune__kind="lora", tune__rank=3),
    _MIXTURES["dp2-tp1-pp1-1f1b-llama-tied-deepseek-ep2"],
    _MIXTURES["dp1-tp2-pp1-sp-1f1b-llama-tied-deepseek-ep2-etp1"],
]  # fmt: skip
QUICK = {CASES[0].name}  # the rest is marked wide


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compile blocks with this backend. aot_eager takes every graph that inductor takes and generates no code."""
    plain = nn.Module.compile
    with mock.patch.object(nn.Module, "compile", lambda self, **how: plain(self, **how, backend=name)):
        yield


def worst_gradient(rank: int, world: int, case: Case, name: str) -> tuple[float, str]:
    """Return the largest error of two steps' gradients, and the name of its parameter."""
    sections = case.sections("fp64")
    sections["train"]["compile"] = True
    config, alone = small_config(**sections), small_config(**case.alone("fp64"))
    data = made_for(alone, **dict(case.data))
    whole = gather_global(true_gradients(make_trainer(alone, data=data)))
    with backend(name):
        trainer = make_trainer(config, rank, world, data=data)
    # The first step counts the contributions; later ones reduce buckets while backward runs.
    return max(worst(true_gradients(trainer), whole) for _ in range(2))


def check_case(case: Case, name: str) -> None:
    for error, parameter in run_ranks(case.world, worst_gradient, case, name, deadline=500.0):
        assert error <= EXACT, parameter


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.wide]) for c in CASES]
)
def test_compiled_blocks_have_the_gradients_of_one_process(case: Case) -> None:
    check_case(case, "aot_eager")


@pytest.mark.wide
@pytest.mark.parametrize("case", [CASES[1], CASES[2]], ids=lambda case: case.name)
def test_generated_code_has_them_too(case: Case) -> None:
    check_case(case, "inductor")
