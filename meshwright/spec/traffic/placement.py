"""Where parameters lie in flat buffers and what is reduced at once, from their sizes alone.

The buffers are built from these functions and the planner reads the same ones. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from meshwright.config.comm import GatherConfig
from meshwright.config.sections import ZeroConfig
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import DATA_AXES, REPLICA, SHARD, ParamRecord

# Each rank's share of a bucket is a multiple of this many elements, and each parameter starts at one.
ALIGN = 16
# The usual size of a bucket of gradients, and the least slice of it that a rank sends at a time.
BUCKET_MIB, SLICE_MIB = 25.0, 0.25
# Offloaded states are copied in pieces of whole pages, as direct reads and writes of files need them, three at a time:
# one is copied in, one is updated, one is copied back.
PAGE, RING = 4096, 3

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grad_bytes(param_bytes: int, wanted: int = 4) -> int:
    """Returns the bytes of one element's gradient, in float32 unless the model's precision is asked for."""
    return max(wanted, param_bytes)


def bucket_elements(bucket_mib: float, element_bytes: int, ranks: int) -> int:
    """Return the number of elements that fill a bucket. With `bucket_mib` 0, the size follows from its ranks.

    A ring sends a bucket in one slice per rank: of 25 MiB over 1,024 ranks, 25 kB at a time, which take less time than
    the latency of a message. So a bucket of many ranks is as large as it takes for slices of `SLICE_MIB`.
    """
    mib = bucket_mib or max(BUCKET_MIB, SLICE_MIB * ranks)
    return max(1, int(mib * 2**20 // element_bytes))


def buffer_key(record: ParamRecord, mixed_in: Layout | None) -> tuple[str, tuple[str, ...], bool, bool, bool]:
    """Returns what the parameters of one flat buffer have in common besides their dtype: data axes, further partial
    axes, whether they are trained, whether a reducer that mixes elements may sum them, and whether the optimizer
    updates their matrices as wholes; `mixed_in` is the layout where there is such a reducer. (A frozen parameter has no
    gradient to sum over further axes.)"""
    mixed = mixed_in is not None and record.trained and may_be_mixed(record, mixed_in)
    whole = record.trained and bool(record.matrices)
    return record.data_axes, record.partial if record.trained else (), record.trained, mixed, whole


def may_be_mixed(record: ParamRecord, layout: Layout) -> bool:
    """Whether a gradient may be summed by a reducer whose result for an element depends on its neighbours. Copies on
    other ranks have other neighbours, and would drift apart unless they are summed over those ranks too; vectors are
    small, and matter."""
    apart = (axis for axis in record.copies if axis not in record.partial)
    return len(record.local_shape) > 1 and all(layout.size(axis) == 1 for axis in apart)


def backward_order(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Groups parameters, given in the order of forward, by the key of their buffer, in the order of backward."""
    keyed: dict[Key, list[Item]] = {}
    for item in reversed(list(items)):
        keyed.setdefault(key(item), []).append(item)
    return keyed


@dataclass(frozen=True)
class Split:
    """How a buffer is divided among its data-parallel ranks: each of `shards` ranks owns a share of every bucket, and
    there are `replicas` such sets. Without ZeRO there is one shard, and every rank is a replica."""

    stage: int = 0
    shards: int = 1
    shard: int = 0
    replicas: int = 1
    replica: int = 0

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the part of a bucket that this rank owns."""
        width = (stop - start) // self.shards
        return start + self.shard * width, start + (self.shard + 1) * width

    def written(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the part of a bucket that this rank writes to a checkpoint: replicas divide their common share."""
        low, high = self.share(start, stop)
        width = (high - low) // self.replicas
        return low + self.replica * width, low + (self.replica + 1) * width


class Division(NamedTuple):
    """The ZeRO stage of a buffer, the axes over which its buckets are sharded, and those that replicate the shards."""

    stage: int
    shards: str | None
    replicas: str | None


def shard_axes(layout: Layout, zero: ZeroConfig, data_axes: str = DATA_AXES, trained: bool = True) -> Division:
    """Returns how the gradients that are summed over `data_axes`, with their weights and states, are divided among
    those ranks. Frozen parameters have only weights, which only stage 3 divides.

    One rank alone divides nothing: its stage is 0, unless weights are offloaded. Where dp is cut into parts, shards
    stay inside a node; expert data parallelism (edp) has no such parts and is divided over all of its ranks.
    """
    words = data_axes.split("-")
    shards, replicas = data_axes, ""
    if zero.stays_in_node and "dp" in words and any(axis == "dp" for axis, _ in layout.parts):
        shards, replicas = SHARD, "-".join(REPLICA if word == "dp" else word for word in words)
    alone = layout.size(shards) == 1 and zero.offload.params == "none"
    if zero.stage == 0 or alone or (zero.stage < 3 and not trained):
        return Division(0, None, data_axes)
    return Division(zero.stage, shards, replicas or None)


def copy_axis(layout: Layout, zero: ZeroConfig, gather: GatherConfig, data_axes: str = DATA_AXES) -> str | None:
    """Returns the axis of the ranks that keep a node's copy of gathered weights, each a part of it; None without one.
    Experts, which are divided over edp, have none."""
    parted = any(axis == "dp" for axis, _ in layout.parts)
    copies = gather.node_copy and zero.stage == 3 and not zero.stays_in_node
    return SHARD if copies and parted and "dp" in data_axes.split("-") else None


def place(
    sizes: Sequence[int], ranks: int, bucket_elements: int, units: Sequence[int] | None = None, align: int = ALIGN
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (start, bucket) of each parameter and (start, stop) of each bucket. A bucket is closed by the parameter
    that fills it; no parameter is cut. With `units`, the number of the unit that each parameter belongs to, a bucket
    holds one unit instead, which is gathered at once. Parameters, and the shares of so many ranks, begin at multiples
    of `align`."""
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = at = 0
    for i, size in enumerate(sizes):
        places.append((at, len(buckets)))
        at += -(-size // align) * align
        last = i + 1 == len(sizes)
        if last or (at - begin >= bucket_elements if units is None else units[i + 1] != units[i]):
            at = begin + -(-(at - begin) // (align * ranks)) * align * ranks
            buckets.append((begin, at))
            begin = at
    return places, buckets


def piece_size(most: int, shares: Sequence[int]) -> int:
    """Returns a piece's elements: at most `most`, no more than the largest share, whole pages in any precision."""
    return min(max(1, most // PAGE), -(-max(shares) // PAGE)) * PAGE
