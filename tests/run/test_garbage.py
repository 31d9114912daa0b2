"""Python's garbage collector during a run: it works at the same steps on all ranks, and as before afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.engine.hooks import Hook
from meshwright.engine.providers import forward_step, model_provider
from meshwright.errors import UserError
from meshwright.run.loop import GarbageCollection
from meshwright.run.pretrain import pretrain
from tests.checkpoint.runs import tiny
from tests.support.oracle import made_for, small_config
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Give each test here Python's default collector, and later tests elsewhere the state that conftest.py froze."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.me = self


def passed(step: int) -> Any:
    return SimpleNamespace(step=step)


def test_garbage_is_collected_at_these_steps_alone() -> None:
    with GarbageCollection(3) as garbage:
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        lost = weakref.ref(Cycle())
        for step in (1, 2):
            garbage.after(passed(step), False)
        assert lost() is not None
        garbage.after(passed(3), False)
        assert lost() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_zero_leaves_it_to_python() -> None:
    with GarbageCollection(0) as garbage:
        assert gc.isenabled() and gc.get_freeze_count() == 0
        garbage.after(passed(0), True)


def test_a_program_that_has_switched_it_off_and_frozen_its_objects_finds_it_so() -> None:
    gc.disable()
    gc.freeze()
    with pytest.raises(ValueError, match="oops"), GarbageCollection(5):
        raise ValueError("oops")
    assert not gc.isenabled() and gc.get_freeze_count() > 0


def test_a_number_below_zero_is_a_mistake() -> None:
    with pytest.raises(UserError, match="train.gc_every"):
        small_config(train={"gc_every": -1})


class Seen(Hook):
    """A hook that notes the number of full collections, and whether Python would collect by itself."""

    def __init__(self) -> None:
        self.collections: list[int] = []
        self.enabled: set[bool] = set()

    def after(self, result: Any, last: bool) -> None:
        self.collections.append(gc.get_stats()[2]["collections"])
        self.enabled.add(gc.isenabled())


def collected(rank: int, world: int, folder: str) -> tuple[list[int], set[bool], bool]:
    """Return the steps after which a full collection was made, and whether Python collected by itself during and after
    the run.
    """
    gc.unfreeze()
    seen = Seen()
    config = small_config(**tiny(Path(folder), train={"gc_every": 2, "steps": 5}, checkpoint={"every": 0}))
    datasets = made_for(config)
    pretrain(config, model_provider, lambda ctx, samples: (datasets, datasets, None), forward_step, hooks=[seen])
    counts = seen.collections
    return [n + 1 for n in range(1, len(counts)) if counts[n] > counts[n - 1]], seen.enabled, gc.isenabled()


def test_all_ranks_of_a_run_collect_after_the_same_steps(tmp_path: Path) -> None:
    assert run_ranks(2, collected, str(tmp_path)) == [([2, 4], {False}, True)] * 2
