"""Records of the global shape, placement and initial values of each parameter. No torch.

They are plain data, which initialisation, gradient buffers, the gradient norm, checkpoints and the memory model read.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

DATA_AXES = "dp-cp"  # every dense gradient is a partial sum over these
EP_NODE, EP_ACROSS = "ep.node", "ep.across"  # parts of ep when rows are exchanged inside a node, then between nodes
SHARD, REPLICA = "dp.shard", "dp.replica"  # parts of dp when states are sharded inside a node
TILE = 128  # weights are drawn in tiles of TILE x TILE values (see `tiles`)

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of the global tensor, and its first corner in the local tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Init:
    """The initial values of a parameter.

    The module has set the values of kinds `given` and `placed` itself. For `placed`, the plan of a wrapped model says
    which shard of them a rank holds.
    """

    kind: Literal["normal", "zeros", "ones", "given", "placed"]
    std: float = 0.0
    first: int = 0  # the number of leading rows of the global tensor that use `first_std` instead
    first_std: float = 0.0


@dataclass(frozen=True)
class ParamRecord:
    """The placement of one local parameter in the global model.

    Several local parameters may hold boxes of one global tensor (`name`). Rows of the local tensor that no box covers
    are padding: they stay zero and never enter the loss.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    init: Init
    decay: bool = True
    data_axes: str = DATA_AXES  # axes of the data-parallel reduction
    partial: tuple[str, ...] = ()  # further axes over which this gradient is a partial sum
    copies: tuple[str, ...] = ()  # further axes along which the parameter is replicated
    tied: str = ""  # the group of tied parameters, across stages, that this one belongs to
    trained: bool = True  # false: no gradient, master weights or moments (at run time `requires_grad` decides)
    wide: bool = False  # stored in fp32 (in fp64 runs: fp64) whatever the model's precision
    adapters: tuple[AdapterRecord, ...] = ()  # the trained low-rank changes of a frozen matrix
    # The heights of the matrices, stacked along the rows of the global tensor, that the optimizer updates as wholes.
    matrices: tuple[int, ...] = ()
    update_group: int = 0  # the number, from 1, of its group in `optimizer.groups`; 0: it is in none
    # If this record is of bytes (spec/layout/packed.py): the record of the values that they encode.
    packs: ParamRecord | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def values(self) -> ParamRecord:
        """The record of the values: `packs` if this record is of packed bytes, and otherwise this record itself."""
        return self.packs or self


@dataclass(frozen=True)
class AdapterRecord:
    """A low-rank change of some rows of a linear layer's weight: scale x up x down is added to its local rows from
    `start` to `stop`.

    With `norms`, each row of the sum is then scaled to the norm of the weight's row plus a trained number. A weight
    of experts [experts, rows, in] has one such change per expert: down is [experts, rank, in].
    """

    name: str  # the name of these rows: q, k, v, gate, ...
    start: int
    stop: int
    down: ParamRecord  # [rank, in]
    up: ParamRecord  # [rows, rank]
    norms: ParamRecord | None  # [rows]
    scale: float
    dropout: float  # of down's input

    @property
    def records(self) -> dict[str, ParamRecord]:
        records = {"down": self.down, "up": self.up}
        return records if self.norms is None else records | {"norms": self.norms}


def row_of(record: ParamRecord, row: int, rows: int) -> ParamRecord:
    """Return the record of row `row` of a tensor of `rows` rows, each of the shape of `record`.

    It describes an optimizer or reducer state that differs between replicas of the parameter: each has its row.
    """
    boxes = tuple(Box((row, *b.start), (1, *b.shape), (0, *b.local_start)) for b in record.boxes)
    return replace(record, shape=(rows, *record.shape), local_shape=(1, *record.local_shape), boxes=boxes)


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield rectangles that cover a range of a row-major tensor's elements.

    There are at most 2 * dims - 1 of them: up to two incomplete rows per dim except the last, and one block.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape), (start,) * len(shape))
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:
        # The range begins and ends inside one row.
        yield from _inside_row(shape, first - 1, start - (first - 1) * inner, stop - (first - 1) * inner)
        return
    yield from _inside_row(shape, first - 1, start - (first - 1) * inner, inner)
    if last > first:
        at = (first, *(0 for _ in shape[1:]))
        yield Box(at, (last - first, *shape[1:]), at)
    yield from _inside_row(shape, last, 0, stop - last * inner)


def _inside_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in rectangles(shape[1:], start, stop):
        at = (row, *box.start)
        yield Box(at, (1, *box.shape), at)


def global_boxes(record: ParamRecord, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the global tensor held by a range of the local tensor's elements. Padding is in no box."""
    for block in rectangles(record.local_shape, start, stop):
        for box in record.boxes:
            # `block` is a region of the local tensor, so the box is passed with local and global corners swapped.
            if where := overlap(block.start, block.shape, Box(box.local_start, box.shape, box.start)):
                inside, held = where
                local = tuple(start + part.start for start, part in zip(block.start, inside, strict=True))
                yield Box(tuple(part.start for part in held), tuple(part.stop - part.start for part in held), local)


def overlap(a_start: tuple[int, ...], a_shape: tuple[int, ...], b: Box) -> tuple[Slices, Slices] | None:
    """Return the overlap of the region (a_start, a_shape) of a global tensor with box `b`.

    The overlap is given as slices within the region and slices within b's local tensor. Returns None if there is none.
    """
    inside, local = [], []
    for a, n, g, m, at in zip(a_start, a_shape, b.start, b.shape, b.local_start, strict=True):
        low, high = max(a, g), min(a + n, g + m)
        if low >= high:
            return None
        inside.append(slice(low - a, high - a))
        local.append(slice(at + low - g, at + high - g))
    return tuple(inside), tuple(local)


def slices_of(start: tuple[int, ...], shape: tuple[int, ...]) -> Slices:
    """Return the slices that select the rectangle of this shape that begins at `start`."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def whole(name: str, shape: tuple[int, ...], init: Init, **more: object) -> ParamRecord:
    """Return the record of a parameter that every tp rank holds completely."""
    box = Box((0,) * len(shape), shape, (0,) * len(shape))
    return ParamRecord(name, shape, shape, (box,), init, **more)  # type: ignore[arg-type]


def rows_of(
    name: str,
    parts: tuple[tuple[int, int, int], ...],
    total_rows: int,
    tail: tuple[int, ...],
    init: Init,
    local_rows: int = 0,
    **more: object,
) -> ParamRecord:
    """Return the record of a parameter cut along dim 0.

    `parts` are (first global row, number of rows, first local row), and `tail` is the shape of the other dims.
    """
    zeros = (0,) * len(tail)
    boxes = tuple(Box((g, *zeros), (n, *tail), (at, *zeros)) for g, n, at in parts if n > 0)
    rows = local_rows or sum(n for _, n, _ in parts)
    return ParamRecord(name, (total_rows, *tail), (rows, *tail), boxes, init, **more)  # type: ignore[arg-type]


def columns_of(name: str, rows: int, columns: int, parts: int, index: int, init: Init, **more: object) -> ParamRecord:
    """Return the record of shard `index` of a matrix that is cut along dim 1 into `parts` equal shards."""
    width = columns // parts
    box = Box((0, index * width), (rows, width), (0, 0))
    return ParamRecord(name, (rows, columns), (rows, width), (box,), init, **more)  # type: ignore[arg-type]


def records_under(records: dict[str, ParamRecord], prefix: str) -> dict[str, ParamRecord]:
    """Return the records whose local name begins with `prefix.`, by the rest of their name."""
    head = f"{prefix}."
    return {key[len(head) :]: record for key, record in records.items() if key.startswith(head)}


def tiles(record: ParamRecord, seed: int) -> Iterator[tuple[int, Slices, Slices]]:
    """Yield the random draws that fill the boxes of `record`: (the seed of a TILE x TILE tile, the slices of it that
    are used, the slices of the local tensor that they fill).

    The record must be of a matrix, or of a stack of matrices as experts have. Tiles divide the global tensor. A rank
    therefore draws only the tiles that it holds a part of, and every layout starts from the same model.
    """
    for box in record.boxes:
        assert len(box.shape) >= 2, f"{record.name}: only matrices are drawn"
        sides = (*(1 for _ in box.shape[2:]), TILE, TILE)
        dims = zip(box.start, box.shape, sides, strict=True)
        for tile in product(*(range(at // side, -(-(at + n) // side)) for at, n, side in dims)):
            start = tuple(i * side for i, side in zip(tile, sides, strict=True))
            if where := overlap(start, sides, box):
                yield stream_seed(seed, record.name, *tile), *where


def stream_seed(*parts: object) -> int:
    """Hash any words and numbers to a 63-bit seed of a random stream.

    The hash is the same in every process, unlike Python's `hash` of strings.
    """
    text = "|".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
