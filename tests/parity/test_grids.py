"""Grids of tensor-parallel ranks (2D, 2.5D, 3D) give the gradients, the norm, the parameters and the losses of one
process."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.rules import check
from tests.parity.cases import Case
from tests.parity.launches import Launches
from tests.support.oracle import complaints, small_config


def grid_case(
    kind: str, sizes: tuple[int, ...], label: str = "", dp: int = 1, pp: int = 1, data: dict[str, Any] | None = None,
    family: str = "gpt", tied: bool = True, schedule: str = "1f1b", **extra: Any,
) -> Case:  # fmt: skip
    """`extra`'s keys are written section__key. A micro-batch has a sequence for every part of the rows."""
    tp, sequences = 1, 1
    for size in sizes:
        tp *= size
    rows = {"2d": sizes[0], "2.5d": sizes[0] * sizes[-1], "3d": max(sizes[0], sizes[1]) * sizes[-1]}[kind]
    sequences = rows
    count = {1: 2, 2: 3}[pp]
    keys: dict[str, Any] = {
        "layout.tp_grid": list(sizes), "layout.tp_kind": kind, "train.micro_batch": sequences,
        "train.global_batch": dp * count * sequences,
    }  # fmt: skip
    keys |= {key.replace("__", "."): value for key, value in extra.items()}
    name = "-".join(filter(None, [kind, "x".join(map(str, sizes)), label]))
    return Case(dp, tp, pp, False, schedule, family, tied, name, tuple(keys.items()), tuple((data or {}).items()))


CASES = [
    grid_case("2d", (2, 2)),
    grid_case("2d", (2, 2), family="llama", tied=False),
    grid_case("2.5d", (2, 2, 2)),
    grid_case("3d", (2, 2, 2), family="llama"),
    grid_case("3d", (2, 2, 2), tied=True),
]
QUICK = {case.name for case in CASES}


def _params() -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.wide]) for case in CASES
    ]


def test_the_cases_are_valid() -> None:
    for case in CASES:
        for precision in ("fp64", "fp32"):
            check(small_config(**case.sections(precision)), case.world)
        check(small_config(**case.alone("fp64")), 1)


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    """In float64 every gradient, the norm, after three steps every parameter and the validation loss to 1e-10; in fp32
    the losses of some steps to 1e-5. On every rank."""
    assert complaints(launches.outcomes(case)) == []
