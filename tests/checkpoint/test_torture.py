"""Ranks are killed at any moment: in the middle of a save, of a rename, of a line. The files they leave stay valid."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from meshwright.record import checkpoint_format as fmt
from meshwright.record.verify import verify_checkpoint
from tests.checkpoint.runs import Attempt, Crash, Sections, assert_same, complete, ended, steps, tiny

# A rank changes the file system about 40 times in an attempt that is not killed.
CALLS = 40


def straight(tmp_path: Path, world: int, **changes: dict[str, object]) -> tuple[Path, dict[int, fmt.Index]]:
    """Train the undisturbed run. Return its folder and the index of its checkpoint at every step."""
    sections = tiny(tmp_path / "straight", **changes)
    sections["checkpoint"] |= {"keep": 0}
    run = complete(world, sections)
    return run, {step: fmt.read_index(path) for step, path in fmt.list_checkpoints(run / "checkpoints")}


def check(run: Path, reference: dict[int, fmt.Index]) -> None:
    """Assert after a kill that every checkpoint is complete and equal to that of the undisturbed run.

    The metrics must hold each step once.
    """
    for step, path in fmt.list_checkpoints(run / "checkpoints"):
        index = fmt.read_index(path)
        verify_checkpoint(path, index)
        expected = reference[step]
        assert (index.step, index.consumed, index.state) == (expected.step, expected.consumed, expected.state)
        assert index.blocks == expected.blocks, "the same bytes in the same places"
    assert not list((run / "checkpoints").glob("lost-*")), "no checkpoint was found damaged"
    done = steps(run)
    assert done == list(range(1, len(done) + 1)), "each step once, in order"


def attempt_and_kill(world: int, sections: Sections, dice: random.Random) -> str:
    """Continue the run and kill one rank in a random way. Return the kind of kill.

    Return 'finished' if the run ended before the planted crash.
    """
    victim = dice.randrange(world)
    kind = dice.choice(["call", "call", "step", "start"])
    if kind == "call":
        when = dice.choice(["before", "after", "half"])
        attempt = Attempt(world, sections, Crash(victim, dice.randint(1, CALLS), when))
        return "finished" if attempt.finish() else f"{kind} {when}"
    attempt = Attempt(world, sections)
    if kind == "step":
        goal = len(steps(attempt.run)) + dice.randint(1, 3)
        attempt.until(lambda: len(steps(attempt.run)) >= goal)
    time.sleep(dice.random() * (0.02 if kind == "step" else 0.4))
    attempt.kill(victim)
    attempt.finish()
    return kind


def torture(
    tmp_path: Path, world: int, kills: int, seed: int, steps: int = 10, **changes: dict[str, object]
) -> list[Counter[str]]:
    """Kill and resume a run until it ends, and further runs until there were `kills` kills.

    Return the number of kills of each kind, by run.
    """
    dice = random.Random(seed)
    changes |= {"train": {"steps": steps}}
    reference, indices = straight(tmp_path, world, **changes)
    done: list[Counter[str]] = []
    while sum(counts.total() for counts in done) < kills:
        counts: Counter[str] = Counter()
        done.append(counts)
        sections = tiny(tmp_path / f"run{len(done)}", **changes)
        run = Path(sections["run"]["dir"])
        while sum(each.total() for each in done) < kills and not ended(run, steps):
            kind = attempt_and_kill(world, sections, dice)
            if kind != "finished":
                counts[kind] += 1
            check(run, indices)
        if not ended(run, steps):
            complete(world, sections)
        assert_same(run, reference)
    return done


def test_a_few_kills(tmp_path: Path) -> None:
    torture(tmp_path, 2, 5, seed=5)


@pytest.mark.wide
def test_fifty_kills(tmp_path: Path) -> None:
    """A run that is killed at least fifty times ends like an undisturbed one."""
    counts = torture(tmp_path, 2, 60, seed=1, steps=160)[0]
    assert counts.total() >= 50 and len(counts) == 5, counts
    print(f"torture: {counts.total()} kills of one run: {dict(counts)}")


@pytest.mark.wide
@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"pp": 2, "chunks": 1}], ids=["tp2-pp2", "pp2-dp2"])
def test_kills_of_four_ranks(layout: dict[str, object], tmp_path: Path) -> None:
    torture(tmp_path, 4, 12, seed=2, layout=layout, checkpoint={"async": True, "every": 2, "keep": 1})


@pytest.mark.wide
@pytest.mark.parametrize("when", ["before", "after", "half"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_every_single_change_of_the_file_system(rank: int, when: str, tmp_path: Path) -> None:
    """A run of two steps survives a kill at its first, second, third... change of the file system.

    There is a checkpoint at each step, and only the newest is kept. The test ends when the run makes fewer changes.
    """
    changes: dict[str, dict[str, object]] = {
        "train": {"steps": 2}, "checkpoint": {"keep": 1}, "run": {"eval_every": 1},
    }  # fmt: skip
    reference, indices = straight(tmp_path, 2, **changes)
    for call in itertools.count(1):
        sections = tiny(tmp_path / f"run{call}", **changes)
        attempt = Attempt(2, sections, Crash(rank, call, when))
        finished = attempt.finish()
        check(attempt.run, indices)
        if not ended(attempt.run, 2):
            complete(2, sections)
        assert_same(attempt.run, reference)
        if finished:
            assert call > 5
            return
