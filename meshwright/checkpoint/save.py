"""Saving: each rank writes the part of every buffer that a sharded optimizer would own, so replicas are written once.

A thread copies that part to host memory while the next step computes its gradients, and then writes it; only the next
update has to wait for the copy. One rank commits: it waits until the other ranks' files have appeared beside its own,
checks them, writes the index and renames the folder. That needs no collective, since the records say who writes what.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import tensor_file
from meshwright.checkpoint.contract import Checkpointed
from meshwright.comm.group import CommError
from meshwright.config.load import to_mapping
from meshwright.device import SideStream
from meshwright.disk import refused
from meshwright.engine.sharding.buffers import SideState, Slot, State, regions
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.sharding.remainders import PairedTensor, Values, plain, tensors_of
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import Index, SavedBlock
from meshwright.record.companions import copy_all
from meshwright.record.ending import before_sudden_end
from meshwright.spec.layout.params import Box, slices_of

# Seconds between two polls: the first pause, and the longest.
POLL_S, LONGEST_POLL_S = 0.02, 1.0
# How long the rank that commits waits for the next rank's part to appear. It is no limit of a whole save, which takes
# as long as the disk needs, and has nothing to do with comm.timeout.
PART_WAIT_S = 1800.0
FAILED = ".failed"  # marks that a rank could not write its part: the save never counts, and no rank waits for it


def part_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def part_list(folder: Path, rank: int) -> Path:
    """Returns the path of the list of a rank's blocks. The list appears only when the whole file has been written."""
    return part_file(folder, rank).with_suffix(".json")


def mark_failed(folder: Path, rank: int) -> None:
    """Tells the other ranks that the save failed on this one, and removes its part."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)  # it may have failed before anything was written
        part_file(folder, rank).unlink(missing_ok=True)
        part_file(folder, rank).with_suffix(FAILED).touch()


def remove_failed(folder: Path, rank: int) -> None:
    """Removes this rank's part of a save that failed on another."""
    with contextlib.suppress(OSError):
        if any(folder.glob(f"*{FAILED}")):
            part_file(folder, rank).unlink(missing_ok=True)


def ranges_to_write(data_parallel: DataParallel, state: State | SideState) -> Iterator[tuple[Slot, int, int]]:
    """Yields (slot, start, stop) of the elements of each parameter that this rank writes. Replicas divide what they
    hold in common; of an additive state each rank writes a row of its own, and a reducer's other tensors are written by
    the first of the ranks that hold the same. What all replicas of `layout.replicas` have is written by the first."""
    buffer = state.buffer
    if state.replica is None and data_parallel.mesh.replica > 0:
        return
    for slot in buffer.slots:
        bucket = buffer.buckets[slot.bucket]
        low, high = buffer.split.written(bucket.start, bucket.stop)
        low, high = max(slot.start, low) - slot.start, min(slot.stop, high) - slot.start
        apart: tuple[str, ...] = ()
        if state.additive or isinstance(state, SideState):
            writes = not isinstance(state, SideState) or state.writes
            low, high = state.holds(slot) if writes else (0, 0)
            apart = slot.record.partial
        if low < high and data_parallel.holds_first(slot, apart):
            yield slot, low, high


class Snapshot:
    """One rank's part of a checkpoint: views of the training state until `copy_to_host` copies them out of it. Masters
    that are stored as weights and remainders are copied so, and joined block by block while they are written."""

    def __init__(self, trainer: Checkpointed) -> None:
        self.blocks: list[tuple[str, tuple[int, ...], Values]] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self._being_copied: list[Any] = []
        for state in trainer.states():
            for slot, low, high in ranges_to_write(trainer.data_parallel, state):
                for record, values in state.saved(slot, low, high):
                    name = f"{state.name}/{record.name}"
                    dtype = str(values.dtype).removeprefix("torch.")
                    self.tensors[name] = {"shape": list(record.shape), "dtype": dtype}
                    for box, region in regions(record, low, high, values):
                        self._add(name, box, region)

    def _add(self, name: str, box: Box, values: Values) -> None:
        if not box.shape:
            self.blocks.append((name, (), values))
            return
        for start, shape in fmt.blocks_of(box.shape, values.element_size()):
            corner = tuple(a + b for a, b in zip(box.start, start, strict=True))
            self.blocks.append((name, corner, values[slices_of(start, shape)]))

    def copy_to_host(self, staging: dict[tuple[int, int], Tensor], everything: bool) -> None:
        """Copies every block, or only those that can't be written from where they are, into `staging`. Its buffers are
        kept from one save to the next: a copy into memory that was never touched takes many times as long. What is
        copied is held on to until `copied`: copies may still be under way on a stream of their own, and memory that
        nobody holds may be written to by others before it was read."""
        self._being_copied = list(self.blocks)
        for number, (name, start, values) in enumerate(self.blocks):
            held = tensors_of(values)
            if not everything and all(x.device.type == "cpu" and x.is_contiguous() for x in held):
                continue
            copies = []
            for half, x in enumerate(held):
                at = number, half
                if at not in staging:
                    staging[at] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type != "cpu")
                copies.append(staging[at].copy_(x, non_blocking=True))
            self.blocks[number] = (name, start, PairedTensor(*copies) if len(copies) == 2 else copies[0])

    def copied(self) -> None:
        """Says that all copies are complete."""
        self._being_copied = []


def write_part(folder: Path, rank: int, snapshot: Snapshot) -> None:
    """Writes this rank's blocks, and then the list of them, which says that they are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    file = part_file(folder, rank)
    held = [values for _, _, values in snapshot.blocks]
    entries = [tensor_file.TensorEntry.of(str(n), values) for n, values in enumerate(held)]
    sums = tensor_file.write_tensors(file, entries, map(plain, held)) if held else []
    blocks = [
        SavedBlock(tensor, start, tuple(values.shape), file.name, str(n), crc)
        for n, ((tensor, start, values), crc) in enumerate(zip(snapshot.blocks, sums, strict=True))
    ]
    size = file.stat().st_size if blocks else 0
    part = {"file": file.name, "bytes": size, "tensors": snapshot.tensors, "blocks": blocks}
    fmt.write_json(part_list(folder, rank), part)


def commit(folder: Path, step: int, index: Index, keep: int, patience: float, companions: Path | None = None) -> None:
    """Waits for every rank's part, checks that they cover every tensor, and makes the folder a checkpoint, with copies
    of the model's companions in it."""
    aside, final = folder / fmt.saving_name(step), folder / fmt.folder_name(step)
    parts = [part_list(aside, rank) for rank in range(index.world)]
    wait_for(parts, patience)
    for path in parts:
        part = json.loads(path.read_text(encoding="utf-8"))
        if part["blocks"]:
            index.files[part["file"]] = part["bytes"]
        index.tensors |= part["tensors"]
        index.blocks += [SavedBlock.read(row) for row in part["blocks"]]
    assert not index.incomplete(), f"not all elements of {index.incomplete()} were written"
    if companions is not None:
        copy_all(companions, aside)
    fmt.write_index(aside, index)
    for path in parts:
        path.unlink()
    fmt.sync_folder(aside)
    if final.exists():  # an earlier attempt at this save failed only after its rename
        shutil.rmtree(aside)
    else:
        os.rename(aside, final)
    fmt.sync_folder(folder)
    fmt.keep_newest(folder, keep)
    fmt.remove_unfinished(folder, before=step)


def wait_for(
    paths: list[Path],
    patience: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all of these files of one folder exist. `patience` limits the seconds since the last one appeared: a
    rank that died would otherwise keep everybody waiting for ever."""
    folder, missing, since, pause = paths[0].parent, list(paths), clock(), POLL_S
    while True:
        # One listing tells of all files but the first, which is looked up: a network disk may show an old listing.
        there = set(os.listdir(folder)) if folder.is_dir() else set()
        left = [path for n, path in enumerate(missing) if path.name not in there and (n or not path.exists())]
        if not left:
            return
        if failed := next((path.stem for path in left if path.with_suffix(FAILED).name in there), None):
            raise UserError(f"{failed} could not write its part of the checkpoint")
        if len(left) < len(missing):
            missing, since, pause = left, clock(), POLL_S
        elif clock() - since > patience:
            names = ", ".join(path.name for path in left[:8]) + (" and more" if len(left) > 8 else "")
            raise UserError(
                f"no further part of the checkpoint appeared within {patience:.0f} s: {folder} lacks {names}; see "
                "whether a rank has stopped, or whether the disk is away"
            )
        sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


SUDDEN_END_S = 3.0  # how long a save under way may still take where the watchdog ends the process
FINAL_WAIT_S = 60.0  # how long a run that ends with an error waits for its save under way


class Saver:
    """The saves of one rank, of which at most one is under way.

    A save that fails on any rank, as when a network disk is away for a moment, never counts. It is reported at once and
    the next save tries again; two failures in a row end the run, and the last save of a run is repeated.
    """

    def __init__(self, trainer: Checkpointed, folder: Path, asynchronous: bool, busy: str, keep: int) -> None:
        self.trainer, self.folder = trainer, folder
        self.asynchronous, self.busy, self.keep = asynchronous, busy, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last save
        self._failures = 0  # one after the other
        self._last = False  # whether the save under way is the run's last one
        self._staging: dict[tuple[int, int], Tensor] = {}
        self._registered = contextlib.ExitStack()
        # Set while no copy to host memory is under way. The saving thread reads the weights and the optimizer's states
        # while the main thread computes gradients; the update, which changes them, waits here until the copy is done.
        self._staged = threading.Event()
        self._staged.set()
        trainer.before_update = self._wait_for_copy
        self.saved_step: int | None = None
        self.complete_step: int | None = None  # of the newest save that this rank has finished with
        self.companions: Path | None = None  # a folder of what every checkpoint gets a copy of
        self.blocked_s = self.took_s = 0.0  # of the last save: how long training waited for it, how long it took

    def __enter__(self) -> Saver:
        self._registered.enter_context(before_sudden_end(self._finish_soon))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error of this rank's own, waits for a save under way: it can still become complete, since all ranks'
        writers live until this one ends."""
        if self._thread is not None and isinstance(error, Exception) and not isinstance(error, CommError):
            end = time.monotonic() + FINAL_WAIT_S
            self._thread.join(FINAL_WAIT_S)
            if self._error is None and self.saved_step is not None:
                with contextlib.suppress(UserError):
                    wait_for([self.folder / fmt.folder_name(self.saved_step)], end - time.monotonic())
        self._registered.close()

    def _finish_soon(self) -> None:
        """Give a save under way a few seconds: a part that is nearly written may complete the checkpoint."""
        thread = self._thread
        if thread is not None:
            thread.join(SUDDEN_END_S)

    def save(self, last: bool = False) -> bool:
        """Begins a save of the present state; False if it is skipped since the one before is still under way. The
        `last` state of a run is never skipped."""
        if self.busy == "skip" and not last and self._any(self.is_writing):
            return False
        self.wait()
        begun, self._last = time.monotonic(), last
        self._begin()
        if not self.asynchronous:
            self.wait()
        self.blocked_s = time.monotonic() - begun
        return True

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _wait_for_copy(self) -> None:
        if not self._staged.is_set():
            begun = time.monotonic()
            self._staged.wait()
            self.blocked_s += time.monotonic() - begun

    def _begin(self) -> None:
        if self.saved_step is not None:
            remove_failed(self.folder / fmt.saving_name(self.saved_step), self.trainer.ctx.rank)
        trainer = self.trainer
        snapshot = Snapshot(trainer)
        index = Index(
            trainer.step_number, trainer.consumed, trainer.ctx.layout.world, to_mapping(trainer.ctx.config),
            dict(trainer.counters()),
        )  # fmt: skip
        self.saved_step, self._error = trainer.step_number, None
        self._staged.clear()
        copies = SideStream(trainer.ctx.device)  # made here, so that it sees the update that was just launched
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, index, copies), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _any(self, here: bool) -> bool:
        """Whether `here` is true on any rank."""
        ctx = self.trainer.ctx
        with ctx.ledger.phase("checkpoint"):
            return bool(ctx.mesh.world.agreed(float(here), ctx.device.torch))

    def _write(self, snapshot: Snapshot, index: Index, copies: SideStream) -> None:
        aside, rank, begun = self.folder / fmt.saving_name(index.step), self.trainer.ctx.rank, time.monotonic()
        try:
            with copies:
                self._stage(snapshot)
            snapshot.copied()
            if self.asynchronous:
                self._staged.set()
            write_part(aside, rank, snapshot)
            if self.trainer.writes:
                commit(self.folder, index.step, index, self.keep, PART_WAIT_S, self.companions)
        except BaseException as error:
            mark_failed(aside, rank)
            self._failures += 1
            self._error = error
            if isinstance(error, OSError):
                where = error.filename or self.folder
                what = f"the checkpoint can't be written to {where}"
                self._error = refused(what, error, where, "another checkpoint.dir")
            if self._failures == 1:
                mends = isinstance(self._error, UserError)
                then = "it is tried once more with the next one" if mends else "the run ends at the next one"
                then = ("it is tried once more now" if mends else "the run ends") if self._last else then
                print(f"meshwright: warning: {self._error!s}; {then}", file=sys.stderr, flush=True)
        else:
            self._failures, self.took_s, self.complete_step = 0, time.monotonic() - begun, index.step
        finally:
            self._staged.set()

    def _stage(self, snapshot: Snapshot) -> None:
        try:
            snapshot.copy_to_host(self._staging, everything=self.asynchronous)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, MemoryError) and not re.search("out of memory|allocate memory", str(error)):
                raise
            reason = (str(error) or "out of memory").splitlines()[0]
            raise UserError(
                f"the state can't be copied for a checkpoint ({reason}): free some host memory, or set "
                "checkpoint.async=false"
            ) from None

    def _finished(self) -> bool:
        """Wait until no rank is writing, and return whether all of them succeeded. Every rank must call this.

        The ranks write for different times, on a slow disk longer than `comm.timeout`: so none waits inside of one
        call for another's disk. They agree again and again, up to once a second, while their threads write. That also
        spares the disk: only the rank that commits looks for files. A rank whose disk hangs for good is left to the
        watchdog, which names it when it does not come to the next call."""
        pause, end = POLL_S, time.monotonic() + 2 * PART_WAIT_S
        while self._any(self.is_writing and time.monotonic() < end):
            if self._thread is not None:
                self._thread.join(pause)
            if not self.is_writing:
                time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)
        self._join()
        return not self._any(self._error is not None)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Waits until the save under way is written by all ranks and committed. Every rank must call this."""
        if self._thread is not None:
            self._finished()
        if self._error is not None and (self._failures > 1 or not isinstance(self._error, UserError)):
            raise self._error

    def committed(self) -> None:
        """Waits until the run's last save counts. Every rank calls this at the end, and none ends before all agree."""
        if self._finished():
            return
        if self.trainer.writes:
            fmt.remove_unfinished(self.folder)
        self._any(False)  # a barrier: no rank saves again before the folder is removed
        self._begin()
        if not self._finished():
            raise self._error or SystemExit(2)
