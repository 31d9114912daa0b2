"""What a single rank gets in place of the other ranks, of a dataset and of seeded weights; how its memory is freed."""

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
    """Initialises torch.distributed as rank `rank` of `world`, without the other ranks: torch's fake process group
    makes collectives free, except for the memory that they fill."""
    if world == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it permanently with one that names the rank
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def stand_in(mesh: Mesh) -> None:
    """Fills what would come from other ranks with plausible numbers, since uninitialised memory may hold anything:
    small noise from a neighbouring stage, this rank's own term of a sum. (torch's fake group already fills gathered
    pieces with copies of this rank's own, and leaves a sum in place at this rank's own term.)"""
    for group in mesh.groups.values():
        if not group.alone:
            _fill(group)


def _fill(group: Any) -> None:
    """Wraps the calls that leave their output unwritten: it is filled after the call was made and counted as usual."""
    take, scatter, shifts, to_all = group.receive, group.reduce_scatter, group.shifts, group.all_to_all
    swap = group.exchange

    def receive(x: Tensor, source: int) -> Pending:
        pending: Pending = take(x, source)
        x.normal_(0.0, 1e-2)
        return pending

    def reduce_scatter(out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        pending: Pending = scatter(out, x, wait)
        out.copy_(x[group.index * out.shape[0] :][: out.shape[0]])
        return pending

    def shifted(moves: Sequence[tuple[Tensor, int, Tensor]]) -> Pending:
        pending: Pending = shifts(moves)
        for x, _, out in moves:
            out.copy_(x)
        return pending

    def all_to_all(out: Tensor, x: Tensor, *more: Any, **named: Any) -> Pending:
        if x.is_meta and group.axis in ("ep", EP_NODE, EP_ACROSS):
            # The plan's experts are balanced, and so each rank keeps the mean: whole rows can't always be dealt so.
            named = {}
        pending: Pending = to_all(out, x, *more, **named)
        if out.shape == x.shape:
            out.copy_(x)
        return pending

    def exchange(sent: Tensor, to: int, found: Tensor, source: int) -> Pending:
        pending: Pending = swap(sent, to, found, source)
        found.normal_(0.0, 1e-2)
        return pending

    group.receive, group.reduce_scatter, group.shifts, group.all_to_all = receive, reduce_scatter, shifted, all_to_all
    group.exchange = exchange


DOCUMENT_TOKENS = 2048  # around which the lengths of documents vary


def documents_of(seq: int) -> np.ndarray[Any, Any]:
    """Returns the numbers of the documents that tokens belong to, the same in every sample."""
    begins = np.random.default_rng(0).random(seq) < 1.0 / DOCUMENT_TOKENS
    return np.cumsum(begins, dtype=np.int64) - int(begins[0])


class RandomTokens:
    """Samples of random ids, from `first` on. `fields` names further arrays of a sample: "segments", the documents, and
    "positions", which begin anew in each of them."""

    def __init__(self, vocab: int, seq: int, first: int = 0, fields: Sequence[str] = ()) -> None:
        self.vocab, self.seq, self.first = vocab, seq, first
        segments, at = documents_of(seq), np.arange(seq, dtype=np.int64)
        begins = np.maximum.accumulate(at * (np.diff(segments, prepend=0) > 0))
        self.more = {name: {"segments": segments, "positions": at - begins}[name] for name in fields}

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        ids = np.random.default_rng(n).integers(self.first, self.first + self.vocab, self.seq + 1)
        found = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": np.ones(self.seq, dtype=np.int64)}
        return found | self.more


class RandomSamples:
    """Samples with the fields that the data of a config have: random ids from `first` on, without padding, all of whose
    targets count. A causal model reads several documents, one with a prefix its source and the rest, others one."""

    def __init__(self, config: Config, vocab: int, first: int = 0) -> None:
        self.vocab, self.first, self.fields = vocab, first, data_fields(config)
        model, self.seq = model_of(config), config.model.seq
        self.lengths, at = dict(model.lengths), np.arange(self.seq)
        halves = (at >= self.seq // 2).astype(np.int64)
        segments = halves if model.prefix else documents_of(self.seq) if model.causal else np.zeros_like(halves)
        begins = np.maximum.accumulate(at * (np.diff(segments, prepend=0) > 0))
        positions = at if model.prefix else at - begins
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
    """Draws weights like those of a real start on the device: a measurement need not be the same on every layout."""
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
    """Releases a trainer's memory. Autograd's hooks keep its buffers alive, and those keep each other alive, so
    dropping the trainer would not."""
    tensors = [half for state in trainer.states() for share in state.tensors for half in tensors_of(share)]
    for buffer in trainer.data_parallel.buffers:
        tensors += [buffer.params, buffer.grads]
        tensors += [memory.tensor for bucket in buffer.buckets for memory in (bucket.params, bucket.grads)]
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.resizable():  # states offloaded to the host or to files can't be resized
            storage.resize_(0)
