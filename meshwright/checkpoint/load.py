"""Load a checkpoint into any layout, ZeRO stage, precision and world size. This is the only load path.

For each box of a global tensor that a rank holds, it finds the saved blocks that overlap the box, reads them, verifies
their checksums, and copies the overlap. It never holds more than its own state and one block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.contract import CheckpointedTrainer
from meshwright.checkpoint.tensor_file import TensorFile, checksum
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.sharding.buffers import (
    EMA,
    OUTER,
    PARAM,
    REDUCER,
    REPLICA_STATE,
    SideState,
    Slot,
    State,
    StateRows,
    regions,
)
from meshwright.engine.sharding.remainders import Values
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import DamagedCheckpoint, Index, SavedBlock
from meshwright.spec.layout.params import ParamRecord, overlap, row_of

OPEN_FILES = 16


class Reader:
    """A reader of any boxes of a checkpoint's global tensors."""

    def __init__(self, folder: Path, index: Index | None = None, average: bool = False) -> None:
        """Open a checkpoint. With `average`, weights are read from their moving average."""
        self.folder = folder
        self.index: Index = index or fmt.read_index(folder)
        # The kinds of tensors in the checkpoint: `param`, and the states of its optimizer and reducer.
        self.states = {name.split("/", 1)[0] for name in self.index.tensors}
        self._blocks: dict[str, list[SavedBlock]] = {}
        for block in self.index.blocks:
            self._blocks.setdefault(block.tensor, []).append(block)
        if average and EMA not in self.states:
            raise UserError(f"{folder} has no average of its weights: train with optimizer.ema=0.9999, or omit --ema")
        for name in [name for name in self._blocks if average and name.startswith(f"{EMA}/")]:
            own = PARAM + name.removeprefix(EMA)
            self.index.tensors[own], self._blocks[own] = self.index.tensors[name], self._blocks[name]
        self._files: dict[str, TensorFile] = {}
        self._last: tuple[SavedBlock, Tensor] | None = None

    def block(self, block: SavedBlock) -> Tensor:
        """Return the values of a block after checking its CRC-32."""
        # Several boxes of a rank may overlap one block. The last block is cached, so that it is read only once.
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
        """Release resources. Mapped files need no closing, but subclasses may override this."""

    def _values(self, block: SavedBlock) -> Tensor:
        return self._open(block.file).get(block.key)

    def _open(self, name: str) -> TensorFile:
        if name not in self._files:
            # Drop the file that was opened first, to limit the number of mapped files.
            if len(self._files) >= OPEN_FILES:
                self._files.pop(next(iter(self._files)))
            self._files[name] = TensorFile(self.folder / name)
        return self._files[name]

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None:
        """Fill `local`, of the record's local shape, from the global tensor."""
        self.fill_range(tensor, record, 0, record.numel, local.view(-1))

    def fill_range(self, tensor: str, record: ParamRecord, low: int, high: int, values: Values) -> None:
        """Fill `values`, which are elements low to high of the local tensor, from the global tensor."""
        saved = self.index.tensors.get(tensor)
        if saved is None:
            raise UserError(f"{self.folder} has no {tensor}: it is of another model, check the model section")
        if tuple(saved["shape"]) != record.shape:
            raise UserError(
                f"{tensor} has shape {saved['shape']} in {self.folder} and {list(record.shape)} in this config: "
                "check the model section"
            )
        filled = 0
        boxes = regions(record, low, high, values)
        # Each region holds exactly its box, so positions in it start at zero.
        wanted = [(replace(box, local_start=(0,) * len(box.shape)), region) for box, region in boxes]
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
def read_into(trainer: CheckpointedTrainer, reader: Reader, model_only: bool) -> None:
    """Read the state that this rank owns: the whole state of a run, or only its weights with `model_only`.

    A new run from such weights has a fresh optimizer and begins at step 0. No rank waits for another here, so one rank
    may fail alone.
    """
    # A gather in flight would overwrite the loaded weights with this rank's old ones.
    trainer.data_parallel.weights.wait_for_gathers()
    alone = trainer.ctx.layout.replicas == 1
    for state in trainer.states():
        kind = state.name.removeprefix(REPLICA_STATE)
        if kind != PARAM and (model_only or not {kind, REPLICA_STATE + kind} & reader.states):
            # A damaged checkpoint that was tried before this one may have left values in the state.
            state.clear()
            continue
        for slot in state.buffer.slots:
            low, high = state.holds(slot)
            if low < high:
                name = f"{kind}/{slot.record.name}"
                values = state.values(slot, low, high)
                if (state.replica or alone) and not model_only and REPLICA_STATE + name in reader.index.tensors:
                    # The saved run had a separate state for each replica.
                    fill_from_replicas(reader, REPLICA_STATE + name, state, slot, low, high)
                elif kind != PARAM and not has_state(reader, name, state, slot):
                    state.clear(slot)
                elif rows := state.additive or (isinstance(state, State) and state.summed and state.replica):
                    assert isinstance(values, Tensor), "the states of reducers are not stored in pairs"
                    add_saved_rows(reader, name, slot.record, rows, low, high, values)
                    # A saved state that this run has no place for is added to this one, on one rank only.
                    absorbed = f"{state.absorbs}/{slot.record.name}" if isinstance(state, State) else ""
                    if rows.row == 0 and absorbed in reader.index.tensors:
                        more = torch.empty_like(values)
                        add_saved_rows(reader, absorbed, slot.record, StateRows(0, 1), low, high, more)
                        values.add_(more)
                else:
                    # If the saved run had one replica, all replicas of this run start from its state.
                    reader.fill_range(name, state.own_record(slot), low, high, values)


def fill_from_replicas(
    reader: Reader, name: str, state: State | SideState | MatrixState, slot: Slot, low: int, high: int
) -> None:
    """Fill a part of a state that the saved run had separately for each replica: with this replica's row or, if the
    number of replicas has changed, with the mean of all rows (of matrices' states: with the first row)."""
    values, rows = state.values(slot, low, high), reader.index.tensors[name]["shape"][0]
    same = state.replica is not None and rows == state.replica.rows
    if same or isinstance(state, MatrixState):
        row = state.replica.row if state.replica is not None and same else 0
        reader.fill_range(name, row_of(state.own_record(slot), row, rows), low, high, values)
        return
    mean = torch.zeros(high - low, dtype=values.dtype, device=values.device)
    for row in range(rows):
        part = torch.zeros_like(mean)
        reader.fill_range(name, row_of(slot.record, row, rows), low, high, part)
        mean.add_(part)
    values[:] = mean.div_(rows)


def has_state(reader: Reader, name: str, state: State | SideState | MatrixState, slot: Slot) -> bool:
    """Return True if a checkpoint has this state of a parameter. It lacks the state if the parameter was frozen, or if
    another sharding gave a reducer's tensors another shape."""
    saved = reader.index.tensors.get(name)
    return saved is not None and (isinstance(state, State) or tuple(saved["shape"]) == state.own_record(slot).shape)


def add_saved_rows(
    reader: Reader, name: str, record: ParamRecord, at: StateRows, low: int, high: int, values: Tensor
) -> None:
    """Fill a part of an additive state. The ranks that hold it now sum the rows of the ranks that saved it, using each
    row once. On an unchanged layout each rank reads its own row."""
    values.zero_()
    rows = reader.index.tensors[name]["shape"][0]
    for row in range(at.row, rows, at.rows):
        part = torch.zeros_like(values)
        reader.fill_range(name, row_of(record, row, rows), low, high, part)
        values.add_(part)


def complete_load(trainer: CheckpointedTrainer, reader: Reader, model_only: bool) -> None:
    """Gather the weights for the ranks that share them, and set the counters, after every rank has read its state."""
    trainer.publish()
    if not model_only:
        counters = reader.index.state
        kinds = {state.name.removeprefix(REPLICA_STATE) for state in trainer.states()}
        saved = {name.removeprefix(REPLICA_STATE) for name in reader.states}
        if any(kind not in saved for kind in kinds if kind != EMA and not kind.startswith((REDUCER, OUTER))):
            # Another optimizer saved the checkpoint. The moments start from zero, and so must their bias correction.
            counters = counters | {"updates": 0}
        trainer.restore(reader.index.step, reader.index.consumed, counters)


class WeightSource(Protocol):
    """A checkpoint or another source from which global tensors can be read."""

    def fill(self, tensor: str, record: ParamRecord, local: Tensor) -> None: ...


@torch.no_grad()
def load_weights(modules: Iterable[nn.Module], reader: WeightSource) -> None:
    """Load only the weights, into modules that have no optimizer."""
    for module in modules:
        for parameter in module.parameters():
            record = parameter.record  # type: ignore[attr-defined]
            reader.fill(f"param/{record.name}", record, parameter.data)
