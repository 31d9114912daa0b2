"""The parity check finds the bugs that grids of tensor-parallel ranks invite. Each is planted into the real code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.nn.grid.products as grid
import meshwright.nn.linear as linear
import meshwright.nn.loss as loss
from meshwright.comm.group import DONE
from meshwright.engine.step import Trainer
from meshwright.nn.grid.sides import side_of
from meshwright.spec.layout.grid import DEPTH, ROW
from tests.parity.cases import Case
from tests.parity.launches import data_of, reference_of
from tests.parity.test_grids import grid_case
from tests.support.oracle import Outcome, Reference, compare_exact, complaints, make_trainer, small_config
from tests.support.ranks import run_ranks

Plant = Callable[[Trainer], Any]
FLAT, DEEP = grid_case("2d", (2, 2), "bug"), grid_case("2.5d", (1, 2, 2), "bug")
THIN = grid_case("3d", (1, 2, 2), "bug", family="llama", tied=False)


def _linears(trainer: Trainer) -> list[grid.GridLinear]:
    return [layer for module in trainer.modules for layer in module.modules() if isinstance(layer, grid.GridLinear)]


@contextmanager
def _sum_over_depth_missing(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the gradients of weights with copies along the depth of a 2.5D grid are not summed over it."""
    group = trainer.ctx.mesh.group(DEPTH)
    real = group.all_reduce

    def fake(x: torch.Tensor, *more: Any, **named: Any) -> Any:
        return DONE if group.ledger.current_phase == "reduce" else real(x, *more, **named)

    with mock.patch.object(group, "all_reduce", fake):
        yield


@contextmanager
def _bias_added_by_all(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: one layer's bias is added before the sum, and so once for every rank of the group."""
    layer = _linears(trainer)[1]
    bias = layer.bias
    assert bias is not None
    with mock.patch.object(layer, "add_bias", lambda y: y + bias * layer.sides.x[1]):
        yield


@contextmanager
def _norm_over_the_wrong_ranks(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: one norm takes its sums over the ranks that hold other rows instead of other features."""
    norms = [layer for module in trainer.modules for layer in module.modules() if isinstance(layer, grid.GridNorm)]
    norms[1].features = norms[1].features._replace(side=side_of(trainer.ctx.parallel, ROW))
    yield


@contextmanager
def _weight_gradient_not_summed(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: a rank keeps its rows of its local weight gradient instead of those of the sum over the ranks with
    other rows.
    """
    layer, real = _linears(trainer)[2], linear.scatter

    def fake(x: torch.Tensor, side: Any) -> torch.Tensor:
        if side == layer.sides.weight and len(x) == len(layer.weight) * side[1]:
            return x.chunk(side[1])[0].clone()
        return real(x, side)

    with mock.patch.object(linear, "scatter", fake):
        yield


@contextmanager
def _labels_of_other_rows(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the loss takes the first rows' labels on every rank of the axis over which the logits were
    scattered.
    """
    real = loss.LossSettings.of

    def fake(*args: Any) -> Any:
        return real(*args)._replace(part=0)

    with mock.patch.object(loss.LossSettings, "of", fake):
        yield


BUGS: dict[str, tuple[Case, Plant]] = {
    "sum over depth missing": (DEEP, _sum_over_depth_missing),
    "bias added by all": (FLAT, _bias_added_by_all),
    "norm over the wrong ranks": (FLAT, _norm_over_the_wrong_ranks),
    "norm over the wrong ranks of a 3D grid": (THIN, _norm_over_the_wrong_ranks),
    "weight gradient not summed": (FLAT, _weight_gradient_not_summed),
    "weight gradient not summed over the depth of a 3D grid": (THIN, _weight_gradient_not_summed),
    "labels of other rows": (THIN, _labels_of_other_rows),
}


def measure(rank: int, world: int, names: list[str], references: list[Reference]) -> list[list[Outcome]]:
    """Compare each case on a rank, as it is and with its bug."""
    found = []
    for name, reference in zip(names, references, strict=True):
        case, plant = BUGS[name]
        outcomes = []
        for planted in (False, True):
            trainer = make_trainer(small_config(**case.sections("fp64")), rank, world, data_of(case))
            if not planted:
                outcomes.append(compare_exact(trainer, reference))
                continue
            with plant(trainer):
                outcomes.append(compare_exact(trainer, reference))
        found.append(outcomes)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[list[Outcome]]]:
    """Return the outcomes by bug and rank."""
    names = list(BUGS)
    by_rank = run_ranks(4, measure, names, [reference_of(BUGS[name][0]) for name in names], deadline=240.0)
    return {name: [rank[number] for rank in by_rank] for number, name in enumerate(names)}


@pytest.mark.wide
@pytest.mark.parametrize("name", list(BUGS))
def test_a_planted_bug_is_found(name: str, outcomes: dict[str, list[list[Outcome]]]) -> None:
    right, wrong = zip(*outcomes[name], strict=True)
    assert complaints(list(right)) == []
    found = complaints(list(wrong))
    assert found, "nothing was found"
