"""A compiled block equals the eager one: it has the same gradients, and the same calls, bytes, phases and layers in the
ledger.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.oracle import make_trainer, small_config, true_gradients
from tests.support.ranks import run_ranks

MODEL = {"layers": 2, "hidden": 16, "heads": 2, "seq": 8, "vocab": 17}


def gradients_and_ledger(
    rank: int, world: int, compiled: bool, sequence_parallel: bool, overlap: bool
) -> tuple[dict[str, np.ndarray], dict[tuple[Any, ...], tuple[int, int, int]]]:
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    train = {"global_batch": 2, "compile": "true" if compiled else "false"}
    comm = {"overlap": {"tensor": overlap}}
    trainer = make_trainer(small_config(model=MODEL, layout=layout, train=train, comm=comm), rank, world)
    trainer.ctx.ledger.clear()
    gradients = {record.name: grad.numpy().copy() for record, grad in true_gradients(trainer)}
    blocks = [block for module in trainer.modules for block in module.blocks.values()]
    assert all((block._compiled_call_impl is not None) == compiled for block in blocks)
    entries = trainer.ctx.ledger.entries.items()
    return gradients, {tuple(entry): (t.calls, t.payload_bytes, t.wire_bytes) for entry, t in entries}


def both_ways(rank: int, world: int, *how: bool) -> list[Any]:
    return [gradients_and_ledger(rank, world, compiled, *how) for compiled in (False, True)]


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("sequence_parallel", "overlap"),
    [(True, False), *(pytest.param(sp, overlap, marks=WIDE) for sp, overlap in ((False, False), (True, True)))],
)
def test_compiled_blocks_agree_with_eager_ones(sequence_parallel: bool, overlap: bool) -> None:
    ranks = run_ranks(2, both_ways, sequence_parallel, overlap, deadline=400.0)
    for (eager, calls), (compiled, compiled_calls) in ranks:
        assert eager.keys() == compiled.keys()
        largest = max(np.abs(grad).max() for grad in eager.values())
        for name, grad in eager.items():
            np.testing.assert_allclose(compiled[name], grad, rtol=1e-10, atol=1e-13 * largest, err_msg=name)
        assert compiled_calls == calls
        assert {0, 1} <= {entry[3] for entry in calls if entry[:2] == ("backward", "tp")}
