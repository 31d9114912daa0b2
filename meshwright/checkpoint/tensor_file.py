"""Stream safetensors files: write them straight from the tensors' memory, read them as views of the mapped file.

The safetensors library can read these files. Its writer converts every tensor to a byte string first, and its reader
copies. A checkpoint may fill most of a machine's memory, so this module avoids both copies.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.engine.sharding.remainders import Values
from meshwright.record.checkpoint_format import SAFETENSORS_DTYPES
from meshwright.record.verify import read_header

TORCH_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, (name, _) in SAFETENSORS_DTYPES.items()}
DTYPE_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}
PIECES_AHEAD = 4  # The number of tensors that may be written before their checksums are known.


def raw(values: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, without a copy."""
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def checksum(values: Tensor) -> int:
    return zlib.crc32(raw(values.contiguous()))


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, values: Values) -> TensorEntry:
        return cls(name, DTYPE_CODES[values.dtype], tuple(values.shape))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


def write_tensors(
    path: Path, entries: Sequence[TensorEntry], pieces: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> list[int]:
    """Write a file of `entries` and flush it to disk. `pieces` yields their bytes in order, split in any way.

    Return the CRC-32 of each piece. A second thread computes it while the file is written. Only a few pieces are in
    memory at once.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad the header so that the data is aligned to eight bytes.
    text += b" " * (-len(text) % 8)
    whole = 8 + len(text) + at
    sums: list[int] = []
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as executor:
        at = _write_out(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), 0)
        pending: deque[Future[int]] = deque()
        for piece in pieces:
            values = piece.contiguous()
            pending.append(executor.submit(checksum, values))
            at = _write_out(file.fileno(), raw(values), at)
            if len(pending) > PIECES_AHEAD:
                sums.append(pending.popleft().result())
        os.fsync(file.fileno())
        sums += [future.result() for future in pending]
    assert at == whole, f"{path}: {at} bytes written of {whole}"
    return sums


def _write_out(handle: int, data: memoryview, at: int) -> int:
    """Write data and return the position after it. The advice makes the system flush it now, instead of everything at
    the end."""
    left = data
    while len(left):
        left = left[os.write(handle, left) :]
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, at, len(data), os.POSIX_FADV_DONTNEED)
    return at + len(data)


class TensorFile:
    """One mapped file. The methods raise ValueError if it is not a complete safetensors file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.header, self._begin = read_header(file)
        # numpy can't map an empty range. `mode="c"` is copy-on-write: torch warns about read-only memory.
        empty = path.stat().st_size == self._begin
        self._data = np.empty(0, np.uint8) if empty else np.memmap(path, dtype=np.uint8, mode="c")

    def get(self, key: str) -> Tensor:
        """Return a tensor as a view of the mapped file."""
        try:
            entry = self.header[key]
            dtype, shape, (start, stop) = TORCH_DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except KeyError:
            raise ValueError(f"it has no tensor '{key}' of a known kind") from None
        wanted = math.prod(shape) * dtype.itemsize
        if stop - start != wanted or self._begin + stop > len(self._data):
            raise ValueError(f"tensor '{key}' lies outside of it")
        data = self._data[self._begin + start : self._begin + stop]
        # A view as a wider dtype must be aligned.
        if (self._begin + start) % dtype.itemsize:
            data = data.copy()
        return torch.from_numpy(data).view(dtype).reshape(shape)
