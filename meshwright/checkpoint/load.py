"""Loading into any layout, ZeRO stage, precision and world size: the only load path there is.

A rank looks up, box by box, which blocks of the global tensors meet what it holds, reads those, checks each one's
bytes, and copies the common part. It never holds more than its own state and one block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.contract import Checkpointed
from meshwright.checkpoint.tensor_file import TensorFile, checksum
from meshwright.engine.sharding.buffers import OUTER, REDUCER, REPLICA_STATE, Rows, SideState, Slot, State, regions
from meshwright.engine.sharding.remainders import Values
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import DamagedCheckpoint, Index, SavedBlock
from meshwright.spec.layout.params import ParamRecord, overlap, row_of

OPEN_FILES = 16


class Reader:
    """The tensors of one checkpoint, read by boxes."""

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index: Index = index or fmt.read_index(folder)
        self.states = {name.split("/", 1)[0] for name in self.index.tensors}  # param, and what its optimizer kept
        self._blocks: dict[str, list[SavedBlock]] = {}
        for block in self.index.blocks:
            self._blocks.setdefault(block.tensor, []).append(block)
        self._files: dict[str, TensorFile] = {}
        self._last: tuple[SavedBlock, Tensor] | None = None

    def block(self, block: SavedBlock) -> Tensor:
        """Returns the values of a block after checking its CRC-32."""
        if self._last is not None and self._last[0] == block:
            return self._last[1]
        path = self.folder / block.file
        try:
            values = self._values(block)
        except (ValueError, OSError) as error:
            raise DamagedCheckpoint(f"{path} can't be read ({error}): use another checkpoint") from None
        wanted = (block.shape, self.index.tensors[block.tensor]["dtype"])
        if (tuple(values.shape), str(values.dtype).removeprefix("torch.")) != wanted or checksum(values) != block.crc32:
            raise DamagedCheckpoint(f"{path} is damaged in {block.tensor} (wrong checksum): use another checkpoint")
        self._last = (block, values)
        return values

    def close(self) -> None:
        """Lets go of what was opened; mapped files go by themselves."""

    def _values(self, block: SavedBlock) -> Tensor:
        return self._open(block.file).get(block.key)

    def _open(self, name: str) -> TensorFile:
        if name not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Sets `local`, of the record's local shape, from the global tensor."""
        self.fill_range(tensor, record, 0, record.numel, local.view(-1))

    def fill_range(self, tensor: str, record: ParamRecord, low: int, high: int, values: Values) -> None:
        """Sets `values`, which are elements low to high of the local tensor, from the global one."""
        found = self.index.tensors.get(tensor)
        if found is None:
            raise UserError(f"{self.folder} has no {tensor}: it is of another model, check the model section")
        if tuple(found["shape"]) != record.shape:
            raise UserError(
                f"{tensor} has shape {found['shape']} in {self.folder} and {list(record.shape)} in this config: "
                "check the model section"
            )
        filled = 0
        found_in = regions(record, low, high, values)
        wanted = [(replace(box, local_start=(0,) * len(box.shape)), region) for box, region in found_in]
        for block in self._blocks.get(tensor, []):
            for box, region in wanted:
                where = overlap(block.start, block.shape, box)
                if where is not None:
                    inside, at = where
                    part = self.block(block)[inside]
                    region[at] = part.to(region.dtype)
                    filled += part.numel()
        if filled != sum(box.numel for box, _ in wanted):
            raise DamagedCheckpoint(f"{self.folder} lacks a part of {tensor}: use another checkpoint")


@torch.no_grad()
def read_into(trainer: Checkpointed, reader: Reader, model_only: bool) -> None:
    """Reads what this rank owns: the whole state of a run, or only its weights (a new run from them has a fresh
    optimizer and begins at step 0). No rank waits for another, so one may fail alone."""
    trainer.data_parallel.weights.wait_for_gathers()  # one under way writes this rank's old weights once more
    alone = trainer.ctx.layout.replicas == 1
    for state in trainer.states():
        kind = state.name.removeprefix(REPLICA_STATE)
        if kind != "param" and (model_only or not {kind, REPLICA_STATE + kind} & reader.states):
            state.clear()  # a damaged checkpoint that was tried before this one may have left something
            continue
        for slot in state.buffer.slots:
            low, high = state.holds(slot)
            if low < high:
                name, values = f"{kind}/{slot.record.name}", state.values(slot, low, high)
                if (state.replica or alone) and not model_only and REPLICA_STATE + name in reader.index.tensors:
                    assert isinstance(state, State)
                    fill_from_replicas(reader, REPLICA_STATE + name, state, slot, low, high)
                elif kind != "param" and not has_state(reader, name, state, slot):
                    state.clear(slot)
                elif rows := state.additive or (isinstance(state, State) and state.summed and state.replica):
                    assert isinstance(values, Tensor), "the states of reducers are not stored in pairs"
                    add_saved_rows(reader, name, slot.record, rows, low, high, values)
                    other = f"{state.absorbs}/{slot.record.name}" if isinstance(state, State) else ""
                    if rows.row == 0 and other in reader.index.tensors:
                        more = torch.empty_like(values)
                        add_saved_rows(reader, other, slot.record, Rows(0, 1), low, high, more)
                        values.add_(more)
                else:  # replicas that a run without any becomes begin alike
                    record = slot.record if state.replica else state.record(slot)
                    reader.fill_range(name, record, low, high, values)


def fill_from_replicas(reader: Reader, name: str, state: State, slot: Slot, low: int, high: int) -> None:
    """Sets a part of a state that each replica of the run that saved it had for itself: this replica's own row or,
    where there is another number of replicas now, the mean of all rows."""
    values, rows = state.values(slot, low, high), reader.index.tensors[name]["shape"][0]
    if state.replica is not None and rows == state.replica.rows:
        reader.fill_range(name, state.record(slot), low, high, values)
        return
    mean = torch.zeros(high - low, dtype=values.dtype, device=values.device)
    for row in range(rows):
        part = torch.zeros_like(mean)
        reader.fill_range(name, row_of(slot.record, row, rows), low, high, part)
        mean.add_(part)
    values[:] = mean.div_(rows)


def has_state(reader: Reader, name: str, state: State | SideState, slot: Slot) -> bool:
    """Whether a checkpoint has this state of a parameter, which may have been frozen when that was saved, or cut in a
    way that gives a reducer's tensors another shape."""
    found = reader.index.tensors.get(name)
    return found is not None and (isinstance(state, State) or tuple(found["shape"]) == state.record(slot).shape)


def add_saved_rows(
    reader: Reader, name: str, record: ParamRecord, at: Rows, low: int, high: int, values: Tensor
) -> None:
    """Sets a part of an additive state. The ranks that hold it now add up the rows of the ranks that saved it, each row
    once; on an unchanged layout each rank reads its own row."""
    values.zero_()
    rows = reader.index.tensors[name]["shape"][0]
    for row in range(at.row, rows, at.rows):
        part = torch.zeros_like(values)
        reader.fill_range(name, row_of(record, row, rows), low, high, part)
        values.add_(part)


def complete_load(trainer: Checkpointed, reader: Reader, model_only: bool) -> None:
    """Gathers the weights for the ranks that share them and sets the counters, after every rank has read."""
    trainer.publish()
    if not model_only:
        counters = reader.index.state
        kinds = {state.name.removeprefix(REPLICA_STATE) for state in trainer.states()}
        saved = {name.removeprefix(REPLICA_STATE) for name in reader.states}
        if any(kind not in saved for kind in kinds if not kind.startswith((REDUCER, OUTER))):
            # Another optimizer saved it: the moments start from zero, and so must their bias correction.
            counters = counters | {"updates": 0}
        trainer.restore(reader.index.step, reader.index.consumed, counters)


class WeightSource(Protocol):
    """A checkpoint, or another folder that global tensors can be read from."""

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None: ...


@torch.no_grad()
def load_weights(modules: Iterable[nn.Module], reader: WeightSource) -> None:
    """Loads only the weights, into modules without an optimizer."""
    for module in modules:
        for parameter in module.parameters():
            record = parameter.record  # type: ignore[attr-defined]
            reader.fill(f"param/{record.name}", record, parameter.data)
