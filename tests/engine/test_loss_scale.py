"""Loss scaling by itself, and in a step whose gradient overflowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.config.sections import LossScaleConfig
from meshwright.engine.optim.scaling import LossScale
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.engine.step import Trainer
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks


def test_halves_on_overflow_and_doubles_after_the_window() -> None:
    scale = LossScale(LossScaleConfig(initial=64.0, window=3), active=True)
    found = []
    for finite in (True, True, False, True, True, True, True, True, True, False):
        scale.update(finite)
        found.append(scale.value)
    assert found == [64, 64, 32, 32, 32, 64, 64, 64, 128, 64]


def test_an_overflow_starts_the_window_again() -> None:
    scale = LossScale(LossScaleConfig(initial=64.0, window=2), active=True)
    for finite in (True, False, True):
        scale.update(finite)
    assert scale.value == 32.0


def test_a_window_made_shorter_than_the_good_steps_so_far() -> None:
    scale = LossScale(LossScaleConfig(initial=64.0, window=2), active=True)
    scale.good_steps = 7  # A checkpoint may hold this.
    scale.update(True)
    assert (scale.value, scale.good_steps) == (128.0, 0)


def test_hysteresis_ignores_the_first_overflows_after_the_scale_has_doubled() -> None:
    scale = LossScale(LossScaleConfig(initial=64.0, window=2, hysteresis=2), active=True)
    found = []
    for finite in (False, True, False, False, True, True, False, False):
        scale.update(finite)
        found.append(scale.value)
    assert found == [64, 64, 32, 16, 16, 32, 32, 16]


def test_a_resumed_run_remembers_its_overflows() -> None:
    first, second = (make_trainer(fp16_config(loss_scale={"hysteresis": 3})) for _ in range(2))
    first.loss_scale.update(False)
    second.restore(1, 2, first.counters())
    assert second.loss_scale.overflows == 1


def test_never_below_the_minimum() -> None:
    scale = LossScale(LossScaleConfig(initial=4.0, window=3, min=2.0), active=True)
    for _ in range(5):
        scale.update(False)
    assert scale.value == 2.0


def test_other_precisions_have_a_scale_of_one_that_never_moves() -> None:
    scale = LossScale(LossScaleConfig(initial=64.0, window=1), active=False)
    for finite in (True, False, True):
        scale.update(finite)
        assert scale.value == 1.0


def fp16_config(**sections: dict[str, Any]) -> Any:
    merged = {
        "model": {"layers": 1, "hidden": 8, "heads": 2, "vocab": 11, "seq": 4},
        "train": {"precision": "fp16", "global_batch": 2},
        "loss_scale": {"initial": 1024.0, "window": 3},
    }
    return small_config(**{name: merged.get(name, {}) | sections.get(name, {}) for name in merged | sections})


def overflow_once(trainer: Trainer) -> None:
    """Make the next backward produce an infinite gradient in a parameter that no other tp or pp rank holds. It is there
    when its bucket is reduced, even if that happens during backward.
    """
    parallel = trainer.data_parallel
    places = ((buffer, slot) for buffer in parallel.buffers for slot in buffer.slots if not slot.record.copies)
    buffer, slot = next(places)

    class Overflowing(PlainReducer):
        def all_reduce(self, bucket: Bucket, grads: torch.Tensor, group: Any) -> Any:
            if any(slot is one for one in bucket.slots):
                slot.grad.view(-1)[0] = torch.inf
                parallel.reducer = PlainReducer()
            return super().all_reduce(bucket, grads, group)

    parallel.reducer = Overflowing()


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [buffer.params.clone() for buffer in trainer.data_parallel.buffers]


def changed(trainer: Trainer, before: list[torch.Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True))


def all_moments(trainer: Trainer) -> list[torch.Tensor]:
    return [share for state in trainer.optimizer.states for store in state.stores[1:] for share in store.shares]


def story(rank: int, world: int, layout: dict[str, int]) -> list[tuple[Any, ...]]:
    """Take ten steps, the second of which overflows on the last rank only. Return the outcome of each, as this rank saw
    it.
    """
    trainer = make_trainer(fp16_config(model={"layers": 2}, layout=layout), rank, world)
    lines: list[tuple[Any, ...]] = []
    for step in range(10):
        if step == 1 and rank == world - 1:
            overflow_once(trainer)
        before, moments = weights(trainer), [m.clone() for m in all_moments(trainer)]
        result = trainer.step()
        kept = all(torch.equal(a, b) for a, b in zip(moments, all_moments(trainer), strict=True))
        lines.append((
            result.skipped, result.loss_scale, trainer.consumed, trainer.optimizer.updates, changed(trainer, before),
            kept, result.step, result.loss,
        ))  # fmt: skip
    return lines


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})],
    ids=["alone", "dp", "tp", "pp"],
)
def test_a_step_that_overflows_is_skipped_everywhere(world: int, layout: dict[str, int]) -> None:
    """Weights and moments stay unchanged, the batch is consumed, and the scale is halved. It doubles after three good
    steps.
    """
    ranks = run_ranks(world, story, layout)
    assert all([line[:7] for line in rank] == [line[:7] for line in ranks[0]] for rank in ranks)
    lines = ranks[0]
    assert [line[0] for line in lines] == [False, True] + [False] * 8
    assert [line[1] for line in lines] == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 2048]
    assert [line[2] for line in lines] == [2 * (i + 1) for i in range(10)]
    assert [line[3] for line in lines] == [1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [line[4] for line in lines] == [True, False] + [True] * 8
    assert lines[1][5] and not lines[2][5]
    assert [line[6] for line in lines] == list(range(1, 11))


def test_a_scale_that_is_far_too_large_finds_its_way_down() -> None:
    """The overflow is not planted: the numbers themselves exceed the range of fp16."""
    trainer = make_trainer(fp16_config(loss_scale={"initial": 2.0**32, "window": 1000}))
    start = weights(trainer)
    results = [trainer.step()]
    while results[-1].skipped and len(results) < 32:
        assert not changed(trainer, start)
        results.append(trainer.step())
    assert len(results) > 5 and not results[-1].skipped and changed(trainer, start)
    assert [r.loss_scale for r in results] == [2.0 ** (32 - i) for i in range(len(results))]
    assert all(torch.isfinite(w).all() for w in weights(trainer))


def test_not_a_number_in_other_precisions_is_skipped_too() -> None:
    trainer = make_trainer(small_config(model={"layers": 1}))
    overflow_once(trainer)
    before = weights(trainer)
    result = trainer.step()
    assert result.skipped and result.loss_scale is None and not changed(trainer, before)
    assert not trainer.step().skipped and changed(trainer, before)
