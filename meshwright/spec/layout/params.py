"""Records of where each parameter lives: plain data that initialisation, gradient buffers, the grad norm, checkpoints
and the memory model all read. No torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

DATA_AXES = "dp-cp"  # every dense gradient is a partial sum over these
EP_NODE, EP_ACROSS = "ep.node", "ep.across"  # parts of ep, where rows go inside a node first and then between nodes
SHARD, REPLICA = "dp.shard", "dp.replica"  # parts of dp, where states are divided inside a node
TILE = 128  # weights are drawn in tiles of so many rows and columns (see `tiles`)

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of the global tensor and the corner of the local tensor where it lies."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Init:
    # given: the module has set it itself; placed: so it has, and a plan says which part of it a rank holds
    kind: Literal["normal", "zeros", "ones", "given", "placed"]
    std: float = 0.0
    first: int = 0  # rows of the global tensor that begin with `first_std` instead
    first_std: float = 0.0


@dataclass(frozen=True)
class ParamRecord:
    """The place of one local parameter in the model that all ranks hold together. Several local parameters may hold
    boxes of one global tensor (`name`); rows of the local tensor that no box covers are padding, stay zero and never
    enter the loss."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    init: Init
    decay: bool = True
    data_axes: str = DATA_AXES  # axes of the data-parallel reduction
    partial: tuple[str, ...] = ()  # further axes over which this gradient is a partial sum
    copies: tuple[str, ...] = ()  # axes (beside the data axes) along which the same content is held
    tied: str = ""  # the tie this parameter belongs to, across stages
    trained: bool = True  # a frozen one has no gradient, master or moments (at run time `requires_grad` decides)
    wide: bool = False  # in fp32 (in fp64 runs: fp64) whatever the model's precision
    adapters: tuple[AdapterRecord, ...] = ()  # of a frozen matrix: the trained changes of its rows
    matrices: tuple[int, ...] = ()  # the rows of those in it, one below the other, that the optimizer updates as wholes
    packs: ParamRecord | None = (
        None  # this is of bytes (spec/layout/packed.py), which stand for the values of that record
    )

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def values(self) -> ParamRecord:
        """The record of the values, where this one may be of bytes that stand for them."""
        return self.packs or self


@dataclass(frozen=True)
class AdapterRecord:
    """A low-rank change of some rows of a linear layer's weight: scale x up x down is added to its local rows from
    `start` to `stop`. With `norms`, each row of the sum is then scaled to the norm that the weight's row has, plus a
    trained number. A weight of experts [experts, rows, in] has such a change of each: down is [experts, rank, in]."""

    name: str  # of these rows: q, k, v, gate, ...
    start: int
    stop: int
    down: ParamRecord  # [rank, in]
    up: ParamRecord  # [rows, rank]
    norms: ParamRecord | None  # [rows]
    scale: float
    dropout: float  # of down's input

    @property
    def records(self) -> dict[str, ParamRecord]:
        found = {"down": self.down, "up": self.up}
        return found if self.norms is None else found | {"norms": self.norms}


def row_of(record: ParamRecord, row: int, rows: int) -> ParamRecord:
    """Returns a record of one of several rows, each a tensor of the record's shape: for a state that differs between
    the ranks that hold the parameter."""
    boxes = tuple(Box((row, *b.start), (1, *b.shape), (0, *b.local_start)) for b in record.boxes)
    return replace(record, shape=(rows, *record.shape), local_shape=(1, *record.local_shape), boxes=boxes)


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yields a range of a row-major tensor's elements as rectangles: at most two per dim but the last, and one more."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape), (start,) * len(shape))
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
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
    """Yields the boxes of the global tensor that a range of the local tensor's elements holds; padding is in none."""
    for piece in rectangles(record.local_shape, start, stop):
        for box in record.boxes:
            # The piece is of the local tensor, so here the local and the global tensor change places.
            if where := overlap(piece.start, piece.shape, Box(box.local_start, box.shape, box.start)):
                inside, found = where
                local = tuple(start + part.start for start, part in zip(piece.start, inside, strict=True))
                yield Box(tuple(part.start for part in found), tuple(part.stop - part.start for part in found), local)


def overlap(a_start: tuple[int, ...], a_shape: tuple[int, ...], b: Box) -> tuple[Slices, Slices] | None:
    """Returns the overlap of the region (a_start, a_shape) of a global tensor with box `b`, as slices within the region
    and within b's local tensor; None if they don't overlap."""
    inside, local = [], []
    for a, n, g, m, at in zip(a_start, a_shape, b.start, b.shape, b.local_start, strict=True):
        low, high = max(a, g), min(a + n, g + m)
        if low >= high:
            return None
        inside.append(slice(low - a, high - a))
        local.append(slice(at + low - g, at + high - g))
    return tuple(inside), tuple(local)


def slices_of(start: tuple[int, ...], shape: tuple[int, ...]) -> Slices:
    """Returns the slices of the rectangle of a tensor that begins at `start`."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def whole(name: str, shape: tuple[int, ...], init: Init, **more: object) -> ParamRecord:
    """Returns the record of a parameter that every tp rank holds whole."""
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
    """Returns the record of a parameter cut along dim 0. `parts` are (global first row, rows, local first row), and
    `tail` the other dims."""
    zeros = (0,) * len(tail)
    boxes = tuple(Box((g, *zeros), (n, *tail), (at, *zeros)) for g, n, at in parts if n > 0)
    rows = local_rows or sum(n for _, n, _ in parts)
    return ParamRecord(name, (total_rows, *tail), (rows, *tail), boxes, init, **more)  # type: ignore[arg-type]


def columns_of(name: str, rows: int, columns: int, parts: int, index: int, init: Init, **more: object) -> ParamRecord:
    """Returns the record of part `index` of a matrix that is cut along dim 1 into equal `parts`."""
    width = columns // parts
    box = Box((0, index * width), (rows, width), (0, 0))
    return ParamRecord(name, (rows, columns), (rows, width), (box,), init, **more)  # type: ignore[arg-type]


def records_under(records: dict[str, ParamRecord], prefix: str) -> dict[str, ParamRecord]:
    """Returns the records whose local name begins with `prefix.`, by the rest of their name."""
    head = f"{prefix}."
    return {key[len(head) :]: record for key, record in records.items() if key.startswith(head)}


def tiles(record: ParamRecord, seed: int) -> Iterator[tuple[int, Slices, Slices]]:
    """Yields the draws that fill `record`'s boxes, which must be of a matrix or, as experts have them, of several: the
    seed of a TILE x TILE block, the part of it that is wanted, and where that goes. The tiles are those of the global
    tensor, so that a rank draws only the ones it holds a part of and every layout starts from the same model."""
    for box in record.boxes:
        assert len(box.shape) >= 2, f"{record.name}: only matrices are drawn"
        sides = (*(1 for _ in box.shape[2:]), TILE, TILE)
        each = zip(box.start, box.shape, sides, strict=True)
        for tile in product(*(range(at // side, -(-(at + n) // side)) for at, n, side in each)):
            start = tuple(i * side for i, side in zip(tile, sides, strict=True))
            if where := overlap(start, sides, box):
                yield stream_seed(seed, record.name, *tile), *where


def stream_seed(*parts: object) -> int:
    """Hashes any words and numbers to a 63-bit seed of a random stream."""
    text = "|".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
