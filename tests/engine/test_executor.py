"""The tensors that a pipeline's executor holds."""

from __future__ import annotations

import weakref
from typing import Any

from meshwright.engine.output import to_output
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

MICRO_BATCHES = 12


def outputs_alive(rank: int, world: int, schedule: str) -> int:
    """Return the largest number of stage outputs whose memory existed at once, counted before each forward."""
    config = small_config(
        layout={"pp": 2}, pipeline={"schedule": schedule}, train={"global_batch": MICRO_BATCHES}, run={"device": "cpu"}
    )
    trainer = make_trainer(config, rank, world)
    step, storages, most = trainer.executor.forward_step, [], 0

    def watched(module: Any, batch: Any, received: Any) -> Any:
        nonlocal most
        most = max(most, sum(storage() is not None for storage in storages))
        result = step(module, batch, received)
        storages.extend(weakref.ref(x.untyped_storage()) for x in to_output(result).tensors.values())
        return result

    trainer.executor.forward_step = watched
    trainer.step()
    return most


def test_what_was_sent_is_not_held_until_its_backward() -> None:
    """gpipe starts its backwards after all forwards. If outputs were held until then, all of them would exist at
    once.
    """
    first, last = run_ranks(2, outputs_alive, "gpipe")
    assert 1 <= first <= 5 and last == 0
