"""Helpers that show the results of reducers: the reduced gradients, the residuals that they hold back, and their
calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.check.oracle import box_slices, whole_locals
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.plan.communication import Line, Traffic
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout.params import ParamRecord
from tests.support.oracle import Made, Pairs, make_trainer, small_config


def trainer_of(rank: int, world: int, sections: dict[str, Any], reducer: Any) -> Trainer:
    plain = make_trainer(small_config(**sections), rank, world)
    data = Made(plain.ctx.config.model.vocab, plain.ctx.config.model.seq)
    return Trainer(plain.ctx, build_modules(plain.ctx, model_provider), forward_step, data, reducer=reducer)


def reduced(trainer: Trainer, steps: int) -> list[Pairs]:
    """Return the gradients of several steps, without updates between them."""
    found = []
    for _ in range(steps):
        trainer.gradients()
        found.append([
            (slot.record, grad.clone()) for buffer in trainer.data_parallel.buffers
            for slot, grad in whole_locals(trainer, buffer, [bucket.own_grads for bucket in buffer.buckets])
        ])  # fmt: skip
        trainer.consumed += trainer.ctx.config.train.global_batch
        trainer.step_number += 1
    return found


def kept_of(trainer: Trainer) -> Pairs:
    """Return this rank's residuals, the gradients that its reducer has not sent yet, of every parameter whose first
    copy it holds.
    """
    found = []
    for state in (each for each in trainer.data_parallel.reducer_states() if each.additive):
        for slot in state.buffer.slots:
            low, high = state.holds(slot)
            if low < high and trainer.data_parallel.holds_first(slot, slot.record.partial):
                flat = torch.zeros(slot.record.numel, dtype=torch.float64)
                flat[low:high] = state.values(slot, low, high)
                found.append((slot.record, flat.view(slot.record.local_shape)))
    return found


def lines_of(trainer: Trainer) -> dict[Line, Traffic]:
    found: dict[Line, Traffic] = {}
    for entry, t in trainer.ctx.ledger.entries.items():
        line = Line(entry.phase, entry.axis, entry.op)
        found[line] = found.get(line, Traffic()).plus(Traffic(t.calls, t.payload_bytes, t.wire_bytes))
    return found


def added(pairs: Iterable[tuple[ParamRecord, Tensor]]) -> dict[str, np.ndarray]:
    whole: dict[str, np.ndarray] = {}
    for record, local in pairs:
        target = whole.setdefault(record.name, np.zeros(record.shape))
        for box in record.boxes:
            target[box_slices(box.start, box.shape)] += local[box_slices(box.local_start, box.shape)].numpy()
    return whole


def placed(pairs: Pairs, into: dict[str, np.ndarray]) -> None:
    for record, local in pairs:
        target = into.setdefault(record.name, np.full(record.shape, np.nan))
        for box in record.boxes:
            target[box_slices(box.start, box.shape)] = local[box_slices(box.local_start, box.shape)].numpy()
