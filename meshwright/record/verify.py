"""Checks every checksum of a checkpoint from the bytes of its files alone: no torch, no numpy, any dtype."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, cast

from meshwright.outside import of_kind, parse_json
from meshwright.record.checkpoint_format import SAFETENSORS_DTYPES, DamagedCheckpoint, Index, SavedBlock


class Entry(TypedDict):
    """A tensor in the table of a safetensors file: its code, its shape, and its first and last byte."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


READ_BYTES = 4 * 2**20
LONGEST_HEADER = 1 << 30


def verify_checkpoint(folder: Path, index: Index, advance: Callable[[int], None] = lambda count: None) -> int:
    """Reads every block, compares its checksum with the index and returns the number of bytes. `advance` is called with
    the size of each piece that was read.

    Raises DamagedCheckpoint, which names the first file that is not as it was written.
    """
    if lacking := index.incomplete():
        raise DamagedCheckpoint(f"{folder} lacks a part of {lacking[0]}: use another checkpoint")
    by_file: dict[str, list[SavedBlock]] = {name: [] for name in index.files}
    for block in index.blocks:
        by_file[block.file].append(block)
    total = 0
    for name, blocks in by_file.items():
        try:
            total += _verify_file(folder / name, blocks, index, advance)
        except DamagedCheckpoint:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCheckpoint(f"{folder / name} can't be read ({error}): use another checkpoint") from None
    return total


def _verify_file(path: Path, blocks: list[SavedBlock], index: Index, advance: Callable[[int], None]) -> int:
    total = 0
    with path.open("rb") as file:
        head, data = read_header(file)
        for block in blocks:
            entry, dtype = head[block.key], index.tensors[block.tensor]["dtype"]
            (begin, end), (name, size) = entry["data_offsets"], SAFETENSORS_DTYPES[entry["dtype"]]
            length = math.prod(block.shape) * size
            right = name == dtype and tuple(entry["shape"]) == block.shape and end - begin == length
            crc, left = 0, length if right else 0
            file.seek(data + begin)
            while left and (piece := file.read(min(left, READ_BYTES))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
                advance(len(piece))
            if not right or left or crc != block.crc32:
                raise DamagedCheckpoint(f"{path} is damaged in {block.tensor} (wrong checksum): use another checkpoint")
            total += length
    return total


def read_header(file: BinaryIO) -> tuple[dict[str, Entry], int]:
    """Returns a safetensors file's table, and the position where the tensors' bytes begin. Raises ValueError for a file
    that has none."""
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        raise ValueError("its header is cut off")
    head = of_kind(parse_json(file.read(length)), dict[str, Any], "its header")
    head.pop("__metadata__", None)
    return cast(dict[str, Entry], of_kind(head, dict[str, Entry], "its header")), 8 + length
