"""The storage of optimizer states and owned weights between updates: on the device, in host memory, or in files.

Offloaded states are copied to the device in chunks. The same applies to states in another precision than that of
updates if no kernel takes them as they are. While one chunk is updated, the next one is copied in and the previous one
is copied back. Only these few chunks need memory on the device.

Files are scratch space: a checkpoint holds their contents and never refers to them.
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

from meshwright.config.memory import Place
from meshwright.device import accelerator, is_host, is_meta, pin
from meshwright.errors import UserError
from meshwright.spec.traffic.placement import PAGE, RING


def page_aligned(count: int, dtype: torch.dtype) -> int:
    """Return the smallest number of elements, at least `count`, that fills whole pages."""
    per_page = PAGE // dtype.itemsize
    return -(-count // per_page) * per_page


def page_tensor(count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor in host memory that begins at a page boundary, which direct file access requires."""
    block = mmap.mmap(-1, max(PAGE, page_aligned(count, dtype) * dtype.itemsize))
    return torch.frombuffer(block, dtype=dtype)[:count]


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


class StateFile:
    """One flat state in a file, divided into shards that begin at page boundaries.

    `shares` are views of the mapped file for readers of the whole state (checkpoints). Updates read and write the file
    directly. The file is unlinked as soon as it is open: no other run can take it for its own file, and its disk space
    is freed however the process ends.
    """

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
        """Create a file of zeros in its full size. Its space is reserved, so that a full disk is detected now."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            plain, name = tempfile.mkstemp(dir=self.folder, prefix="states-")
            try:
                os.posix_fallocate(plain, 0, self.bytes)
                mapped = mmap.mmap(plain, self.bytes)
                try:
                    # Direct access, because states are read once per step and would evict other pages from the cache.
                    direct = os.open(name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
                except OSError as error:
                    # EINVAL: this file system has no direct access.
                    if error.errno != errno.EINVAL:
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
        """Read the elements of a shard from `low` on. `low` must be at a page boundary."""
        data = _bytes(into)
        count = self._transfer(os.preadv, data, (self.starts[share] + low) * self.dtype.itemsize)
        if count < len(data):
            raise UserError(f"a file in {self.folder} was cut off while training: start again from the last checkpoint")

    def write(self, share: int, low: int, values: Tensor) -> None:
        """Write the elements of a shard from `low` on. `low` must be at a page boundary."""
        self._transfer(os.pwritev, _bytes(values), (self.starts[share] + low) * self.dtype.itemsize)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], data: memoryview, at: int) -> int:
        """Repeat a system call that may transfer fewer bytes than requested. Return the number transferred."""
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
    """One kind of state of one buffer: a tensor of `dtype` for each shard.

    `on_device` is true if the state uses the device's memory, which includes host memory if the device is a CPU.
    """

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, place: Place, folder: Path = Path()
    ) -> None:
        self.file: StateFile | None = None
        self.dtype, self.on_device = dtype, place is Place.DEVICE or (place is Place.HOST and is_host(device))
        if place is Place.DISK and not is_meta(device):
            self.file = StateFile(folder, sizes, dtype)
            self.shares = self.file.shares
        elif place is Place.DEVICE or accelerator(device) is None:
            self.shares = list(torch.zeros(sum(sizes), dtype=dtype, device=device).split(list(sizes)))
        else:
            flat = page_tensor(sum(sizes), dtype)
            # Copies are asynchronous only to and from pinned memory.
            pin(flat, device)
            self.shares = list(flat.split(list(sizes)))

    @classmethod
    def existing(cls, shares: list[Tensor]) -> StateStore:
        """Return a store of tensors that are already on the device."""
        store = cls.__new__(cls)
        store.file, store.shares, store.dtype, store.on_device = None, shares, shares[0].dtype, True
        return store

    def ready_in_place(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Return True if updates can use the tensors in the place and dtype in which they are stored."""
        return self.on_device and self.dtype == dtype and self.shares[0].device.type == device.type


class StatePiece(NamedTuple):
    """A chunk of a state: elements low to high of a shard, which are copied and updated together."""

    share: int
    low: int
    high: int
    last: bool  # the last one of its shard


def cut_pieces(sizes: Sequence[int], order: Sequence[int], limit: int) -> list[StatePiece]:
    """Cut shards, in this order, into chunks of `limit` elements, which must fill whole pages in any precision."""
    assert limit % PAGE == 0
    return [
        StatePiece(share, low, min(low + limit, sizes[share]), low + limit >= sizes[share])
        for share in order
        for low in range(0, sizes[share], limit)
    ]


class Prefetcher:
    """Copies the chunks of several stores to the device, in `dtype`, one ahead of their update, and back after it.

    Each store that updates cannot use in place has a ring of three buffers: for the chunk being copied in, the one
    being updated and the one being copied back. Two threads read and write files (the system calls release Python's
    lock). Host memory is copied on two streams of the device, one per direction, since the bus transfers both at once.
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
        self._copied_back: dict[int, Any] = {}  # by ring position, the event after which it can be filled again

    def _buffers(self, store: StateStore) -> tuple[Tensor | None, Tensor]:
        """Return the buffer that a chunk is read into in the file's dtype, and the one in which it is updated.

        They are the same if the update runs on the host in the file's dtype. Without a file, the first is None.
        """
        landing = None
        if store.file is not None:
            landing = page_tensor(self._limit, store.dtype)
            if is_host(self.device) and store.dtype == self.dtype:
                return landing, landing
        return landing, torch.empty(self._limit, dtype=self.dtype, device=self.device)

    def run(self, order: Sequence[StatePiece]) -> Iterator[tuple[StatePiece, list[Tensor]]]:
        """Yield each chunk with one tensor per store. The caller updates these in place before it asks for the next."""
        stores = range(len(self.stores))
        fetches = ([self._fetch(store, piece, number) for store in stores] for number, piece in enumerate(order))
        next_fetches = next(fetches, [])
        for number, piece in enumerate(order):
            current_fetches = next_fetches
            next_fetches = next(fetches, [])
            yield piece, [wait() for wait in current_fetches]
            self._copy_back(piece, number)
            # The buffer of the previous write is the next one to be read into, so only the latest write may be left.
            self._finish_writes(left=1)
        self._finish_writes(left=0)
        for stream in self._streams:
            stream.synchronize()

    def _finish_writes(self, left: int) -> None:
        while len(self._writes) > left:
            for write in self._writes.popleft():
                write.result()

    def _fetch(self, at: int, piece: StatePiece, number: int) -> Callable[[], Tensor]:
        """Begin to copy a chunk of a store. Return a function that waits for the copy and returns its tensor."""
        store = self.stores[at]
        size = piece.high - piece.low
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
            # The host does not wait: the update on the current stream is ordered after the copy.
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
                # They differ if the file has another dtype than the update, or the update runs on an accelerator.
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
