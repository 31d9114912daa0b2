"""Bugs planted in the handling of faults: the checks of the tests that plant faults find each of these bugs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.engine.losses import UpdateGate
from meshwright.engine.marks import Marks
from meshwright.engine.step import Trainer
from meshwright.faults import corruption
from meshwright.faults.bad_steps import BadSteps, FaultPlace
from meshwright.faults.corruption import Divergence, ReplicaCheck
from meshwright.record.run_folder import RunFolder
from tests.faults import test_bad_steps, test_corruption
from tests.faults.test_bad_steps import check_passing, check_rollback, check_skipped
from tests.faults.test_corruption import check_mended
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.wide

Check = Callable[[Path, Any], None]  # called with the folder of the runs and their results


@dataclass(frozen=True)
class Bug:
    """A planted bug. `wrong` takes the real `owner.name` and returns a replacement that misbehaves.

    The bug is active while the named `cases` of `module` run. `check` reads their results and must fail.
    """

    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    module: Any
    cases: tuple[str, ...]
    check: Check

    @contextmanager
    def planted(self) -> Iterator[None]:
        real = vars(self.owner)[self.name]
        with patch.object(self.owner, self.name, self.wrong(real)):
            yield


def other_samples(real: Any) -> Any:
    """Compute the step again with the samples that follow its own."""

    def take_back(self: Any, result: Any) -> None:
        real(self, result)
        self.consumed = result.consumed + result.global_batch

    return take_back


def same_samples(real: Any) -> Any:
    """Return to the very same batch after a rollback."""

    def roll_back(self: Any, result: Any, text: str, place: Any) -> None:
        real(self, result, text, place)
        self.trainer.consumed = 8 * self.trainer.step_number

    return roll_back


def another_rank(real: Any) -> Any:
    def place(self: Any, found: Any) -> FaultPlace:
        it: FaultPlace = real(self, found)
        return it._replace(ranks=tuple((rank + 1) % 2 for rank in it.ranks))

    return place


def not_held(real: Any) -> Any:
    """Pass the update on although it is held back in the verdict."""

    def pass_on(self: Any, sums: Any, normalisation: Any) -> Any:
        return sums, real(self, sums, normalisation)[1]

    return pass_on


def others_named(real: Any) -> Any:
    def divergences(*given: Any) -> list[Divergence]:
        return [each._replace(wrong=tuple(set(each.group) - set(each.wrong))) for each in real(*given)]

    return divergences


def passing(name: str) -> Check:
    return lambda folder, ends: check_passing(folder, ends, [name])


def mended(name: str) -> Check:
    return lambda folder, ends: check_mended(folder, name)


def bad(owner: Any, name: str, wrong: Callable[[Any], Any], case: str, check: Check) -> Bug:
    return Bug(owner, name, wrong, test_bad_steps, ("clean", case), check)


def mending(owner: Any, name: str, wrong: Callable[[Any], Any], case: str = "weight") -> Bug:
    return Bug(owner, name, wrong, test_corruption, ("clean", case), mended(case))


BUGS = {
    "a step is computed again with other samples": bad(
        Trainer, "take_back", other_samples, "forward", passing("forward")
    ),
    "the verdict names another rank": bad(BadSteps, "_place", another_rank, "forward", passing("forward")),
    "a bad update is made": bad(UpdateGate, "pass_on", not_held, "spike", passing("spike")),
    "of marks the last is taken for the first": bad(
        Marks, "first_difference", lambda real: lambda self, a, b: real(self, a[::-1][:1], b[::-1][:1]), "forward",
        passing("forward"),
    ),
    "a bad batch is trained": bad(
        BadSteps, "_data_or_model", lambda real: lambda self, result, text, place: result, "batch",
        lambda folder, ends: check_skipped(folder),
    ),
    "a rollback forgets the skip": bad(BadSteps, "_roll_back", same_samples, "rollback", check_rollback),
    "a rollback leaves the lines": bad(
        RunFolder, "go_back", lambda real: lambda self, step: 1, "rollback", check_rollback
    ),
    "the wrong rank heals the others": mending(
        Divergence, "source", lambda real: property(lambda self: self.group.index(self.wrong[0]))
    ),
    "the majority is named": mending(corruption, "divergences", others_named, "moment"),
    "nobody is healed": mending(ReplicaCheck, "_heal", lambda real: lambda self, found: None),
}  # fmt: skip


def stories(rank: int, world: int, folder: str, names: list[str]) -> dict[str, Any]:
    bugs, ends = importlib.import_module(__name__).BUGS, {}
    for number, name in enumerate(names):
        bug = bugs[name]
        cases = {case: bug.module.CASES[case] for case in bug.cases}
        with bug.planted():
            ends[name] = bug.module.story(rank, world, f"{folder}/{number}", cases)
    return ends


@pytest.mark.parametrize(("module", "world"), [(test_bad_steps, 2), (test_corruption, 3)], ids=["bad steps", "mending"])
def test_every_bug_is_found(module: Any, world: int, tmp_path: Path) -> None:
    names = [name for name, bug in BUGS.items() if bug.module is module]
    ends = run_ranks(world, stories, str(tmp_path), names, deadline=300.0)[0]
    for number, name in enumerate(names):
        with pytest.raises((AssertionError, ValueError)):
            BUGS[name].check(tmp_path / str(number), ends[name])
            pytest.fail(f"not found: {name}", pytrace=False)
