"""Replacements for the other ranks, the dataset and the seeded weights, so that a single rank of a job can run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.group import Pending
from meshwright.comm.mesh import Mesh
from meshwright.config.sections import Config
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.nn.adapters.nf4 import pack
from meshwright.nn.parallel import record_of
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.description import data_fields, model_of


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Initialise torch.distributed as rank `rank` of `world`, without the other ranks.

    With torch's fake process group, collectives take no time, but their buffers take memory.
    """
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch replaces this hook with one that names the rank, and never restores it.
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def stand_in(mesh: Mesh) -> None:
    """Make the groups of a mesh fill received data with plausible numbers: uninitialised memory may hold anything.

    A neighbouring stage sends small noise, and a reduce-scatter returns this rank's term of the sum. torch's fake group
    itself fills gathered shards with copies of this rank's shard, and an all-reduce leaves this rank's term in place.
    """
    for group in mesh.groups.values():
        if not group.alone:
            _fill(group)


def _fill(group: Any) -> None:
    """Wrap the group's calls that leave their output unwritten: fill it after the call, which is counted as usual."""
    real_receive, real_reduce_scatter = group.receive, group.reduce_scatter
    real_shifts, real_all_to_all, real_exchange = group.shifts, group.all_to_all, group.exchange

    def receive(x: Tensor, source: int) -> Pending:
        pending: Pending = real_receive(x, source)
        x.normal_(0.0, 1e-2)
        return pending

    def reduce_scatter(out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        pending: Pending = real_reduce_scatter(out, x, wait)
        out.copy_(x[group.index * out.shape[0] :][: out.shape[0]])
        return pending

    def shifts(moves: Sequence[tuple[Tensor, int, Tensor]]) -> Pending:
        pending: Pending = real_shifts(moves)
        for x, _, out in moves:
            out.copy_(x)
        return pending

    def all_to_all(out: Tensor, x: Tensor, *more: Any, **named: Any) -> Pending:
        if x.is_meta and group.axis in ("ep", EP_NODE, EP_ACROSS):
            # The plan assumes balanced experts, so every rank gets the mean number of rows. That need not be a whole
            # number for each sender, so leave out the numbers of rows and let all parts be equal.
            named = {}
        pending: Pending = real_all_to_all(out, x, *more, **named)
        if out.shape == x.shape:
            out.copy_(x)
        return pending

    def exchange(sent: Tensor, to: int, received: Tensor, source: int) -> Pending:
        pending: Pending = real_exchange(sent, to, received, source)
        received.normal_(0.0, 1e-2)
        return pending

    group.receive, group.reduce_scatter = receive, reduce_scatter
    group.shifts, group.all_to_all, group.exchange = shifts, all_to_all, exchange


DOCUMENT_TOKENS = 2048  # The mean length of a document.


def documents_of(seq: int) -> np.ndarray[Any, Any]:
    """Return the number of the document that each token belongs to, the same in every sample. Shape: [seq]."""
    begins = np.random.default_rng(0).random(seq) < 1.0 / DOCUMENT_TOKENS
    return np.cumsum(begins, dtype=np.int64) - int(begins[0])


class RandomTokens:
    """Samples of random ids from `first` to `first + vocab - 1`.

    `fields` names further arrays of a sample: "segments", the documents, and "positions", which start at 0 in each
    document.
    """

    def __init__(self, vocab: int, seq: int, first: int = 0, fields: Sequence[str] = ()) -> None:
        self.vocab, self.seq, self.first = vocab, seq, first
        segments = documents_of(seq)
        indices = np.arange(seq, dtype=np.int64)
        # The index at which each token's document begins.
        begins = np.maximum.accumulate(indices * (np.diff(segments, prepend=0) > 0))
        self.more = {name: {"segments": segments, "positions": indices - begins}[name] for name in fields}

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        ids = np.random.default_rng(n).integers(self.first, self.first + self.vocab, self.seq + 1)
        arrays = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": np.ones(self.seq, dtype=np.int64)}
        return arrays | self.more


class RandomSamples:
    """Samples with the fields that the data of a config have.

    They contain random ids from `first` to `first + vocab - 1`, no padding, and all targets count. A sample of a causal
    model has several documents, one of a prefix model has two halves (source and rest), and others are one document.
    """

    def __init__(self, config: Config, vocab: int, first: int = 0) -> None:
        self.vocab = vocab
        self.first = first
        self.fields = data_fields(config)
        model = model_of(config)
        self.seq = config.model.seq
        self.lengths, indices = dict(model.lengths), np.arange(self.seq)
        halves = (indices >= self.seq // 2).astype(np.int64)
        if model.prefix:
            segments = halves
        else:
            segments = documents_of(self.seq) if model.causal else np.zeros_like(halves)
        begins = np.maximum.accumulate(indices * (np.diff(segments, prepend=0) > 0))
        positions = indices if model.prefix else indices - begins
        # These fields are the same in every sample.
        self.same = {"segments": segments, "positions": positions, "token_types": halves}

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        random = np.random.default_rng(n)
        return {name: self._field(name, n, random) for name in self.fields}

    def _field(self, name: str, n: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
        length = self.lengths.get(name, self.seq)
        if name in self.same:
            return self.same[name]
        if name == "loss_mask":
            return np.ones(length, np.int64)
        if name == "places":
            return np.sort(random.permutation(self.seq)[:length])
        if name == "swapped":
            return np.asarray(n % 2)
        return random.integers(self.first, self.first + self.vocab, length)


@torch.no_grad()
def draw_on_device(module: nn.Module, seed: int) -> None:
    """Draw weights on the device, with the distribution of a real start.

    Unlike a real start, this gives other weights on other layouts, which does not matter to a measurement.
    """
    torch.manual_seed(seed)
    for parameter in module.parameters():
        record = record_of(parameter)
        if record is not None and record.packs is not None:
            if not parameter.is_meta:
                values = torch.empty(record.packs.local_shape, device=parameter.device)
                parameter.copy_(pack(values.normal_(0.0, record.init.std)))
        elif record is not None and record.init.kind == "normal":
            parameter.normal_(0.0, record.init.std)
        else:
            parameter.fill_(1.0 if record is not None and record.init.kind == "ones" else 0.0)


def release(trainer: Trainer) -> None:
    """Release a trainer's memory.

    Dropping the trainer would not: autograd's hooks keep its buffers alive, and the buffers keep each other alive.
    """
    tensors = [half for state in trainer.states() for share in state.tensors for half in tensors_of(share)]
    for buffer in trainer.data_parallel.buffers:
        tensors += [buffer.params, buffer.grads]
        tensors += [memory.tensor for bucket in buffer.buckets for memory in (bucket.params, bucket.grads)]
    for storage in (tensor.untyped_storage() for tensor in tensors):
        # The storages of states that are offloaded to the host or to files can't be resized.
        if storage.resizable():
            storage.resize_(0)
