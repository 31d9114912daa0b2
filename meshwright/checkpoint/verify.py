"""Checks every checksum of a checkpoint from the bytes of its files alone: no torch, no numpy, any dtype."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.checkpoint.format import DamagedCheckpoint, Index, SavedBlock

# By the name in safetensors: the name in torch, and the bytes of an element.
SAFETENSORS_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip
ELEMENT_BYTES = dict(SAFETENSORS_DTYPES.values())
READ_BYTES = 4 * 2**20


def element_bytes(dtype: str) -> int:
    return ELEMENT_BYTES.get(dtype, 0)


def verify_checkpoint(folder: Path, index: Index, advance: Callable[[int], None] = lambda count: None) -> int:
    """Reads every block, compares its checksum with the index and returns the number of bytes. `advance` is called with
    the size of each piece that was read.

    Raises DamagedCheckpoint, which names the first file that is not as it was written.
    """
    by_file: dict[str, list[SavedBlock]] = {name: [] for name in index.files}
    left = {name: math.prod(tensor["shape"]) for name, tensor in index.tensors.items()}
    for block in index.blocks:
        by_file[block.file].append(block)
        left[block.tensor] = left.get(block.tensor, 0) - math.prod(block.shape)
    for name, count in left.items():
        if count:
            raise DamagedCheckpoint(f"{folder} lacks a part of {name}: use another checkpoint")
    total = 0
    for name, blocks in by_file.items():
        path = folder / name
        try:
            with path.open("rb") as file:
                head = _header(file)
                for block in blocks:
                    total += _check(file, head, block, index.tensors[block.tensor]["dtype"], path, advance)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, DamagedCheckpoint):
                raise
            raise DamagedCheckpoint(f"{path} can't be read ({error}): use another checkpoint") from None
    return total


def _header(file: BinaryIO) -> dict[str, Any]:
    """Returns a safetensors header, with `data`: the position where the tensors' bytes begin."""
    size = int.from_bytes(file.read(8), "little")
    if size > 100 * 2**20:
        raise ValueError("its header is too large")
    head: dict[str, Any] = json.loads(file.read(size))
    return head | {"data": 8 + size}


def _check(
    file: BinaryIO, head: dict[str, Any], block: SavedBlock, dtype: str, path: Path, advance: Callable[[int], None]
) -> int:
    entry = head[block.key]
    (begin, end), (name, size) = entry["data_offsets"], SAFETENSORS_DTYPES[entry["dtype"]]
    length = math.prod(block.shape) * size
    right = name == dtype and tuple(entry["shape"]) == block.shape and end - begin == length
    crc, left = 0, length if right else 0
    file.seek(head["data"] + begin)
    while left:
        data = file.read(min(left, READ_BYTES))
        if not data:
            break
        crc, left = zlib.crc32(data, crc), left - len(data)
        advance(len(data))
    if not right or left or crc != block.crc32:
        raise DamagedCheckpoint(f"{path} is damaged in {block.tensor} (wrong checksum): use another checkpoint")
    return length
