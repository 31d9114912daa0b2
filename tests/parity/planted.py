"""Plants bugs into the real code on every rank, and shows whether the parity check finds them.

The check is the one of the layout tests (`compare_steps` on the ranks, `complaints` here). A test file has its bugs in
a module-level `BUGS`, which ranks import by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshwright.engine.output import Term, to_output
from meshwright.engine.step import Trainer
from tests.parity.cases import Case
from tests.parity.launches import data_of, reference_of
from tests.support.oracle import Outcome, Reference, compare_steps, complaints, make_trainer, small_config
from tests.support.ranks import RankFailed, run_ranks

Plant = Callable[[Trainer], Any]


@dataclass(frozen=True)
class Bug:
    case: Case
    plant: Plant  # A context manager that takes the trainer of the rank.
    finds: str = "gradients"  # The check must complain about this.


def altered(change: Callable[[Term, dict[str, Any]], Term]) -> Plant:
    """Return a bug that changes every term of every micro-batch's loss. `change` also gets the counts of all terms by
    name.
    """

    @contextmanager
    def plant(trainer: Trainer) -> Iterator[None]:
        real = trainer.executor.forward_step

        def fake(module: Any, batch: Any, received: Any) -> Any:
            out = to_output(real(module, batch, received))
            counts = {term.name: term.count for term in out.terms}
            return replace(out, terms=[change(term, counts) for term in out.terms])

        trainer.executor.forward_step = fake
        yield

    return plant


def mean_of_means(usual: float) -> Plant:
    """Return a bug that averages each micro-batch's loss over its own tokens, of which there are `usual` on average."""

    def change(term: Term, counts: dict[str, Any]) -> Term:
        return replace(term, sum=term.sum * usual / term.count) if term.name == "loss" else term

    return altered(change)


def measure(
    rank: int, world: int, module: str, names: list[str], references: list[Reference]
) -> list[tuple[Outcome, Outcome]]:
    """Return for each bug the outcome without it and the one with it."""
    bugs: Mapping[str, Bug] = importlib.import_module(module).BUGS
    found = []
    for name, reference in zip(names, references, strict=True):
        case = bugs[name].case
        config = small_config(**case.sections("fp64"))
        clean = compare_steps(make_trainer(config, rank, world, data_of(case)), reference)
        trainer = make_trainer(config, rank, world, data_of(case))
        with bugs[name].plant(trainer):
            found.append((clean, compare_steps(trainer, reference)))
    return found


@cache
def _launched(module: str, names: tuple[str, ...]) -> dict[str, list[tuple[Outcome, Outcome]]] | RankFailed:
    """Return the outcomes by bug and rank. A failure is cached, so that it costs its time only once."""
    bugs: Mapping[str, Bug] = importlib.import_module(module).BUGS
    references, world = [reference_of(bugs[name].case) for name in names], bugs[names[0]].case.world
    try:
        by_rank = run_ranks(world, measure, module, list(names), references, deadline=300.0)
    except RankFailed as error:
        return error
    return {name: [rank[i] for rank in by_rank] for i, name in enumerate(names)}


def assert_found(module: str, name: str, wide: Collection[str] = ()) -> None:
    """Assert that the check finds the bug `name` of `module`, and nothing without it. Bugs for the same number of ranks
    share a launch, apart from those in `wide`, which share others.
    """
    bugs: Mapping[str, Bug] = importlib.import_module(module).BUGS
    world = bugs[name].case.world
    together = (other for other, bug in bugs.items() if bug.case.world == world and (other in wide) == (name in wide))
    found = _launched(module, tuple(together))
    if isinstance(found, RankFailed):
        raise found
    assert complaints([clean for clean, _ in found[name]]) == []
    noticed = complaints([planted for _, planted in found[name]])
    assert any(f": {bugs[name].finds}: " in complaint for complaint in noticed), noticed
