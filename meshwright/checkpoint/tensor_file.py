"""Safetensors files, streamed: written straight from the tensors' own memory, read as views of the mapped file.

The format is the safetensors library's, which reads these files like any other. Its own writer turns every tensor into
a byte string first, and its reader copies; a checkpoint is most of a machine's memory, so here neither happens.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER = 1 << 30


def raw(values: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, not copied."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())


def checksum(values: Tensor) -> int:
    return zlib.crc32(raw(values.contiguous()))


def write(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Writes contiguous tensors to disk (flushed); the CRC-32 of each, found in a second thread meanwhile."""
    header: dict[str, object] = {}
    at = 0
    for key, values in tensors:
        size = values.numel() * values.element_size()
        header[key] = {"dtype": NAMES[values.dtype], "shape": list(values.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        sums = [beside.submit(checksum, values) for _, values in tensors]
        at = _write_out(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), 0)
        for _, values in tensors:
            at = _write_out(file.fileno(), raw(values), at)
        os.fsync(file.fileno())
        return [found.result() for found in sums]


def _write_all(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data) :]


def _write_out(handle: int, data: memoryview, at: int) -> int:
    """Writes and has the system begin to put it on the disk at once, rather than all of it at the end."""
    _write_all(handle, data)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, at, len(data), os.POSIX_FADV_DONTNEED)
    return at + len(data)


class TensorFile:
    """One mapped file. Raises ValueError for anything that is not a whole safetensors file."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise ValueError("its header is cut off")
            self.header = json.loads(file.read(length))
        if not isinstance(self.header, dict):
            raise ValueError("its header is no table")
        self._begin = 8 + length
        self._data = np.memmap(path, dtype=np.uint8, mode="c") if size > self._begin else np.empty(0, np.uint8)

    def get(self, key: str) -> Tensor:
        """A view of the mapped file."""
        try:
            entry = self.header[key]
            dtype, shape, (start, stop) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"it has no tensor '{key}' of a known kind") from None
        wanted = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        if start < 0 or stop - start != wanted or self._begin + stop > len(self._data):
            raise ValueError(f"tensor '{key}' lies outside of it")
        data = self._data[self._begin + start : self._begin + stop]
        if (self._begin + start) % dtype.itemsize:  # a view of wider numbers must be aligned
            data = data.copy()
        return torch.from_numpy(data).view(dtype).reshape(shape)
