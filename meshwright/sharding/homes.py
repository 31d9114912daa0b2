"""Where optimizer states live when they are not being updated: on the device, in host memory, or in files.

States that are elsewhere, or kept in another precision than updates are computed in, are brought in pieces: while one
piece is updated, the next is on its way in and the one before on its way back. Only these few pieces are held.

Files are plain and of no use to another run: a checkpoint holds what was in them, and never refers to them.
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
from meshwright.sharding.placement import PAGE, RING


def aligned(count: int, dtype: torch.dtype) -> int:
    """Elements that fill whole pages."""
    each = PAGE // dtype.itemsize
    return -(-count // each) * each


def page_tensor(count: int, dtype: torch.dtype) -> Tensor:
    """Memory that begins at a page."""
    block = mmap.mmap(-1, max(PAGE, aligned(count, dtype) * dtype.itemsize))
    return torch.frombuffer(block, dtype=dtype)[:count]


class StateFile:
    """One flat state in a file, cut into shares that begin at pages. `shares` are views of the mapped file, for whoever
    wants to see all of it; updates read and write the file directly.

    The file has no name once it is open: nobody else can take it for theirs, and however the process ends, its room on
    the disk is free again.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.starts = [0]
        for size in sizes:
            self.starts.append(self.starts[-1] + aligned(size, dtype))
        self.bytes = max(PAGE, self.starts[-1] * dtype.itemsize)
        self._handle, mapped = self._create()
        whole = torch.frombuffer(mapped, dtype=dtype)
        self.shares = [whole[start : start + size] for start, size in zip(self.starts, sizes, strict=False)]
        weakref.finalize(self, os.close, self._handle)

    def _create(self) -> tuple[int, mmap.mmap]:
        """A file of full size, all zero: if the disk is too small, it is known now."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            plain, name = tempfile.mkstemp(dir=self.folder, prefix="states-")
            try:
                os.posix_fallocate(plain, 0, self.bytes)
                mapped = mmap.mmap(plain, self.bytes)
                try:
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
        """Elements from `low` of a share; `low` is at a page."""
        data = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        at = (self.starts[share] + low) * self.dtype.itemsize
        got = self._whole(os.preadv, data, at)
        if got < len(data):
            raise UserError(f"a file in {self.folder} was cut off while training: start again from the last checkpoint")

    def write(self, share: int, low: int, values: Tensor) -> None:
        data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        self._whole(os.pwritev, data, (self.starts[share] + low) * self.dtype.itemsize)

    def _whole(self, call: object, data: memoryview, at: int) -> int:
        done = 0
        while done < len(data):
            try:
                count = call(self._handle, [data[done:]], at + done)  # type: ignore[operator]
            except OSError as error:
                raise UserError(
                    f"the disk failed under {self.folder} ({error.strerror}): start again from the last checkpoint"
                ) from None
            if count <= 0:
                break
            done += count
        return done


class Kept:
    """One kind of state of one buffer: a tensor of `dtype` for each share. `place` is none (the device), cpu or disk; a
    CPU's own memory is cpu already, and tensors without memory (`meta`) lie nowhere. `here`: it lives on the device."""

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, place: str, folder: Path | None = None
    ) -> None:
        self.file: StateFile | None = None
        self.dtype, self.here = dtype, place == "none" or (place, device.type) == ("cpu", "cpu")
        if place == "disk" and device.type != "meta":
            assert folder is not None
            self.file = StateFile(folder, sizes, dtype)
            self.shares = self.file.shares
        else:
            home = device if place == "none" or accelerator(device) is None else torch.device("cpu")
            if home.type == device.type:
                flat = torch.zeros(sum(sizes), dtype=dtype, device=home)
            else:  # pinned, in pages of its own
                flat = page_tensor(sum(sizes), dtype)
                pin(flat, device)
            self.shares = list(flat.split(list(sizes)))

    @classmethod
    def of(cls, shares: list[Tensor]) -> Kept:
        """What is there already."""
        kept = cls.__new__(cls)
        kept.file, kept.shares, kept.dtype, kept.here = None, shares, shares[0].dtype, True
        return kept

    def is_at_hand(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.here and self.dtype == dtype and self.shares[0].device.type == device.type


class Piece(NamedTuple):
    share: int
    low: int
    high: int
    last: bool  # of its share


def pieces(sizes: Sequence[int], order: Sequence[int], most: int) -> list[Piece]:
    """Shares, in this order, cut into pieces of `most` elements, a multiple of a page's in any precision."""
    assert most % PAGE == 0
    return [
        Piece(share, low, min(low + most, sizes[share]), low + most >= sizes[share])
        for share in order
        for low in range(0, sizes[share], most)
    ]


class Pieces:
    """Brings the pieces of several kinds of state to the device, in `dtype`, and takes them back."""

    def __init__(self, kinds: Sequence[Kept], device: torch.device, dtype: torch.dtype, most: int) -> None:
        self.kinds, self.device, self.dtype = kinds, device, dtype
        self._most = most
        self._rings = [
            [] if kind.is_at_hand(device, dtype) else [self._pair(kind) for _ in range(RING)] for kind in kinds
        ]
        self._files = ThreadPoolExecutor(2, "states") if any(kind.file for kind in kinds) else None
        self._module = accelerator(device)
        self._streams = [self._module.Stream(device) for _ in range(2)] if self._module else []
        self._writes: deque[list[Future[None]]] = deque()
        self._free: dict[int, Any] = {}

    def _pair(self, kind: Kept) -> tuple[Tensor | None, Tensor]:
        """Where a piece lands as a file has it, and where it is updated; often the same."""
        landing = None
        if kind.file is not None:
            landing = page_tensor(self._most, kind.dtype)
            if self.device.type == "cpu" and kind.dtype == self.dtype:
                return landing, landing
        return landing, torch.empty(self._most, dtype=self.dtype, device=self.device)

    def run(self, order: Sequence[Piece]) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Each piece with one tensor for each kind, to be updated in place before the next is asked for."""
        coming = self._fetch(order[0], 0) if order else []
        for number, piece in enumerate(order):
            now = coming
            if number + 1 < len(order):
                coming = self._fetch(order[number + 1], number + 1)
            yield piece, [arrive() for arrive in now]
            self._return(piece, number)
            while len(self._writes) > 1:  # what was written from is read into again two pieces on
                self._wait()
        while self._writes:
            self._wait()
        for stream in self._streams:
            stream.synchronize()

    def _wait(self) -> None:
        for write in self._writes.popleft():
            write.result()

    def _fetch(self, piece: Piece, number: int) -> list[Callable[[], Tensor]]:
        """Begins to bring a piece; calling what it returns waits for it."""
        return [self._fetch_kind(k, piece, number) for k in range(len(self.kinds))]

    def _fetch_kind(self, k: int, piece: Piece, number: int) -> Callable[[], Tensor]:
        kind, size = self.kinds[k], piece.high - piece.low
        home = kind.shares[piece.share][piece.low : piece.high]
        if not self._rings[k]:
            return lambda: home
        landing, working = self._rings[k][number % RING]
        if kind.file is not None:
            assert landing is not None and self._files is not None
            read = self._files.submit(kind.file.read, piece.share, piece.low, landing[: aligned(size, kind.dtype)])

            def landed() -> Tensor:
                read.result()
                return working[:size] if landing is working else working[:size].copy_(landing[:size])

            return landed
        if not self._streams:
            return lambda: working[:size].copy_(home)
        stream = self._streams[0]
        if number % RING in self._free:
            stream.wait_event(self._free[number % RING])
        with self._module.stream(stream):
            working[:size].copy_(home, non_blocking=True)
            came = stream.record_event()

        def arrived() -> Tensor:
            self._module.current_stream(self.device).wait_event(came)
            return working[:size]

        return arrived

    def _return(self, piece: Piece, number: int) -> None:
        writes: list[Future[None]] = []
        size = piece.high - piece.low
        done = self._module.current_stream(self.device).record_event() if self._streams else None
        for kind, ring in zip(self.kinds, self._rings, strict=True):
            if not ring:
                continue
            landing, working = ring[number % RING]
            home = kind.shares[piece.share][piece.low : piece.high]
            if kind.file is not None:
                assert landing is not None and self._files is not None
                if landing is not working:
                    landing[:size].copy_(working[:size])
                values = landing[: aligned(size, kind.dtype)]
                writes.append(self._files.submit(kind.file.write, piece.share, piece.low, values))
            elif done is None:
                home.copy_(working[:size])
            else:
                with self._module.stream(self._streams[1]):
                    self._streams[1].wait_event(done)
                    home.copy_(working[:size], non_blocking=True)
        if self._streams:
            self._free[number % RING] = self._streams[1].record_event()
        self._writes.append(writes)
