"""Detects silent corruption: every `faults.check_every` steps, ranks compare checksums of the tensors they all hold.

Weights are equal on all ranks that sum their gradients, and along the axes that records name as `copies`. Master
weights and moments are equal on the replicas of a shard. Each rank adds up the bits of the tensors that it has in
common with the ranks of an axis, one number per axis, and one small all-gather shares the sums. A rank that differs
from the majority of its group is named and receives the values of the others. Without a majority it is unknown which
rank is right, and the run stops.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.group import Group
from meshwright.config.memory import Place
from meshwright.engine.hooks import Hook
from meshwright.engine.monitor import gather_bytes
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.sharding.buffers import PARAM, FlatBuffer, State
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.record.run_notes import FAULT, FaultNotes
from meshwright.spec.layout import Layout

MAX_NAMED = 3  # Messages name at most this many parameters.


class ReplicatedTensors(NamedTuple):
    """Tensors that are equal on all ranks of an axis: a parameter, all weights of a buffer, or an optimizer state."""

    axis: str
    name: str
    tensors: Sequence[Tensor]
    buffer: FlatBuffer | None = None
    state: State | MatrixState | None = None


class Divergence(NamedTuple):
    """A group of ranks that should hold equal tensors but do not. `wrong`: the corrupt ranks; empty if unknown."""

    axis: str
    group: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def source(self) -> int:
        """The index in the group of the first rank that is right."""
        return next(index for index, rank in enumerate(self.group) if rank not in self.wrong)


def checksum(x: Tensor) -> Tensor:
    """Return the sum of a tensor's bytes as 64-bit words. Flipping any single bit changes it."""
    flat = x.detach().reshape(-1).view(torch.uint8)
    # torch can view bytes as int64 only from a multiple of 8 bytes on, and a part of a shard may start anywhere.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.numel() // 8 * 8
    return flat[:words].view(torch.int64).sum() + flat[words:].sum(dtype=torch.int64)


def held_alike(trainer: Trainer) -> Iterator[ReplicatedTensors]:
    """Yield the tensors of this rank that are equal on other ranks.

    States on disk are left out, since reading all of them takes long.
    """
    parallel, mesh = trainer.data_parallel, trainer.ctx.mesh
    # An accelerator's kernels may add in any order. Then copies of a parameter, whose gradients each rank computes by
    # itself, need not stay equal, except on axes where partial gradients are summed.
    exact = trainer.ctx.device.module is None
    for buffer in parallel.buffers:
        if buffer.split.stage < 3:
            yield ReplicatedTensors(buffer.key.data_axes, "weights", [buffer.params], buffer)
            for slot in buffer.slots:
                for axis in slot.record.copies:
                    if (exact or axis in slot.record.partial) and mesh.rank in mesh.layout.group(axis, mesh.rank):
                        yield ReplicatedTensors(axis, slot.record.name, [slot.view])
    if trainer.ctx.config.zero.offload.optimizer_at is Place.DISK:
        return
    masters = {id(state.buffer) for state in trainer.optimizer.states if not state.in_place}
    for state in trainer.optimizer.tensors():
        replicas = parallel.groups(state.buffer).replicas
        # A state "param" without separate master weights is the weights, which are compared above.
        compared = state.buffer.split.stage < 3
        if replicas.alone or (state.name == PARAM and compared and id(state.buffer) not in masters):
            continue
        stored = [tensor for values in state.tensors for tensor in tensors_of(values)]
        yield ReplicatedTensors(replicas.axis, state.name, stored, state=state)


def divergences(layout: Layout, axes: Sequence[str], sums: Sequence[Sequence[int]]) -> list[Divergence]:
    """Return the groups whose checksums differ. `sums` has shape [ranks, axes].

    If no majority decides within a group, the ranks that are wrong in other groups are wrong in this one too.
    """
    differing = []
    for column, axis in enumerate(axes):
        for group in layout.groups(axis) if layout.size(axis) > 1 else ():
            values = [sums[rank][column] for rank in group]
            common, times = Counter(values).most_common(1)[0]
            if times < len(group):
                others = tuple(rank for rank, value in zip(group, values, strict=True) if value != common)
                differing.append(Divergence(axis, group, others if 2 * times > len(group) else ()))

    known = {rank for group in differing for rank in group.wrong}
    # If no group has a majority, suspect the ranks that are in several differing groups.
    often = Counter(rank for group in differing if not group.wrong for rank in group.group)
    known |= set() if known else {rank for rank, times in often.items() if times > 1}

    resolved = []
    for divergence in differing:
        wrong = divergence.wrong or tuple(rank for rank in divergence.group if rank in known)
        resolved.append(divergence._replace(wrong=wrong if len(wrong) < len(divergence.group) else ()))
    return resolved


class ReplicaCheck(Hook):
    """Compares the ranks' tensors before every `faults.check_every`-th step, when no step runs ahead."""

    def __init__(self, trainer: Trainer, notes: FaultNotes) -> None:
        self.trainer, self.notes = trainer, notes
        self.every = trainer.ctx.config.faults.check_every if trainer.ctx.layout.world > 1 else 0
        self.axes = trainer.ctx.layout.step_groups()
        if self.every:
            trainer.before_step = self.check

    def pauses(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0

    def check(self) -> None:
        """Compare the ranks' tensors, and repair corrupt ones if a majority is known. Raise if that is not possible.

        It runs inside a step, so that the step's ledger counts its traffic.
        """
        if (self.trainer.step_number + 1) % self.every:
            return
        self.trainer.data_parallel.weights.wait_for_gathers()
        differing = self._compare()
        if not differing:
            return
        names = self._names(differing)
        unresolved = [divergence for divergence in differing if not divergence.wrong]
        if not unresolved:
            self._heal(differing)
            wrong = sorted({rank for divergence in differing for rank in divergence.wrong})
            for rank in wrong:
                group = next(divergence for divergence in differing if rank in divergence.wrong)
                text = f"rank {rank} held another {names} than the ranks that hold the same; it got what rank "
                self.notes.fault(f"{text}{group.group[group.source]} holds", self.trainer.step_number + 1, rank)
            # Compare again to make sure that the repair worked.
            unresolved = self._compare()
        if unresolved:
            ranks = ", ".join(map(str, unresolved[0].group))
            text = f"ranks {ranks} hold different {names}, and nobody knows which of them is right"
            self.notes.add(FAULT, text, self.trainer.step_number + 1)
            raise UserError(f"{text}: start the run again, and it continues from its newest checkpoint")

    def _compare(self) -> list[Divergence]:
        """Compute this rank's sum of checksums for each axis, gather them from all ranks, and compare."""
        ctx = self.trainer.ctx
        total: dict[str, Tensor] = {}
        for held in self._replicated_tensors():
            for value in (checksum(tensor).to(ctx.device.torch) for tensor in held.tensors):
                total[held.axis] = total[held.axis] + value if held.axis in total else value
        zero = torch.zeros((), dtype=torch.int64, device=ctx.device.torch)
        local = torch.stack([total.get(axis, zero) for axis in self.axes])
        by_rank = local.new_empty(ctx.layout.world * len(self.axes))
        with ctx.ledger.phase("metrics"):
            ctx.mesh.world.all_gather(by_rank, local)
        return divergences(ctx.layout, self.axes, by_rank.view(ctx.layout.world, -1).tolist())

    def _replicated_tensors(self) -> Iterator[ReplicatedTensors]:
        """Yield the tensors to compare, without the axes of size 1, which have no other rank to compare with."""
        layout = self.trainer.ctx.layout
        for held in held_alike(self.trainer):
            axis = layout.without_ones(held.axis)
            if layout.size(axis) > 1:
                yield held._replace(axis=axis)

    def _heal(self, differing: Sequence[Divergence]) -> None:
        """Broadcast the tensors of each group from its first rank that is right."""
        mesh = self.trainer.ctx.mesh
        # A save may still be copying the tensors that are about to be overwritten: wait for it.
        self.trainer.before_update()
        for divergence in differing:
            if mesh.rank in divergence.group:
                group = mesh.group(divergence.axis)
                for tensor in (
                    x for held in self._replicated_tensors() if held.axis == divergence.axis for x in held.tensors
                ):
                    self._broadcast(group, tensor, divergence.source)

    def _broadcast(self, group: Group, tensor: Tensor, source: int) -> None:
        """Broadcast a tensor as bytes, since back ends do not support the dtype of remainders.

        A state in host memory is sent by way of the device.
        """
        on_device = tensor.to(self.trainer.ctx.device.torch)
        group.broadcast(on_device.view(-1).view(torch.uint8), source)
        if on_device is not tensor:
            tensor.copy_(on_device)

    def _names(self, differing: Sequence[Divergence]) -> str:
        """Return the names of the parameters that differ, found by a separate checksum for each parameter."""
        ctx, names = self.trainer.ctx, set[str]()
        for divergence in differing:
            if ctx.rank in divergence.group:
                local = json.dumps(self._by_parameter(divergence.axis)).encode()
                by_rank = [json.loads(text) for text in gather_bytes(ctx.mesh.group(divergence.axis), local, ctx)]
                names |= {name for name in by_rank[0] if len({sums.get(name) for sums in by_rank}) > 1}
        shown = json.dumps(sorted(names)[:MAX_NAMED]).encode()
        by_rank = [json.loads(text) for text in gather_bytes(ctx.mesh.world, shown, ctx)]
        every = sorted({name for names in by_rank for name in names})
        return ", ".join(every[:MAX_NAMED]) + (" and others" if len(every) > MAX_NAMED else "") or "weights or states"

    def _by_parameter(self, axis: str) -> Mapping[str, int]:
        """Return the checksum of each parameter or state that is equal along an axis."""
        sums: Counter[str] = Counter()
        for held in self._replicated_tensors():
            if held.axis == axis and held.state is not None:
                for slot in held.state.buffer.slots:
                    low, high = held.state.holds(slot)
                    if low < high:
                        values = tensors_of(held.state.values(slot, low, high))
                        sums[f"{held.name} of {slot.record.name}"] += sum(int(checksum(value)) for value in values)
            elif held.axis == axis and held.buffer is not None:
                for slot in held.buffer.slots:
                    sums[slot.record.name] += int(checksum(slot.view))
            elif held.axis == axis:
                sums[held.name] += sum(int(checksum(tensor)) for tensor in held.tensors)
        return sums
