"""Every layout gives the gradients, the norm, the parameters and the losses of one process."""

from __future__ import annotations

import pytest

from tests.parity.cases import CASES, QUICK, Case
from tests.parity.launches import Launches
from tests.support.oracle import complaints


def _params() -> list[object]:
    return [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.wide]) for case in CASES
    ]


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    """In float64 every gradient (also with buckets reduced during backward), the norm and, after three steps, every
    parameter and the validation loss to 1e-10; in fp32 the losses of 20 steps to 1e-5. On every rank."""
    assert complaints(launches.outcomes(case)) == []
