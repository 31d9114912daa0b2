"""Micro-batches are read ahead, each once. A sample that cannot be read fails the step that needs it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.spec.model.description import on_host
from tests.support.oracle import Made, make_trainer, small_config
from tests.support.ranks import run_ranks
from tests.support.waiting import HANG_S


class Watched(Made):
    """Data that records which samples are read and on which thread. Reading the sample `broken` fails."""

    def __init__(self, broken: int = -1) -> None:
        super().__init__(53, 16)
        self.broken = broken
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.changed = threading.Condition()

    def sample(self, n: int) -> dict[str, np.ndarray]:
        if n == self.broken:
            raise UserError(f"sample {n} is gone: prepare the data again")
        with self.changed:
            self.read.append(n)
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()
        return super().sample(n)

    def wait_for(self, n: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: n in self.read, timeout=HANG_S)


def trainer_of(data: Watched, steps: int = 2) -> Trainer:
    trainer = make_trainer(small_config(train={"global_batch": 4, "micro_batch": 2, "steps": steps}), data=data)
    data.read.clear()
    data.threads.clear()
    return trainer


def test_the_next_micro_batch_is_read_while_one_is_computed() -> None:
    data = Watched()
    trainer = trainer_of(data)
    real, forwards = trainer.executor.forward_step, 0

    def step(module: Any, batch: Any, received: Any) -> Any:
        nonlocal forwards
        forwards += 1
        # No micro-batch follows the last one of the run.
        if forwards < 4:
            assert data.wait_for(2 * forwards + 1), "nothing is read ahead"
        return real(module, batch, received)

    trainer.executor.forward_step = step
    results = [trainer.step() for _ in range(2)]
    assert data.read == list(range(8)), "each sample once, and none beyond the run"
    assert len(data.threads) == 1 and threading.current_thread().name not in data.threads
    assert all(0 <= result.phases["data"] < result.step_time_s for result in results)


def test_a_sample_that_cant_be_read_fails_its_own_step() -> None:
    data = Watched(broken=6)
    trainer = trainer_of(data, steps=3)
    assert trainer.step().tokens > 0
    with pytest.raises(UserError, match="sample 6 is gone"):
        trainer.step()


def test_what_was_read_ahead_for_elsewhere_is_not_used() -> None:
    """A checkpoint moves the run to other samples after its first step has already been read ahead."""
    data, other = Watched(), Watched()
    trainer, moved = trainer_of(data, steps=9), trainer_of(other, steps=9)
    moved.step()
    moved.restore(0, 12, moved.counters() | {"updates": 0})
    trainer.restore(0, 12, trainer.counters())
    trainer.step()
    moved.step()
    for found in (data.read, other.read):
        assert [n for n in found if n >= 12][:4] == [12, 13, 14, 15]


def host_copies(rank: int, world: int) -> bool:
    config = small_config(
        layout={"tp": 2}, data={"reset_attention": True, "eod": 7}, train={"global_batch": 2, "micro_batch": 2}
    )
    data = Made(53, 16, segments=True)
    batch = make_trainer(config, rank, world, data=data).train_batches.load(0, 0)
    return bool((batch[on_host("segments")] == batch["segments"]).all())


def test_every_tensor_parallel_rank_reads_what_the_host_plans_attention_by() -> None:
    """A rank that had only the copy broadcast to its device would wait for all earlier device work in every
    micro-batch.
    """
    assert run_ranks(2, host_copies) == [True, True]
