"""Verify every checksum of a checkpoint from the bytes of its files: no torch, no numpy, any dtype."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, cast

from meshwright.outside import of_kind, parse_json
from meshwright.record.checkpoint_format import SAFETENSORS_DTYPES, DamagedCheckpoint, Index, SavedBlock


class TensorHeader(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str  # its name in safetensors
    shape: list[int]
    data_offsets: tuple[int, int]  # [begin, end), counted from the end of the header


READ_BYTES = 4 * 2**20
LONGEST_HEADER = 1 << 30


def verify_checkpoint(folder: Path, index: Index, advance: Callable[[int], None] = lambda count: None) -> int:
    """Read every block, compare its checksum with the index, and return the total number of bytes.

    `advance` is called with the number of bytes of each read. Raise DamagedCheckpoint, which names the file, for the
    first block that is not as it was written.
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
    """Verify the blocks in one file, and return their number of bytes."""
    total = 0
    with path.open("rb") as file:
        head, data = read_header(file)
        for block in blocks:
            entry = head[block.key]
            dtype = index.tensors[block.tensor]["dtype"]
            (begin, end), (name, size) = entry["data_offsets"], SAFETENSORS_DTYPES[entry["dtype"]]
            length = math.prod(block.shape) * size
            is_described = name == dtype and tuple(entry["shape"]) == block.shape and end - begin == length
            crc = 0
            left = length if is_described else 0
            file.seek(data + begin)
            while left and (content := file.read(min(left, READ_BYTES))):
                crc = zlib.crc32(content, crc)
                left = left - len(content)
                advance(len(content))
            if not is_described or left or crc != block.crc32:
                raise DamagedCheckpoint(f"{path} is damaged in {block.tensor} (wrong checksum): use another checkpoint")
            total += length
    return total


def read_header(file: BinaryIO) -> tuple[dict[str, TensorHeader], int]:
    """Return a safetensors file's header, and the position where the tensors' bytes begin.

    Raise ValueError for a file without a valid header.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    # The length is checked before it is used, since a damaged file may ask for any amount of memory.
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        raise ValueError("its header is cut off")
    head = of_kind(parse_json(file.read(length)), dict[str, Any], "its header")
    head.pop("__metadata__", None)
    return cast(dict[str, TensorHeader], of_kind(head, dict[str, TensorHeader], "its header")), 8 + length
