"""Every layout gives the gradients, the norm, the parameters and the losses of one process."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.config.rules import check
from tests.parity.cases import Case
from tests.parity.launches import Launches
from tests.parity.matrix import CASES, QUICK
from tests.parity.sharded_cases import COVER, FACTORS, pairs_of
from tests.support.oracle import complaints, small_config


def _params() -> list[object]:
    return [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.wide]) for case in CASES]


def test_the_matrix_is_whole_and_valid() -> None:
    """Every case is allowed, and every way to cut the ranks is among them."""
    for case in CASES:
        check(small_config(**case.sections("fp64")), case.world)
        check(small_config(**case.sections("fp32")), case.world)
        check(small_config(**case.alone("fp64")), 1)
    cuts = {(c.world, c.dp, c.tp, c.pp) for c in CASES if not c.label}
    assert len(cuts) == 1 + 3 + 6 + 10 and all(dp * tp * pp == world for world, dp, tp, pp in cuts)


def test_every_pair_of_sharding_choices_is_among_the_cases() -> None:
    """This covers stages 1 to 3 with something to shard, and those values that can meet."""
    met = set().union(*(pairs_of(choice) for _, dp, _, _, choice in COVER if dp > 1))
    names = list(FACTORS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for value, other in product(FACTORS[a], FACTORS[b]):
                assert pairs_of({a: value, b: other}) <= met, (a, value, b, other)
    cuts = {(stage, dp, tp, pp) for stage, dp, tp, pp, _ in COVER}
    assert len(cuts) == 3 * (6 + 10) and (3, 2, 2, 2) in cuts


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    """In float64 these agree to 1e-10 on every rank: every gradient (also with buckets reduced during backward), the
    norm, the rows of every expert and, after three steps, every parameter including balancing biases, and the
    validation loss. In fp32 the losses of 20 steps (4 if more than the layout differs) agree to 1e-5.
    """
    assert complaints(launches.outcomes(case)) == []
