"""What a single rank gets in place of a dataset and of seeded weights, and how its memory is released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.nn.parallel import record_of
from meshwright.train.step import Trainer


class RandomTokens:
    """Samples of random ids, from `first` on. `fields` names further arrays of a sample, each of which counts up from
    0."""

    def __init__(self, vocab: int, seq: int, first: int = 0, fields: Sequence[str] = ()) -> None:
        self.vocab, self.seq, self.first, self.fields = vocab, seq, first, fields

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        ids = np.random.default_rng(n).integers(self.first, self.first + self.vocab, self.seq + 1)
        found = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": np.ones(self.seq, dtype=np.int64)}
        return found | {name: np.arange(self.seq, dtype=np.int64) for name in self.fields}


@torch.no_grad()
def draw_on_device(module: nn.Module, seed: int) -> None:
    """Draws weights like those of a real start on the device: a measurement need not be the same on every layout."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        record = record_of(parameter)
        if record is not None and record.init.kind == "normal":
            parameter.normal_(0.0, record.init.std)
        else:
            parameter.fill_(1.0 if record is not None and record.init.kind == "ones" else 0.0)


def release(trainer: Trainer) -> None:
    """Releases a trainer's memory. Autograd's hooks keep its buffers alive, and those keep each other alive, so
    dropping the trainer would not."""
    tensors = [share for state in trainer.states() for share in state.tensors]
    for buffer in trainer.data_parallel.buffers:
        tensors += [buffer.params, buffer.grads]
        tensors += [memory.tensor for bucket in buffer.buckets for memory in (bucket.params, bucket.grads)]
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.resizable():  # states offloaded to the host or to files can't be resized
            storage.resize_(0)
