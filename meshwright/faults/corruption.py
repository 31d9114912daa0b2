"""Silent corruption: what several ranks hold alike is compared every so many steps, by checksums.

Weights are the same on all ranks that sum their gradients, and along the axes that records name as `copies`; masters
and moments are the same on replicas of a share. Each rank adds up the bits of what it shares with each axis's ranks,
one number per axis, and one small all_gather tells everybody. A rank that differs from the majority of its group is
named, and gets what the others hold; without a majority nobody knows who is right, and the run stops.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.engine.hooks import Hook
from meshwright.engine.monitor import gather_bytes
from meshwright.engine.sharding.buffers import FlatBuffer, State
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.record.run_notes import FAULT, FaultNotes
from meshwright.spec.layout import Layout

MOST_NAMED = 3  # parameters


class Held(NamedTuple):
    """Something that all ranks of an axis hold alike: a parameter, all weights of a buffer, or a state of it."""

    axis: str
    name: str
    tensors: Sequence[Tensor]
    buffer: FlatBuffer | None = None
    state: State | None = None


class Divergence(NamedTuple):
    """A group whose ranks don't hold the same, and those of them that are wrong (none: nobody knows)."""

    axis: str
    group: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def source(self) -> int:
        """The place in the group of the first rank that is right."""
        return next(place for place, rank in enumerate(self.group) if rank not in self.wrong)


def checksum(x: Tensor) -> Tensor:
    """The sum of a tensor's bits in words of 64: any one that is flipped changes it."""
    flat = x.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # a piece of a share may begin anywhere, and words of 64 bits may not
        flat = flat.clone()
    words = flat.numel() // 8 * 8
    return flat[:words].view(torch.int64).sum() + flat[words:].sum(dtype=torch.int64)


def held_alike(trainer: Trainer) -> Iterator[Held]:
    """What this rank holds as others do. (States on disk are left out: reading all of them takes long.)"""
    parallel, mesh = trainer.data_parallel, trainer.ctx.mesh
    exact = trainer.ctx.device.module is None  # accelerators' kernels may add in any order
    for buffer in parallel.buffers:
        if buffer.split.stage < 3:
            yield Held(buffer.key.data_axes, "weights", [buffer.params], buffer)
            for slot in buffer.slots:
                for axis in slot.record.copies:
                    if (exact or axis in slot.record.partial) and mesh.rank in mesh.layout.group(axis, mesh.rank):
                        yield Held(axis, slot.record.name, [slot.view])
    if trainer.ctx.config.zero.offload.optimizer == "disk":
        return
    masters = {id(state.buffer) for state in trainer.optimizer.states if not state.in_place}
    for state in trainer.optimizer.tensors():
        replicas, compared = parallel.groups(state.buffer).replicas, state.buffer.split.stage < 3  # with the weights
        if replicas.alone or (state.name == "param" and compared and id(state.buffer) not in masters):
            continue
        stored = [tensor for values in state.tensors for tensor in tensors_of(values)]
        yield Held(replicas.axis, state.name, stored, state=state)


def divergences(layout: Layout, axes: Sequence[str], sums: Sequence[Sequence[int]]) -> list[Divergence]:
    """The groups whose checksums differ: `sums` are by rank, and for each the axes'. Where half of a group stands
    against the other half, a rank is wrong that is so elsewhere too."""
    found = []
    for column, axis in enumerate(axes):
        for group in layout.groups(axis) if layout.size(axis) > 1 else ():
            values = [sums[rank][column] for rank in group]
            common, times = Counter(values).most_common(1)[0]
            if times < len(group):
                others = tuple(rank for rank, value in zip(group, values, strict=True) if value != common)
                found.append(Divergence(axis, group, others if 2 * times > len(group) else ()))
    known = {rank for each in found for rank in each.wrong}
    often = Counter(rank for each in found if not each.wrong for rank in each.group)
    known |= set() if known else {rank for rank, times in often.items() if times > 1}
    resolved = []
    for each in found:
        wrong = each.wrong or tuple(rank for rank in each.group if rank in known)
        resolved.append(each._replace(wrong=wrong if len(wrong) < len(each.group) else ()))
    return resolved


class ReplicaCheck(Hook):
    """Compares before every so many steps, when nothing runs ahead."""

    def __init__(self, trainer: Trainer, notes: FaultNotes) -> None:
        self.trainer, self.notes = trainer, notes
        self.every = trainer.ctx.config.faults.check_every if trainer.ctx.layout.world > 1 else 0
        self.axes = trainer.ctx.layout.step_groups()
        if self.every:
            trainer.before_step = self.check

    def pauses(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def check(self) -> None:
        """Compares, and mends what it can. Called in a step, whose ledger counts it."""
        if (self.trainer.step_number + 1) % self.every:
            return
        self.trainer.data_parallel.weights.wait_for_gathers()
        found = self._compare()
        if not found:
            return
        names = self._names(found)
        lost = [each for each in found if not each.wrong]
        if not lost:
            self._heal(found)
            wrong = sorted({rank for each in found for rank in each.wrong})
            for rank in wrong:
                group = next(each for each in found if rank in each.wrong)
                text = f"rank {rank} held another {names} than the ranks that hold the same; it got what rank "
                self.notes.fault(f"{text}{group.group[group.source]} holds", self.trainer.step_number + 1, rank)
            lost = self._compare()
        if lost:
            ranks = ", ".join(map(str, lost[0].group))
            text = f"ranks {ranks} hold different {names}, and nobody knows which of them is right"
            self.notes.add(FAULT, text, self.trainer.step_number + 1)
            raise UserError(f"{text}: start the run again, which goes on from its newest checkpoint")

    def _compare(self) -> list[Divergence]:
        ctx = self.trainer.ctx
        total: dict[str, Tensor] = {}
        for held in self._held():
            for found in (checksum(tensor).to(ctx.device.torch) for tensor in held.tensors):
                total[held.axis] = total[held.axis] + found if held.axis in total else found
        zero = torch.zeros((), dtype=torch.int64, device=ctx.device.torch)
        own = torch.stack([total.get(axis, zero) for axis in self.axes])
        everyone = own.new_empty(ctx.layout.world * len(self.axes))
        with ctx.ledger.phase("metrics"):
            ctx.mesh.world.all_gather(everyone, own)
        return divergences(ctx.layout, self.axes, everyone.view(ctx.layout.world, -1).tolist())

    def _held(self) -> Iterator[Held]:
        layout = self.trainer.ctx.layout
        for held in held_alike(self.trainer):
            axis = layout.without_ones(held.axis)
            if layout.size(axis) > 1:
                yield held._replace(axis=axis)

    def _heal(self, found: Sequence[Divergence]) -> None:
        """Every rank of a group gets what its first good one holds."""
        mesh = self.trainer.ctx.mesh
        self.trainer.before_update()  # a save may be copying
        for each in found:
            if mesh.rank in each.group:
                group = mesh.group(each.axis)
                for tensor in (x for held in self._held() if held.axis == each.axis for x in held.tensors):
                    self._broadcast(group, tensor, each.source)

    def _broadcast(self, group: Group, tensor: Tensor, source: int) -> None:
        """Sends bytes, since remainders are of a type that backends don't know; states in host memory by way of the
        device."""
        there = tensor.to(self.trainer.ctx.device.torch)
        group.broadcast(there.view(-1).view(torch.uint8), source)
        if there is not tensor:
            tensor.copy_(there)

    def _names(self, found: Sequence[Divergence]) -> str:
        """Of the parameters that differ, by a closer look of the groups that do."""
        ctx, names = self.trainer.ctx, set[str]()
        for each in found:
            if ctx.rank in each.group:
                own = json.dumps(self._by_parameter(each.axis)).encode()
                told = [json.loads(text) for text in gather_bytes(ctx.mesh.group(each.axis), own, ctx)]
                names |= {name for name in told[0] if len({sums.get(name) for sums in told}) > 1}
        shown = json.dumps(sorted(names)[:MOST_NAMED]).encode()
        told = [json.loads(text) for text in gather_bytes(ctx.mesh.world, shown, ctx)]
        every = sorted({name for names in told for name in names})
        return ", ".join(every[:MOST_NAMED]) + (" and others" if len(every) > MOST_NAMED else "") or "weights or states"

    def _by_parameter(self, axis: str) -> Mapping[str, int]:
        sums: Counter[str] = Counter()
        for held in self._held():
            if held.axis == axis and held.state is not None:
                for slot in held.state.buffer.slots:
                    low, high = held.state.holds(slot)
                    if low < high:
                        values = tensors_of(held.state.values(slot, low, high))
                        sums[f"{held.name} of {slot.record.name}"] += sum(int(checksum(each)) for each in values)
            elif held.axis == axis and held.buffer is not None:
                for slot in held.buffer.slots:
                    sums[slot.record.name] += int(checksum(slot.view))
            elif held.axis == axis:
                sums[held.name] += sum(int(checksum(each)) for each in held.tensors)
        return sums
