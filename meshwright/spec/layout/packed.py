"""Records of frozen weights that are stored in 4 bits: the position of a rank's bytes in the global tensor. No torch.

A row of a weight [rows, in] becomes in / 2 bytes of codes, two codes per byte, followed by the scales of its blocks of
BLOCK values, two bytes each. Blocks run along a row, so any cut between blocks, by rows or by inputs, leaves the same
blocks with the same bytes. Each rank can therefore pack its shard alone, and all layouts compute with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.errors import UserError
from meshwright.spec.layout.params import Box, ParamRecord

BLOCK = 64  # values that share a scale
# Bytes of a scale. A scale is the largest magnitude of its block, which bfloat16 holds exactly for bfloat16 weights.
SCALE = 2


def row_bytes(width: int) -> int:
    """Return the number of bytes of a packed row of `width` values."""
    return width // 2 + width // BLOCK * SCALE


def packed_record(weight: ParamRecord) -> ParamRecord:
    """Return the record of a matrix's packed bytes. Its `packs` is the record of the values."""
    (rows, width), (local_rows, local_width) = weight.shape, weight.local_shape
    sides = [side for box in weight.boxes for side in (box.start[1], box.shape[1])]
    if any(side % BLOCK for side in sides):
        raise UserError(
            f"tune.quantise=nf4 stores rows in blocks of {BLOCK} values, and a rank holds {local_width} of the {width} "
            f"inputs of {weight.name}: set tune.quantise=none{', or use a smaller layout.tp' * (local_width < width)}"
        )
    boxes = tuple(part for box in weight.boxes for part in _parts(box, width, local_width))
    return replace(
        weight, shape=(rows, row_bytes(width)), local_shape=(local_rows, row_bytes(local_width)), boxes=boxes,
        packs=weight,
    )  # fmt: skip


def _parts(box: Box, width: int, local_width: int) -> Iterator[Box]:
    """Yield two boxes of bytes for a box of values: its codes and its scales."""
    (row, column), (rows, columns), (local_row, local_column) = box.start, box.shape, box.local_start
    yield Box((row, column // 2), (rows, columns // 2), (local_row, local_column // 2))
    # The scales of a row follow all of its codes.
    start = width // 2 + column // BLOCK * SCALE
    local_start = local_width // 2 + local_column // BLOCK * SCALE
    yield Box((row, start), (rows, columns // BLOCK * SCALE), (local_row, local_start))
