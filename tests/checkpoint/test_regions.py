"""Tests of the regions that checkpoints are divided into.

A range of a flat tensor is covered by rectangles, rectangles are intersected, and large boxes are cut into blocks.
"""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.record import checkpoint_format as fmt
from meshwright.spec.layout.params import Box, Init, ParamRecord, global_boxes, overlap, rectangles

ZEROS = Init("zeros")
FEW = settings(max_examples=50)
shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def at(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


@st.composite
def ranges(draw: st.DrawFn, size: int) -> tuple[int, int]:
    low = draw(st.integers(0, size))
    return low, draw(st.integers(low, size))


@st.composite
def records(draw: st.DrawFn) -> ParamRecord:
    """Draw a rank's shard of a parameter: several row ranges, as of a fused matrix, and one column range.

    In the local tensor there is padding before, between and after the row ranges.
    """
    rows, columns = draw(st.integers(2, 12)), draw(st.integers(1, 6))
    left = draw(st.integers(0, columns - 1))
    width = draw(st.integers(1, columns - left))
    cuts = sorted(draw(st.sets(st.integers(0, rows), min_size=2, max_size=4)))
    boxes, top = [], 0
    for low, high in zip(cuts[::2], cuts[1::2], strict=False):
        # Padding before this row range.
        top += draw(st.integers(0, 2))
        boxes.append(Box((low, left), (high - low, width), (top, 0)))
        top += high - low
    local = (top + draw(st.integers(0, 3)), width)
    return ParamRecord("p", (rows, columns), local, tuple(boxes), ZEROS)


@FEW
@given(st.data(), shapes)
def test_rectangles_cover_a_range_once_and_nothing_else(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    low, high = data.draw(ranges(size))
    held = np.zeros(shape, dtype=np.int64)
    boxes = list(rectangles(shape, low, high))
    for box in boxes:
        assert box.start == box.local_start and all(n > 0 for n in box.shape)
        held[at(box.start, box.shape)] += 1
    wanted = np.zeros(size, dtype=np.int64)
    wanted[low:high] = 1
    assert (held.reshape(-1) == wanted).all()
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@FEW
@given(st.data(), records())
def test_global_boxes_hold_what_the_range_holds_but_padding(data: st.DataObject, record: ParamRecord) -> None:
    whole = np.arange(math.prod(record.shape)).reshape(record.shape)
    local = np.full(record.local_shape, -1)
    for box in record.boxes:
        local[at(box.local_start, box.shape)] = whole[at(box.start, box.shape)]
    low, high = data.draw(ranges(math.prod(record.local_shape)))
    found = np.zeros(record.shape, dtype=np.int64)
    for box in global_boxes(record, low, high):
        assert (whole[at(box.start, box.shape)] == local[at(box.local_start, box.shape)]).all()
        found[at(box.start, box.shape)] += 1
    expected = np.zeros(record.shape, dtype=np.int64)
    kept = local.reshape(-1)[low:high]
    expected.reshape(-1)[kept[kept >= 0]] = 1
    assert (found == expected).all()


@FEW
@given(st.data(), records())
def test_overlap_moves_the_common_part(data: st.DataObject, record: ParamRecord) -> None:
    whole = np.arange(math.prod(record.shape)).reshape(record.shape)
    start, shape = [], []
    for size in record.shape:
        low, high = data.draw(ranges(size))
        start.append(low)
        shape.append(high - low)
    region = whole[at(tuple(start), tuple(shape))]
    local, expected = np.full(record.local_shape, -1), np.full(record.local_shape, -1)
    for box in record.boxes:
        expected[at(box.local_start, box.shape)] = whole[at(box.start, box.shape)]
        where = overlap(tuple(start), tuple(shape), box)
        if where is not None:
            inside, to = where
            assert region[inside].size > 0
            local[to] = region[inside]
    expected[~np.isin(expected, region)] = -1
    assert (local == expected).all()


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, int]) -> ParamRecord:
    """Draw a slice of a matrix, as a rank of some layout reads it."""
    (top, bottom), (left, right) = draw(ranges(shape[0])), draw(ranges(shape[1]))
    boxes = (Box((top, left), (bottom - top, right - left), (0, 0)),) if bottom > top and right > left else ()
    return ParamRecord("p", shape, (bottom - top, right - left), boxes, ZEROS)


@FEW
@given(st.data(), st.integers(1, 8), st.integers(1, 6), st.integers(1, 4))
def test_what_any_number_of_writers_cut_any_reader_puts_together(
    data: st.DataObject, rows: int, columns: int, writers: int
) -> None:
    """A reader gets every element of its slice of a matrix whose elements are split among writers and into blocks."""
    shape = (rows, columns)
    values = np.random.default_rng(0).permutation(rows * columns).reshape(shape)
    writer = ParamRecord("p", shape, shape, (Box((0, 0), shape, (0, 0)),), ZEROS)
    inner = [data.draw(st.integers(0, values.size)) for _ in range(writers - 1)]
    bounds = sorted([0, values.size, *inner])
    reader = data.draw(slices(shape))
    local = np.full(reader.local_shape, -1)
    for low, high in zip(bounds, bounds[1:], strict=False):
        for box in global_boxes(writer, low, high):
            for inside, size in fmt.blocks_of(box.shape, fmt.BLOCK_BYTES // 4):
                start = tuple(a + b for a, b in zip(box.start, inside, strict=True))
                block = values[at(start, size)]
                for into in reader.boxes:
                    where = overlap(start, block.shape, into)
                    if where is not None:
                        local[where[1]] = block[where[0]]
    for box in reader.boxes:
        assert (local == values[at(box.start, box.shape)]).all()


@FEW
@given(st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple), st.integers(1, 2**22))
def test_blocks_are_small_and_cover_their_box(shape: tuple[int, ...], element: int) -> None:
    """Blocks are in order and cover each element once. Only a block of a single row may exceed the limit."""
    covered = np.zeros(shape, dtype=int)
    numbers = np.arange(covered.size).reshape(shape)
    found = []
    for start, size in fmt.blocks_of(shape, element):
        covered[at(start, size)] += 1
        found.append(numbers[at(start, size)].ravel())
        large = element * math.prod(size) > fmt.BLOCK_BYTES
        assert not large or (size[:-1] == (1,) * (len(shape) - 1) if len(shape) > 1 else size == (1,))
    assert (covered == 1).all() and (np.concatenate(found) == numbers.ravel()).all()
