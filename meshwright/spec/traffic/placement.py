"""The placement of parameters in flat buffers and buckets, from their sizes alone. No torch.

The buffers are built by these functions, and the planner uses the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from meshwright.config.comm import GatherConfig
from meshwright.config.memory import Place, ZeroConfig
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import DATA_AXES, REPLICA, SHARD, ParamRecord

# Each rank's share of a bucket is a multiple of this many elements, and each parameter starts at such a multiple.
ALIGN = 16
# The usual size of a bucket of gradients, and the least slice of it that a rank sends at a time.
BUCKET_MIB, SLICE_MIB = 25.0, 0.25
# Offloaded states are copied in blocks of whole pages, which direct reads and writes of files require. RING blocks are
# in use at a time: one is copied in, one is updated, one is copied back.
PAGE, RING = 4096, 3

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grad_bytes(param_bytes: int, wanted: int = 4) -> int:
    """Return the bytes of one element's gradient: `wanted`, but at least the bytes of a parameter."""
    return max(wanted, param_bytes)


def bucket_elements(bucket_mib: float, element_bytes: int, ranks: int) -> int:
    """Return the number of elements that fill a bucket. With `bucket_mib` 0, the size follows from its ranks.

    A ring sends a bucket in one slice per rank: of 25 MiB over 1,024 ranks, 25 kB at a time, which take less time than
    the latency of a message. So a bucket of many ranks is as large as it takes for slices of `SLICE_MIB`.
    """
    mib = bucket_mib or max(BUCKET_MIB, SLICE_MIB * ranks)
    return max(1, int(mib * 2**20 // element_bytes))


class UpdateKind(NamedTuple):
    """The rule that updates a parameter.

    `group` is the number of its group in `optimizer.groups`, or 0. `matrices`: its matrices are updated as wholes.
    """

    group: int = 0
    matrices: bool = False


DEFAULT_UPDATE = UpdateKind()


def update_kind(record: ParamRecord) -> UpdateKind:
    return UpdateKind(record.update_group, bool(record.matrices)) if record.trained else UpdateKind()


def buffer_key(record: ParamRecord, mixed_in: Layout | None) -> tuple[str, tuple[str, ...], bool, bool, UpdateKind]:
    """Return the properties, apart from the dtype, that all parameters of one flat buffer share.

    They are: the data axes, the further partial axes, whether the parameters are trained, whether a reducer that mixes
    elements may sum them, and the rule that updates them. `mixed_in` is the layout if there is such a reducer, and None
    otherwise.
    """
    mixed = mixed_in is not None and record.trained and may_be_mixed(record, mixed_in)
    # A frozen parameter has no gradient to sum over further axes.
    partial = record.partial if record.trained else ()
    return record.data_axes, partial, record.trained, mixed, update_kind(record)


def may_be_mixed(record: ParamRecord, layout: Layout) -> bool:
    """Return whether a gradient may be summed by a reducer whose result for an element depends on its neighbours.

    Copies of the parameter on other ranks have different neighbours. They would drift apart unless their gradients are
    summed over those ranks too. Vectors are excluded because they are small, and their precision matters.
    """
    apart = (axis for axis in record.copies if axis not in record.partial)
    return len(record.local_shape) > 1 and all(layout.size(axis) == 1 for axis in apart)


def backward_order(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group parameters by the key of their buffer. They are given in forward order and returned in backward order."""
    keyed: dict[Key, list[Item]] = {}
    for item in reversed(list(items)):
        keyed.setdefault(key(item), []).append(item)
    return keyed


@dataclass(frozen=True)
class Split:
    """The division of a buffer among its data-parallel ranks.

    Each of `shards` ranks owns a share of every bucket, and there are `replicas` such sets of ranks. Without ZeRO there
    is one shard, and every rank is a replica.
    """

    stage: int = 0
    shards: int = 1
    shard: int = 0
    replicas: int = 1
    replica: int = 0

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of a bucket that this rank owns."""
        width = (stop - start) // self.shards
        return start + self.shard * width, start + (self.shard + 1) * width

    def written(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of a bucket that this rank writes to a checkpoint. Replicas divide their common share."""
        low, high = self.share(start, stop)
        width = (high - low) // self.replicas
        return low + self.replica * width, low + (self.replica + 1) * width


class Division(NamedTuple):
    """The ZeRO stage of a buffer, the axes that shard its buckets, and the axes that replicate the shards."""

    stage: int
    shards: str | None
    replicas: str | None


def shard_axes(layout: Layout, zero: ZeroConfig, data_axes: str = DATA_AXES, trained: bool = True) -> Division:
    """Return the division of gradients that are summed over `data_axes`, and of their weights and optimizer states.

    Frozen parameters have only weights, which only stage 3 shards. A group of one rank shards nothing: its stage is 0,
    unless weights are offloaded. If dp is cut into parts, shards stay inside a node. Expert data parallelism (edp) has
    no such parts and shards over all of its ranks.
    """
    words = data_axes.split("-")
    shards, replicas = data_axes, ""
    if zero.stays_in_node and "dp" in words and layout.cuts_dp:
        shards, replicas = SHARD, "-".join(REPLICA if word == "dp" else word for word in words)
    alone = layout.size(shards) == 1 and zero.offload.params_at is Place.DEVICE
    if zero.stage == 0 or alone or (zero.stage < 3 and not trained):
        return Division(0, None, data_axes)
    return Division(zero.stage, shards, replicas or None)


def copy_axis(layout: Layout, zero: ZeroConfig, gather: GatherConfig, data_axes: str = DATA_AXES) -> str | None:
    """Return the axis over which a node's copy of the gathered weights is sharded, or None if there is no such copy.

    Experts are sharded over edp and have no such copy.
    """
    copies = gather.node_copy and zero.stage == 3 and not zero.stays_in_node
    return SHARD if copies and layout.cuts_dp and "dp" in data_axes.split("-") else None


def place(
    sizes: Sequence[int], ranks: int, bucket_elements: int, units: Sequence[int] | None = None, align: int = ALIGN
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (start, bucket) of each parameter and (start, stop) of each bucket.

    A bucket is closed by the parameter that fills it, and no parameter is cut. `units` gives the number of the unit
    that each parameter belongs to. With it, a bucket holds exactly one unit, so that a unit is gathered at once.
    Parameters, and the shares of the `ranks` ranks, begin at multiples of `align`.
    """
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = at = 0
    for i, size in enumerate(sizes):
        places.append((at, len(buckets)))
        at += -(-size // align) * align
        last = i + 1 == len(sizes)
        if last or (at - begin >= bucket_elements if units is None else units[i + 1] != units[i]):
            # Padding makes every rank's share of the bucket equally large and aligned.
            at = begin + -(-(at - begin) // (align * ranks)) * align * ranks
            buckets.append((begin, at))
            begin = at
    return places, buckets


def piece_size(most: int, shares: Sequence[int]) -> int:
    """Return the number of elements that offloading copies at a time: `most` or the largest share, if that is smaller.

    It is rounded to a multiple of PAGE elements, so that a block is whole pages in any precision.
    """
    return min(max(1, most // PAGE), -(-max(shares) // PAGE)) * PAGE
