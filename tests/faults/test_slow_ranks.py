"""Slow ranks are named within a few steps, with the cause, and no rank is named when all are equally noisy."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.faults import FaultsConfig
from meshwright.engine.result import StepResult
from meshwright.faults.slow_ranks import SlowRanks
from meshwright.record.rank_figures import RankFigures
from meshwright.record.run_notes import FaultNotes
from meshwright.spec.layout import Layout
from tests.checkpoint.runs import steps as steps_of
from tests.faults.planted import events, run
from tests.support.commands import ended, ranks
from tests.support.ranks import run_ranks
from tests.support.waiting import until


class Told(FaultNotes):
    """Notes of faults that are kept in memory."""

    def __init__(self) -> None:
        super().__init__("", 3, True)
        self.lines: list[tuple[int, str, Any]] = []

    def add(self, kind: str, text: str, step: int, **more: Any) -> None:
        self.lines.append((step, text, more.get("rank")))


def steps(
    layout: Layout, count: int, slow: dict[int, float], data: dict[int, float], noise: float, seed: int = 0,
    measured: bool = True, work: dict[int, float] | None = None, least_s: float = 0.0,
) -> Told:  # fmt: skip
    """Return the notes after `count` steps of 0.1 s.

    From step 31 on, a rank in `slow` computes that many times 0.1 s longer, and a rank in `data` reads for that many
    times 0.1 s longer. Each rank's step is longer by a random time, which is sometimes large. `work` is the relative
    work of each pipeline stage.
    """
    notes, chance = Told(), random.Random(seed)
    hook = SlowRanks(layout, FaultsConfig(slow_seconds=least_s), notes)
    for step in range(1, count + 1):
        busy, reading = [], []
        for rank in range(layout.world):
            late = step > 30
            own = 0.1 * (work or {}).get(layout.coordinate(rank)["pp"], 1.0) * (1 + slow.get(rank, 0.0) * late)
            own += chance.expovariate(1 / (noise * own)) if noise else 0.0
            own += 0.5 * (chance.random() < noise / 5)
            reading.append(0.002 + 0.1 * data.get(rank, 0.0) * late)
            busy.append(own + reading[-1])
        result = StepResult(step, 1.0, 1.0, 0.0, None, False, 1, 1, step_time_s=max(busy))
        result.exposed_s = {"dp": 0.1, "tp": 0.01}
        result.ranks = RankFigures(busy if measured else [], [], reading, [])
        hook.after(result, False)
    return notes


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_a_rank_that_is_slower_by_half_is_named_within_twenty_steps(noise: float) -> None:
    for slow, data, what in (({3: 1.0}, {}, "computing"), ({}, {3: 1.0}, "reading data")):
        ((step, text, rank),) = steps(Layout(8), 60, slow, data, noise).lines
        assert rank == 3 and 30 < step <= 50, (step, text)
        assert f"it is slow in {what}; the others wait for it, most over dp" in text


def test_a_rank_that_is_slow_for_a_moment_is_not_named() -> None:
    """Steps take 0.2 s, so ten seconds are about fifty steps."""
    assert not steps(Layout(8), 70, {3: 1.0}, {}, 0.0, least_s=10.0).lines
    ((step, _, rank),) = steps(Layout(8), 100, {3: 1.0}, {}, 0.0, least_s=10.0).lines
    assert rank == 3 and 80 <= step <= 95


def test_on_an_accelerator_the_host_knows_how_long_it_waited_for_data() -> None:
    ((step, text, rank),) = steps(Layout(8), 60, {}, {5: 1.0}, 0.0, measured=False).lines
    assert rank == 5 and step <= 50 and "slow in reading data" in text


@pytest.mark.parametrize("world", [2, 8])
def test_nobody_is_named_in_noise(world: int) -> None:
    for noise in (0.1, 0.3):
        assert not steps(Layout(world), 2000, {}, {}, noise, seed=world).lines
    for noise in (1.0, 2.0):  # as on a machine with several times as many programs as processors
        assert not steps(Layout(world), 1000, {}, {}, noise, seed=world, least_s=10.0).lines
    # The last stage also computes the head. It has more work, which is no fault of its ranks.
    pipeline = Layout(8, pp=2)
    assert not steps(pipeline, 500, {}, {}, 0.1, work={1: 3.0}).lines
    ((_, text, rank),) = steps(pipeline, 60, {1: 1.0}, {}, 0.1, work={1: 3.0}).lines
    assert rank == 1 and "computing" in text


def slowed(rank: int, world: int, folder: str) -> None:
    """Run twice: once while rank 1 computes slowly, and once while it reads data slowly."""
    from meshwright.models.graph_stage import GraphStage
    from tests.support.oracle import Made

    forward, sample = GraphStage.forward, Made.sample

    def late(real: Any) -> Any:
        def called(*args: Any) -> Any:
            time.sleep(0.1 * (rank == 1))
            return real(*args)

        return called

    sections = {"train": {"steps": 24, "global_batch": 8, "micro_batch": 2}, "faults": {"slow_seconds": 0.0}}
    GraphStage.forward = late(forward)  # type: ignore[method-assign]
    run(Path(folder) / "computing", **sections)
    GraphStage.forward, Made.sample = forward, late(sample)  # type: ignore[method-assign]
    run(Path(folder) / "reading data", **sections)


@pytest.mark.wide
def test_in_a_run(tmp_path: Path) -> None:
    run_ranks(2, slowed, str(tmp_path))
    for what in ("computing", "reading data"):
        event = events(tmp_path / what, "slow")[0]
        assert event["rank"] == 1 and event["slow_in"] == what and event["step"] <= 20, event


@contextlib.contextmanager
def half_a_processor(pid: int) -> Iterator[None]:
    """Stop a process for half of the time, as a container's limit on the processor does."""
    over = threading.Event()

    def limit() -> None:
        while not over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, number)
                time.sleep(0.01)

    thread = threading.Thread(target=limit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.wide
def test_a_rank_with_half_a_processor_is_named_within_twenty_steps(folder: Path, start: Any) -> None:
    """The real command names the rank. No rank is named before that, and the other rank is never named."""
    words = ("train.global_batch=256", "train.micro_batch=4", "checkpoint.every=0", "faults.slow_seconds=2")
    process = start("--nproc", "2", *words)
    run = folder / "run"
    until(lambda: len(steps_of(run)) >= 20, process)
    assert not events(run, "slow")
    with half_a_processor(ranks(folder)[1]):
        begun = steps_of(run)[-1]
        until(lambda: events(run, "slow") or steps_of(run)[-1] > begun + 30, process)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    first = events(run, "slow")[0]
    assert first["rank"] == 1 and first["slow_in"] == "computing" and begun < first["step"] <= begun + 21, first
