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
from meshwright.config.sections import ModelConfig
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.nn.adapters.nf4 import pack
from meshwright.nn.parallel import record_of
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE


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


class RandomMasked:
    """Samples for an encoder: random ids from `first` on without padding, of which as many as can be are predicted."""

    def __init__(self, model: ModelConfig, vocab: int, first: int = 0) -> None:
        self.model, self.vocab, self.first = model, vocab, first

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        m, random = self.model, np.random.default_rng(n)
        found: dict[str, Any] = {
            "tokens": random.integers(self.first, self.first + self.vocab, m.seq),
            "labels": random.integers(self.first, self.first + self.vocab, m.predictions),
            "places": np.sort(random.permutation(m.seq)[: m.predictions]),
            "segments": np.zeros(m.seq, np.int64), "loss_mask": np.ones(m.predictions, np.int64),
            "token_types": (np.arange(m.seq) > m.seq // 2).astype(np.int64),
        }  # fmt: skip
        return found | ({"swapped": np.asarray(n % 2)} if m.pooler else {})


class RandomBlanks:
    """Samples with one blank, the second half: random ids from `first` on without padding."""

    def __init__(self, model: ModelConfig, vocab: int, first: int = 0) -> None:
        self.model, self.vocab, self.first = model, vocab, first

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        m, at = self.model, np.arange(self.model.seq)
        ids = np.random.default_rng(n).integers(self.first, self.first + self.vocab, m.seq + 1)
        later = (at >= m.seq // 2).astype(np.int64)
        found = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": later, "positions": at, "segments": later}
        return found | ({"token_types": later * (at - m.seq // 2 + 1)} if m.token_types else {})


class RandomSpans:
    """Samples for an encoder-decoder: random ids from `first` on, all of whose targets count."""

    def __init__(self, model: ModelConfig, vocab: int, first: int = 0) -> None:
        self.model, self.vocab, self.first = model, vocab, first

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        target = self.model.t5.decoder_seq
        ids = np.random.default_rng(n).integers(self.first, self.first + self.vocab, self.model.seq + 2 * target)
        tokens, inputs, labels = np.split(ids, [self.model.seq, self.model.seq + target])
        mask = np.ones(target, np.int64)
        return {"tokens": tokens, "decoder_tokens": inputs, "labels": labels, "loss_mask": mask}


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
