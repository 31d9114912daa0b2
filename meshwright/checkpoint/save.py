"""Save checkpoints: each rank writes the shard of every buffer that a sharded optimizer would own, so replicas are
written once.

A thread copies this shard to host memory while the next step computes its gradients, and then writes it. Only the next
update has to wait for the copy. One rank commits: it waits until the files of all ranks have appeared, checks them,
writes the index and renames the folder. That needs no collective, since the records determine which rank writes what.
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
from meshwright.checkpoint.contract import CheckpointedTrainer
from meshwright.comm.group import CommError
from meshwright.config.load import to_mapping
from meshwright.device import SideStream, is_host
from meshwright.disk import refusal
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.sharding.buffers import SideState, Slot, State, regions
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.engine.sharding.remainders import PairedTensor, Values, as_tensor, tensors_of
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import Index, SavedBlock
from meshwright.record.companions import copy_all
from meshwright.record.ending import before_sudden_end
from meshwright.spec.layout.params import Box, slices_of

# Seconds between two polls: the first pause, and the longest.
POLL_S, LONGEST_POLL_S = 0.02, 1.0
# The time that the rank that commits waits for the next rank's part to appear. It does not limit a whole save, which
# takes as long as the disk needs, and is unrelated to comm.timeout.
PART_WAIT_S = 1800.0
# The suffix of a file that marks a rank's failed part. The save then never counts, and no rank waits for it.
FAILED = ".failed"


def part_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def part_list(folder: Path, rank: int) -> Path:
    """Return the path of the list of a rank's blocks. The list appears only after the whole file has been written."""
    return part_file(folder, rank).with_suffix(".json")


def mark_failed(folder: Path, rank: int) -> None:
    """Mark for the other ranks that the save failed on this one, and remove its part."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)  # The save may have failed before it created the folder.
        part_file(folder, rank).unlink(missing_ok=True)
        part_file(folder, rank).with_suffix(FAILED).touch()


def remove_failed(folder: Path, rank: int) -> None:
    """Remove this rank's part of a save that failed on some rank."""
    with contextlib.suppress(OSError):
        if any(folder.glob(f"*{FAILED}")):
            part_file(folder, rank).unlink(missing_ok=True)


def ranges_to_write(
    data_parallel: DataParallel, state: State | SideState | MatrixState
) -> Iterator[tuple[Slot, int, int]]:
    """Yield (slot, start, stop) of the elements of each parameter that this rank writes.

    Ranks with the same values divide them among each other. For an additive state, each rank writes a separate row. A
    reducer's other tensors, and the states of whole matrices, are written by the first of the ranks with the same
    values. Replica 0 writes the state that all replicas of `layout.replicas` share.
    """
    buffer = state.buffer
    if state.replica is None and data_parallel.mesh.replica > 0:
        return
    for slot in buffer.slots:
        bucket = buffer.buckets[slot.bucket]
        low, high = buffer.split.written(bucket.start, bucket.stop)
        low, high = max(slot.start, low) - slot.start, min(slot.stop, high) - slot.start
        apart: tuple[str, ...] = ()
        if state.additive or not isinstance(state, State):
            writes = isinstance(state, State) or state.writes
            low, high = state.holds(slot) if writes else (0, 0)
            # Which of the ranks that hold copies of a parameter owns its matrices is independent of these copies.
            apart = slot.record.copies if isinstance(state, MatrixState) else slot.record.partial
        if low < high and data_parallel.holds_first(slot, apart):
            yield slot, low, high


class Snapshot:
    """One rank's part of a checkpoint: views of the training state, which `copy_to_host` replaces by copies.

    Master weights that are stored as bf16 weights and remainders are copied in that form. They are joined block by
    block while they are written.
    """

    def __init__(self, trainer: CheckpointedTrainer) -> None:
        self.blocks: list[tuple[str, tuple[int, ...], Values]] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self._being_copied: list[Any] = []
        for state in trainer.states():
            for slot, low, high in ranges_to_write(trainer.data_parallel, state):
                for record, values in state.saved_values(slot, low, high):
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
        """Copy every block into `staging`, or without `everything` only blocks that can't be written in place.

        The buffers of `staging` are reused for the next save, because a copy into untouched memory takes many times as
        long. The source tensors stay referenced until `release_sources`: copies may still be in flight on another
        stream, and the allocator could give unreferenced memory to other tensors before it has been read.
        """
        self._being_copied = list(self.blocks)
        for number, (name, start, values) in enumerate(self.blocks):
            tensors = tensors_of(values)
            if not everything and all(is_host(x.device) and x.is_contiguous() for x in tensors):
                continue
            copies = []
            for half, x in enumerate(tensors):
                at = number, half
                if at not in staging:
                    staging[at] = torch.empty(x.shape, dtype=x.dtype, pin_memory=not is_host(x.device))
                copies.append(staging[at].copy_(x, non_blocking=True))
            self.blocks[number] = (name, start, PairedTensor(*copies) if len(copies) == 2 else copies[0])

    def release_sources(self) -> None:
        """Release the source tensors after all copies are complete."""
        self._being_copied = []


def write_part(folder: Path, rank: int, snapshot: Snapshot) -> None:
    """Write this rank's blocks, then the list of them. The list marks them as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    file = part_file(folder, rank)
    block_values = [values for _, _, values in snapshot.blocks]
    entries = [tensor_file.TensorEntry.of(str(n), values) for n, values in enumerate(block_values)]
    sums = tensor_file.write_tensors(file, entries, map(as_tensor, block_values)) if block_values else []
    blocks = [
        SavedBlock(tensor, start, tuple(values.shape), file.name, str(n), crc)
        for n, ((tensor, start, values), crc) in enumerate(zip(snapshot.blocks, sums, strict=True))
    ]
    size = file.stat().st_size if blocks else 0
    part = {"file": file.name, "bytes": size, "tensors": snapshot.tensors, "blocks": blocks}
    fmt.write_json(part_list(folder, rank), part)


def commit(folder: Path, step: int, index: Index, keep: int, patience: float, companions: Path | None = None) -> None:
    """Wait for every rank's part, check that the parts cover every tensor, and turn the folder into a checkpoint. It
    also gets copies of the model's `companions`."""
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
    # A folder counts as a checkpoint only under its final name. The rename is one atomic step, so a crash never leaves
    # an incomplete checkpoint.
    if final.exists():  # An earlier attempt at this save failed after its rename.
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
    """Wait until all of these files of one folder exist. `patience` limits the seconds since the last one appeared,
    because a dead rank would otherwise keep the others waiting for ever."""
    folder = paths[0].parent
    missing = list(paths)
    since = clock()
    pause = POLL_S
    while True:
        # One listing checks all files. The first one is also looked up, since a network disk may show an old listing.
        listed = set(os.listdir(folder)) if folder.is_dir() else set()
        left = [path for n, path in enumerate(missing) if path.name not in listed and (n or not path.exists())]
        if not left:
            return
        if failed := next((path.stem for path in left if path.with_suffix(FAILED).name in listed), None):
            raise UserError(f"{failed} could not write its part of the checkpoint")
        if len(left) < len(missing):
            missing = left
            since = clock()
            pause = POLL_S
        elif clock() - since > patience:
            names = ", ".join(path.name for path in left[:8]) + (" and more" if len(left) > 8 else "")
            raise UserError(
                f"no further part of the checkpoint appeared within {patience:.0f} s: {folder} lacks {names}; see "
                "whether a rank has stopped, or whether the disk is away"
            )
        sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


# The time that a save in flight still gets when the watchdog ends the process.
SUDDEN_END_S = 3.0
# The time that a run that ends with an error waits for its save in flight.
FINAL_WAIT_S = 60.0


class Saver:
    """The saves of one rank. At most one is in flight.

    A save that fails on any rank, e.g. during a short outage of a network disk, never counts. It is reported at once,
    and the next save tries again. Two failures in a row end the run. The last save of a run is retried immediately.
    """

    def __init__(self, trainer: CheckpointedTrainer, folder: Path, asynchronous: bool, busy: str, keep: int) -> None:
        self.trainer, self.folder = trainer, folder
        self.asynchronous, self.busy, self.keep = asynchronous, busy, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # The error of the last save.
        self._failures = 0  # The number of failures in a row.
        self._last = False  # True if the save in flight is the run's last one.
        self._staging: dict[tuple[int, int], Tensor] = {}
        self._registered = contextlib.ExitStack()
        # Set while no copy to host memory is in flight. The saving thread reads the weights and optimizer states while
        # the main thread computes gradients. The update changes them, so it waits here until the copy is done.
        self._staged = threading.Event()
        self._staged.set()
        trainer.before_update = self._wait_for_copy
        self.saved_step: int | None = None
        self.complete_step: int | None = None  # The step of the newest save that this rank has finished.
        self.companions: Path | None = None  # A folder of files that are copied into every checkpoint.
        # The time that training waited for the last save, and the time that this save took.
        self.blocked_s = self.took_s = 0.0

    def __enter__(self) -> Saver:
        self._registered.enter_context(before_sudden_end(self._finish_soon))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save in flight if this rank ends with a local error. The save can still become complete, because
        the writers of all ranks live until this rank ends."""
        if self._thread is not None and isinstance(error, Exception) and not isinstance(error, CommError):
            end = time.monotonic() + FINAL_WAIT_S
            self._thread.join(FINAL_WAIT_S)
            if self._error is None and self.saved_step is not None:
                with contextlib.suppress(UserError):
                    wait_for([self.folder / fmt.folder_name(self.saved_step)], end - time.monotonic())
        self._registered.close()

    def _finish_soon(self) -> None:
        """Give a save in flight a few seconds: a part that is nearly written may complete the checkpoint."""
        thread = self._thread
        if thread is not None:
            thread.join(SUDDEN_END_S)

    def save(self, last: bool = False) -> bool:
        """Begin to save the present state. Return False if it is skipped because the previous save is still in flight.
        The `last` state of a run is never skipped."""
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
        # The side stream is created here, not in the thread, so that it waits for the update that was just launched.
        copies = SideStream(trainer.ctx.device)
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, index, copies), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _any(self, here: bool) -> bool:
        """Return True if `here` is true on any rank."""
        ctx = self.trainer.ctx
        with ctx.ledger.phase("checkpoint"):
            return bool(ctx.mesh.world.max_over_ranks(float(here), ctx.device.torch))

    def _write(self, snapshot: Snapshot, index: Index, copies: SideStream) -> None:
        """Copy, write and commit one save. Runs in the saving thread, so errors are stored and not raised."""
        aside = self.folder / fmt.saving_name(index.step)
        rank = self.trainer.ctx.rank
        begun = time.monotonic()
        try:
            with copies:
                self._stage(snapshot)
            snapshot.release_sources()
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
                self._error = refusal(what, error, where, "another checkpoint.dir")
            if self._failures == 1:
                # Only errors of the environment, such as a full disk, may be gone at the next attempt.
                can_retry = isinstance(self._error, UserError)
                if self._last:
                    then = "it is tried once more now" if can_retry else "the run ends"
                else:
                    then = "it is tried once more with the next one" if can_retry else "the run ends at the next one"
                print(f"meshwright: warning: {self._error!s}; {then}", file=sys.stderr, flush=True)
        else:
            self._failures = 0
            self.took_s = time.monotonic() - begun
            self.complete_step = index.step
        finally:
            self._staged.set()

    def _stage(self, snapshot: Snapshot) -> None:
        """Copy the state to host memory. Raise a UserError with advice if there is not enough memory."""
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

    def _wait_for_writers(self) -> bool:
        """Wait until no rank is writing, and return whether all of them succeeded. Every rank must call this.

        Ranks finish at different times, on a slow disk by more than `comm.timeout`, so no rank may wait for another's
        disk inside of one collective. Instead they all-reduce repeatedly while their threads write, down to once a
        second. This also spares the disk, as only the rank that commits looks for files. If a rank's disk hangs for
        good, the rank misses the next collective and the watchdog names it.
        """
        pause = POLL_S
        end = time.monotonic() + 2 * PART_WAIT_S
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
        """Wait until all ranks have written the save in flight and it is committed. Every rank must call this."""
        if self._thread is not None:
            self._wait_for_writers()
        if self._error is not None and (self._failures > 1 or not isinstance(self._error, UserError)):
            raise self._error

    def wait_for_commit(self) -> None:
        """Wait until the run's last save is complete, and retry it once if it failed. Every rank must call this at the
        end of the run. No rank returns before all agree."""
        if self._wait_for_writers():
            return
        if self.trainer.writes:
            fmt.remove_unfinished(self.folder)
        self._any(False)  # A barrier: no rank saves again before the folder is removed.
        self._begin()
        if not self._wait_for_writers():
            raise self._error or SystemExit(2)
