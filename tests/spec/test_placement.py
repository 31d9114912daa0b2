"""The placement of parameters in flat buffers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.engine.sharding.buffers import build_buffers
from meshwright.spec.traffic.placement import ALIGN, Split, place

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 12), st.integers(1, 1500))
def test_place_aligns_and_never_overlaps(sizes: list[int], ranks: int, elements: int) -> None:
    places, buckets = place(sizes, ranks, elements)
    assert len(places) == len(sizes)
    end = 0
    for (start, bucket), size in zip(places, sizes, strict=True):
        assert start % ALIGN == 0 and start >= end
        end = start + size
        assert buckets[bucket][0] <= start and end <= buckets[bucket][1], "no parameter is cut"
    assert [bucket for _, bucket in places] == sorted(bucket for _, bucket in places)


@given(SIZES, st.integers(1, 12), st.integers(1, 1500))
def test_buckets_tile_the_buffer_and_split_evenly(sizes: list[int], ranks: int, elements: int) -> None:
    places, buckets = place(sizes, ranks, elements)
    assert buckets[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(buckets, buckets[1:], strict=False))
    assert all((stop - start) % (ranks * ALIGN) == 0 for start, stop in buckets)
    filled = [0] * len(buckets)
    for size, (_, bucket) in zip(sizes, places, strict=True):
        filled[bucket] += -(-size // ALIGN) * ALIGN
    for i, ((start, stop), used) in enumerate(zip(buckets, filled, strict=True)):
        assert 0 < used <= stop - start < used + ranks * ALIGN, "padding is less than one unit"
        assert used >= elements or i == len(buckets) - 1, "only the last bucket may be short"


@given(SIZES, st.integers(1, 1500))
def test_the_order_in_a_bucket_does_not_depend_on_the_ranks(sizes: list[int], elements: int) -> None:
    """Any number of ranks gives the same buckets of parameters, so that buckets can be resharded."""
    alone = [bucket for _, bucket in place(sizes, 1, elements)[0]]
    assert all([bucket for _, bucket in place(sizes, ranks, elements)[0]] == alone for ranks in (2, 3, 8))


def test_six_parameters_of_two_dtypes_make_two_buffers() -> None:
    module = nn.Module()
    dtypes = [torch.float32, torch.bfloat16] * 3
    for i, dtype in enumerate(dtypes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.full((i + 1, 3), float(i + 1), dtype=dtype)))
    buffers, slots = build_buffers([module], lambda axes: Split(replicas=4), bucket_mib=25.0)
    assert sorted(str(b.key.dtype) for b in buffers) == ["torch.bfloat16", "torch.float32"]
    assert len(slots) == 6 and all(len(b.slots) == 3 and b.size % (4 * ALIGN) == 0 for b in buffers)
    assert all(b.grads.dtype == torch.float32 for b in buffers)
    for buffer in buffers:
        assert [slot.name for slot in buffer.slots] == sorted((s.name for s in buffer.slots), reverse=True)
        for slot in buffer.slots:
            value = float(slot.name[-1]) + 1.0
            assert (slot.parameter == value).all(), "packing keeps the values"
            buffer.params[slot.start : slot.stop] = -value
            assert (slot.parameter == -value).all(), "parameters are views of the buffer"


def test_runs_join_neighbours_and_keep_others_apart() -> None:
    module = nn.Module()
    for i, shape in enumerate([(4, 4), (5,), (5, 5), (7, 3), (2,)]):
        module.register_parameter(f"p{i}", nn.Parameter(torch.ones(shape)))
    (buffer,), _ = build_buffers([module], lambda axes: Split(), bucket_mib=25.0)
    matrices = buffer.runs(slot for slot in buffer.slots if slot.record.decay)
    vectors = buffer.runs(slot for slot in buffer.slots if not slot.record.decay)
    assert len(matrices) == 2 and len(vectors) == 2
    covered = sorted((a, b) for bucket, a, b in matrices + vectors)
    assert covered[0][0] == 0 and covered[-1][1] == buffer.size
    assert all(a[1] == b[0] for a, b in zip(covered, covered[1:], strict=False))
    assert sum(float(buffer.params[a:b].sum()) for _, a, b in matrices) == 16 + 25 + 21
