"""Runs many cases in one launch of ranks, and keeps the outcome of each."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import layout_of
from tests.parity.cases import Case
from tests.support.oracle import Outcome, Reference, compare, made_for, make_trainer, small_config, solo
from tests.support.ranks import RankFailed, run_ranks

PER_LAUNCH = 12
# Seconds per case. A busy machine may need many times longer than an idle one.
DEADLINE = 40.0

_REFERENCES: dict[str, Reference] = {}


def data_of(case: Case) -> Any:
    return made_for(small_config(**case.sections("fp64")), **dict(case.data))


def reference_of(case: Case) -> Reference:
    """Return the results of one process. Cases that differ only in their layout share them."""
    exact, single = case.alone("fp64"), case.alone("fp32")
    key = repr((exact, single, case.data))
    if key not in _REFERENCES:
        _REFERENCES[key] = solo(small_config(**exact), small_config(**single), data_of(case))
    return _REFERENCES[key]


def measure(rank: int, world: int, cases: list[Case], references: list[Reference]) -> list[Outcome]:
    """Compare all cases on a rank. Process groups are created first, once per layout, and the trainers use them."""
    groups: dict[Layout, dict[str, Any]] = {}
    layouts = [layout_of(small_config(**case.sections("fp64")), world) for case in cases]
    for layout in dict.fromkeys(layouts):
        made = Mesh(layout, rank).groups
        groups[layout] = {name: group.process_group for name, group in made.items() if not group.alone}
    outcomes = []
    for case, layout, reference in zip(cases, layouts, references, strict=True):
        exact, single = (
            make_trainer(small_config(**case.sections(precision)), rank, world, data_of(case), groups[layout])
            for precision in ("fp64", "fp32")
        )
        outcomes.append(compare(exact, single, reference, case.fp32_steps))
        del exact, single
        gc.collect()
    return outcomes


def launch(cases: list[Case]) -> list[list[Outcome]]:
    """Return the outcomes of each case by rank. All cases must have the same number of ranks."""
    references = [reference_of(case) for case in cases]
    deadline = 20.0 + DEADLINE * len(cases)
    by_rank = run_ranks(cases[0].world, measure, cases, references, deadline=deadline)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def quick_or_wide(cases: Iterable[Case], quick: Collection[str]) -> list[Any]:
    """Return the cases as parameters of a test. Those whose label is not in `quick` are marked wide."""
    return [pytest.param(c, id=c.name, marks=[] if c.label in quick else [pytest.mark.wide]) for c in cases]


class Launches:
    """The outcomes of the cases of one test file. A launch happens when the first of its cases is needed. If it fails,
    its cases are launched one by one, so that the failure names the case it belongs to.
    """

    def __init__(self, cases: Iterable[Case]) -> None:
        by_world: dict[int, list[Case]] = {}
        for case in cases:
            by_world.setdefault(case.world, []).append(case)
        self._batch: dict[str, list[Case]] = {}
        for same in by_world.values():
            for first in range(0, len(same), PER_LAUNCH):
                batch = same[first : first + PER_LAUNCH]
                self._batch |= {case.name: batch for case in batch}
        self.done: dict[str, list[Outcome]] = {}

    def outcomes(self, case: Case) -> list[Outcome]:
        """Return one outcome per rank."""
        if case.name not in self.done:
            batch = self._batch.get(case.name, [case])
            try:
                self.done |= zip((each.name for each in batch), launch(batch), strict=True)
            except RankFailed:
                if len(batch) == 1:
                    raise
                self._batch |= {each.name: [each] for each in batch}
                return self.outcomes(case)
        return self.done[case.name]


def summary(cases: list[list[Outcome]]) -> str:
    """Return one line with the largest errors of all cases and ranks."""
    outcomes = [outcome for ranks in cases for outcome in ranks]
    gradient = max(max(o.gradients[0], o.overlapped[0]) for o in outcomes)
    parameter, norm = max(o.parameters[0] for o in outcomes), max(o.norm for o in outcomes)
    return (
        f"parity: {len(cases)} cases, largest errors: gradient {gradient:.1e}, norm {norm:.1e}, "
        f"parameter {parameter:.1e}, fp32 loss {max(o.losses for o in outcomes):.1e}"
    )
