"""Where optimizer states and owned weights are stored between updates: on the device, in host memory, or in files.

States that are stored elsewhere are brought to the device in pieces, and so are those in another precision than updates
are computed in, where no kernel takes them as they are: while one piece is updated, the next is copied in and the one
before is copied back. Only these few pieces need memory on the device.

Files are scratch space: a checkpoint holds what was in them, and never refers to them.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.device import accelerator, pin
from meshwright.errors import UserError
from meshwright.spec.traffic.placement import PAGE, RING


def page_aligned(count: int, dtype: torch.dtype) -> int:
    """Returns the smallest number of elements, at least `count`, that fills whole pages."""
    each = PAGE // dtype.itemsize
    return -(-count // each) * each


def page_tensor(count: int, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in host memory that begins at a page, as direct file access needs it."""
    block = mmap.mmap(-1, max(PAGE, page_aligned(count, dtype) * dtype.itemsize))
    return torch.frombuffer(block, dtype=dtype)[:count]


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


class StateFile:
    """One flat state in a file, cut into shares that begin at pages. `shares` are views of the mapped file, for readers
    that want all of it (checkpoints); updates read and write the file directly. The file is unlinked as soon as it is
    open: no other run can mistake it for its own, and its disk space is free again however the process ends."""

    def __init__(self, folder: Path, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.starts = [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + page_aligned(size, dtype))
        self.bytes = max(PAGE, self.starts[-1] * dtype.itemsize)
        self._handle, mapped = self._create()
        whole = torch.frombuffer(mapped, dtype=dtype)
        self.shares = [whole[start : start + size] for start, size in zip(self.starts, sizes, strict=False)]
        weakref.finalize(self, os.close, self._handle)

    def _create(self) -> tuple[int, mmap.mmap]:
        """Creates a file of zeros in full size. Its space is reserved, so a disk that is too small is found now."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            plain, name = tempfile.mkstemp(dir=self.folder, prefix="states-")
            try:
                os.posix_fallocate(plain, 0, self.bytes)
                mapped = mmap.mmap(plain, self.bytes)
                try:
                    # Direct, since states pass once per step and would push other pages out of the cache.
                    direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
                except OSError as error:
                    if error.errno != errno.EINVAL:  # this file system has no direct access
                        raise
                    direct = os.open(name, os.O_RDWR)
            finally:
                os.close(plain)
                os.unlink(name)
        except OSError as error:
            need = f"{self.bytes / 2**30:.1f} GiB"
            raise UserError(
                f"states can't be offloaded to {self.folder} ({error.strerror}; {need} are needed there): "
                "name a folder with enough room in zero.offload.path"
            ) from None
        return direct, mapped

    def read(self, share: int, low: int, into: Tensor) -> None:
        """Reads the elements from `low` of a share on; `low` must be at a page."""
        data = _bytes(into)
        got = self._transfer(os.preadv, data, (self.starts[share] + low) * self.dtype.itemsize)
        if got < len(data):
            raise UserError(f"a file in {self.folder} was cut off while training: start again from the last checkpoint")

    def write(self, share: int, low: int, values: Tensor) -> None:
        """Writes the elements from `low` of a share on; `low` must be at a page."""
        self._transfer(os.pwritev, _bytes(values), (self.starts[share] + low) * self.dtype.itemsize)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], data: memoryview, at: int) -> int:
        """Repeats a call that may move fewer bytes than asked. Returns the number moved."""
        done = 0
        while done < len(data):
            try:
                count = call(self._handle, [data[done:]], at + done)
            except OSError as error:
                raise UserError(
                    f"the disk failed under {self.folder} ({error.strerror}): start again from the last checkpoint"
                ) from None
            if count <= 0:
                break
            done += count
        return done


class StateStore:
    """One kind of state of one buffer: a tensor of `dtype` for each share. `place` is none (the device), cpu or disk.
    `on_device` says whether it takes the device's memory: host memory does where the device is a CPU."""

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, place: str, folder: Path = Path()
    ) -> None:
        self.file: StateFile | None = None
        self.dtype, self.on_device = dtype, place == "none" or (place, device.type) == ("cpu", "cpu")
        if place == "disk" and device.type != "meta":
            self.file = StateFile(folder, sizes, dtype)
            self.shares = self.file.shares
        elif place == "none" or accelerator(device) is None:
            self.shares = list(torch.zeros(sum(sizes), dtype=dtype, device=device).split(list(sizes)))
        else:
            flat = page_tensor(sum(sizes), dtype)
            pin(flat, device)  # the device copies to and from pinned memory alone without the host's help
            self.shares = list(flat.split(list(sizes)))

    @classmethod
    def existing(cls, shares: list[Tensor]) -> StateStore:
        """A store of tensors that are on the device already."""
        store = cls.__new__(cls)
        store.file, store.shares, store.dtype, store.on_device = None, shares, shares[0].dtype, True
        return store

    def ready_in_place(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether updates can use the tensors where and as they are stored."""
        return self.on_device and self.dtype == dtype and self.shares[0].device.type == device.type


class StatePiece(NamedTuple):
    """Elements low to high of a share, which are copied and updated at a time."""

    share: int
    low: int
    high: int
    last: bool  # of its share


def cut_pieces(sizes: Sequence[int], order: Sequence[int], limit: int) -> list[StatePiece]:
    """Cuts shares, in this order, into pieces of `limit` elements, which must fill whole pages in any precision."""
    assert limit % PAGE == 0
    return [
        StatePiece(share, low, min(low + limit, sizes[share]), low + limit >= sizes[share])
        for share in order
        for low in range(0, sizes[share], limit)
    ]


class Prefetcher:
    """Copies the pieces of several stores to the device, in `dtype`, one ahead of their update, and back after it.

    Each store that is not ready in place has a ring of three pieces: one being copied in, one being updated, one being
    copied back. Files are read and written by two threads (the calls release Python's lock); host memory is copied on
    two streams of the device, one in each direction, which the bus carries at the same time.
    """

    def __init__(self, stores: Sequence[StateStore], device: torch.device, dtype: torch.dtype, limit: int) -> None:
        self.stores, self.device, self.dtype = stores, device, dtype
        self._limit = limit
        self._rings = [
            [] if store.ready_in_place(device, dtype) else [self._buffers(store) for _ in range(RING)]
            for store in stores
        ]
        self._threads = ThreadPoolExecutor(2, "states") if any(store.file for store in stores) else None
        self._module = accelerator(device)
        self._streams = [self._module.Stream(device) for _ in range(2)] if self._module else []
        self._writes: deque[list[Future[None]]] = deque()
        self._copied_back: dict[int, Any] = {}  # by place in the ring, the event after which it may be filled again

    def _buffers(self, store: StateStore) -> tuple[Tensor | None, Tensor]:
        """Returns the buffer that a piece is read into as the file has it, and the one that it is updated in; they are
        the same where the update can use the file's format on the host."""
        landing = None
        if store.file is not None:
            landing = page_tensor(self._limit, store.dtype)
            if self.device.type == "cpu" and store.dtype == self.dtype:
                return landing, landing
        return landing, torch.empty(self._limit, dtype=self.dtype, device=self.device)

    def run(self, order: Sequence[StatePiece]) -> Iterator[tuple[StatePiece, list[Tensor]]]:
        """Yields each piece with one tensor per store, to be updated in place before the next is asked for."""
        places = range(len(self.stores))
        fetches = ([self._fetch(at, piece, number) for at in places] for number, piece in enumerate(order))
        coming = next(fetches, [])
        for number, piece in enumerate(order):
            now, coming = coming, next(fetches, [])
            yield piece, [wait() for wait in now]
            self._copy_back(piece, number)
            self._finish_writes(left=1)  # a buffer that is being written from is read into again two pieces later
        self._finish_writes(left=0)
        for stream in self._streams:
            stream.synchronize()

    def _finish_writes(self, left: int) -> None:
        while len(self._writes) > left:
            for write in self._writes.popleft():
                write.result()

    def _fetch(self, at: int, piece: StatePiece, number: int) -> Callable[[], Tensor]:
        """Begins to copy a piece of a store; calling what it returns waits for it and gives its tensor."""
        store, size = self.stores[at], piece.high - piece.low
        stored = store.shares[piece.share][piece.low : piece.high]
        if not self._rings[at]:
            return lambda: stored
        landing, working = self._rings[at][number % RING]
        if store.file is not None:
            assert landing is not None and self._threads is not None
            into = landing[: page_aligned(size, store.dtype)]
            read = self._threads.submit(store.file.read, piece.share, piece.low, into)

            def after_read() -> Tensor:
                read.result()
                return working[:size] if landing is working else working[:size].copy_(landing[:size])

            return after_read
        if not self._streams:
            return lambda: working[:size].copy_(stored)
        stream = self._streams[0]
        if number % RING in self._copied_back:
            stream.wait_event(self._copied_back[number % RING])
        with self._module.stream(stream):
            working[:size].copy_(stored, non_blocking=True)
            copied_in = stream.record_event()

        def after_copy() -> Tensor:
            # The host does not wait: the update, on the current stream, is ordered after the copy.
            self._module.current_stream(self.device).wait_event(copied_in)
            return working[:size]

        return after_copy

    def _copy_back(self, piece: StatePiece, number: int) -> None:
        writes: list[Future[None]] = []
        size = piece.high - piece.low
        updated = self._module.current_stream(self.device).record_event() if self._streams else None
        for store, ring in zip(self.stores, self._rings, strict=True):
            if not ring:
                continue
            landing, working = ring[number % RING]
            stored = store.shares[piece.share][piece.low : piece.high]
            if store.file is not None:
                assert landing is not None and self._threads is not None
                if landing is not working:
                    landing[:size].copy_(working[:size])
                values = landing[: page_aligned(size, store.dtype)]
                writes.append(self._threads.submit(store.file.write, piece.share, piece.low, values))
            elif updated is None:
                stored.copy_(working[:size])
            else:
                with self._module.stream(self._streams[1]):
                    self._streams[1].wait_event(updated)
                    stored.copy_(working[:size], non_blocking=True)
        if self._streams:
            self._copied_back[number % RING] = self._streams[1].record_event()
        self._writes.append(writes)
