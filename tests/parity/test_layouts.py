"""Every layout gives the gradients, the norm, the parameters and the losses of one process."""

from __future__ import annotations

import pytest

from meshwright.config.rules import check
from tests.parity.cases import CASES, QUICK, Case
from tests.parity.launches import Launches
from tests.support.oracle import complaints, small_config


def _params() -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.wide]) for case in CASES
    ]


def test_the_matrix_is_whole_and_valid() -> None:
    """Every case may run, and every way to cut the ranks is among them."""
    for case in CASES:
        check(small_config(**case.sections("fp64")), case.world)
        check(small_config(**case.alone("fp64")), 1)
    cuts = {(c.world, c.dp, c.tp, c.pp) for c in CASES if not c.label}
    assert len(cuts) == 1 + 3 + 6 + 10 and all(dp * tp * pp == world for world, dp, tp, pp in cuts)


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    """In float64 every gradient (also with buckets reduced during backward), the norm and, after three steps, every
    parameter and the validation loss to 1e-10; in fp32 the losses of 20 steps to 1e-5. On every rank."""
    assert complaints(launches.outcomes(case)) == []
