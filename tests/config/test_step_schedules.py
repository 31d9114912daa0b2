"""Tests of the learning rate and the batch size over a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.sections import Config
from meshwright.config.step_schedules import consumed_after, global_batch, learning_rate
from meshwright.record.run_folder import RunFolder
from tests.support.oracle import small_config

PEAK, LEAST = 1e-2, 1e-3


def rates(schedule: str, **lr: Any) -> list[float]:
    """Return the learning rates of 100 steps. The index is the step, and index 0 is unused."""
    config = small_config(
        train={"steps": 100}, optimizer={"lr": PEAK}, lr={"schedule": schedule, "warmup": 20, "min": LEAST, **lr}
    )
    return [math.nan] + [learning_rate(config, step) for step in range(1, 101)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_warm_up_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    by_step = rates(schedule)
    assert by_step[1] == pytest.approx(PEAK / 20) and by_step[10] == pytest.approx(PEAK / 2) and by_step[20] == PEAK
    assert by_step[21] <= PEAK


def test_cosine() -> None:
    by_step = rates("cosine")
    assert by_step[60] == pytest.approx((PEAK + LEAST) / 2)
    assert by_step[40] == pytest.approx(LEAST + (PEAK - LEAST) * 0.5 * (1 + math.cos(math.pi / 4)))
    assert by_step[100] == pytest.approx(LEAST)


def test_linear() -> None:
    by_step = rates("linear")
    assert by_step[60] == pytest.approx((PEAK + LEAST) / 2) and by_step[100] == pytest.approx(LEAST)
    assert by_step[40] == pytest.approx(PEAK - (PEAK - LEAST) / 4)


def test_constant() -> None:
    assert set(rates("constant")[20:]) == {PEAK}


def test_wsd_holds_and_then_falls() -> None:
    by_step = rates("wsd", decay=30)
    assert set(by_step[20:71]) == {PEAK}
    assert by_step[85] == pytest.approx((PEAK + LEAST) / 2) and by_step[100] == pytest.approx(LEAST)
    last_tenth = rates("wsd")
    assert last_tenth[90] == PEAK and last_tenth[95] == pytest.approx((PEAK + LEAST) / 2)
    into_the_decay = rates("wsd", warmup=80, decay=60)
    assert into_the_decay[90] == pytest.approx((PEAK + LEAST) / 2) and into_the_decay[100] == pytest.approx(LEAST)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_shorter_decay_ends_early_and_stays(schedule: str) -> None:
    by_step = rates(schedule, decay=40)
    assert by_step[40] == pytest.approx((PEAK + LEAST) / 2)
    assert all(rate == pytest.approx(LEAST) for rate in by_step[60:])


def test_without_warm_up_the_first_step_has_nearly_the_peak() -> None:
    assert rates("cosine", warmup=0)[1] == pytest.approx(PEAK, rel=1e-3)
    assert rates("constant", warmup=0)[1] == PEAK


@st.composite
def configs(draw: st.DrawFn) -> tuple[Config, int]:
    steps = draw(st.integers(1, 60))
    peak = draw(st.floats(1e-6, 1.0))
    config = small_config(
        train={"steps": steps},
        optimizer={"lr": peak},
        lr={
            "schedule": draw(st.sampled_from(["cosine", "linear", "constant", "wsd"])),
            "warmup": draw(st.integers(0, steps)),
            "decay": draw(st.integers(0, 2 * steps)),
            "min": peak * draw(st.floats(0.0, 1.0)),
        },
    )
    return config, draw(st.integers(1, 2 * steps))


@given(configs())
def test_rate_is_within_zero_and_the_peak(drawn: tuple[Config, int]) -> None:
    config, step = drawn
    peak = config.optimizer.lr
    rate = learning_rate(config, step)
    assert 0.0 <= rate <= peak * (1 + 1e-12)
    if step > config.lr.warmup:
        assert rate >= config.lr.min - 1e-12 * peak
        assert learning_rate(config, step + 1) <= rate + 1e-12 * peak


@st.composite
def ramps(draw: st.DrawFn) -> Config:
    start, increment = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    target = start + increment * draw(st.integers(0, 9))
    return small_config(train={"ramp": [start, increment, draw(st.integers(1, 500))], "global_batch": target})


@given(ramps())
def test_ramp_rises_evenly_to_the_target(config: Config) -> None:
    start, increment, samples = config.train.ramp
    sizes = [global_batch(config, consumed) for consumed in range(samples + 50)]
    assert sizes[0] == start
    assert all(a <= b for a, b in zip(sizes, sizes[1:], strict=False))
    assert all((size - start) % increment == 0 for size in sizes)
    assert set(sizes[samples:]) == {config.train.global_batch}
    lengths = [sizes[:samples].count(size) for size in sorted(set(sizes[:samples]))]
    assert max(lengths) - min(lengths) <= 1 or samples < len(lengths)


@given(ramps(), st.integers(0, 40))
def test_consumed_is_the_sum_of_the_steps(config: Config, steps: int) -> None:
    consumed = 0
    for step in range(steps):
        assert consumed_after(config, step) == consumed
        consumed += global_batch(config, consumed)
    assert consumed_after(config, steps) == consumed


def test_without_a_ramp_every_batch_is_the_target() -> None:
    config = small_config(train={"global_batch": 24})
    assert {global_batch(config, consumed) for consumed in (0, 1, 10_000)} == {24}
    assert consumed_after(config, 5) == 120


def test_a_longer_schedule_says_where_the_rate_jumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def resumed(step: int, **train: int) -> list[str]:
        run = {"dir": str(tmp_path), "tensorboard": False}
        config = small_config(train=train, lr={"min": 0.0}, optimizer={"lr": 1e-3}, run=run)
        folder = RunFolder(config, 1, step)
        folder.step({"step": step + 1, "loss": 1.0, "lr": learning_rate(config, step + 1), "comm": {}})
        folder.close()
        return capsys.readouterr().err.splitlines()

    assert resumed(59, steps=60) == resumed(60, steps=60) == []
    assert resumed(60, steps=90) == [
        "the learning rate continues at 2.5e-04 (it was 6.6e-07): the schedule now ends at step 90"
    ]
    assert resumed(60, steps=90) == [] and resumed(60, steps=90, micro_batch=1) == []
