"""The gathering of weights that are sharded over ranks: after the update (stages 1 and 2) or for each use (stage 3).

A unit is gathered and released as a whole. It is one of the units that a chunk names (`StageModule.units`), or a whole
foreign chunk. In stage 3 a unit's gate gathers its buckets before forward and before backward and releases them
afterwards. The order in which a chunk's forward or backward opens its units is recorded in the first pass. From then on
the next unit is prefetched.

All ranks of a stage must open the same units in the same order. Otherwise they would wait for each other forever, or
gather shards of different units. A user's module may not do so, for example if it drops blocks at random. So a module
that changes its order in stage 3 is stopped with an error. In addition, each rank keeps a checksum of the units that it
opened, and every step compares these (`record/rank_figures.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from torch import nn

from meshwright.comm.group import Group
from meshwright.config.comm import GatherConfig
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer, Slot
from meshwright.engine.sharding.compression.gather import GatheredCodes
from meshwright.engine.sharding.node_copies import NodeCopies
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.errors import UserError
from meshwright.models.stage import stage_of
from meshwright.nn.unit import GATE
from meshwright.spec.traffic.ledger import Ledger

Pass = tuple[int, str, bool]  # a chunk, "forward" or "backward", and True in a validation


class GatedUnit:
    """The gate of one unit (see `nn.unit.WeightGate`). `chunk` is the local chunk that it belongs to."""

    def __init__(self, module: nn.Module, chunk: int, whole_chunk: bool, foreign: bool = False) -> None:
        self.module, self.chunk, self.whole_chunk = module, chunk, whole_chunk
        # The parameters of a foreign unit that get gradients may depend on the data.
        self.foreign = foreign or whole_chunk
        self.buckets: list[Bucket] = []
        self.on_done: Callable[[GatedUnit], None] = lambda unit: None
        self.weights: WeightGatherer
        self.closes = False

    def open(self) -> None:
        self.weights.open(self)

    def close(self) -> None:
        self.weights.close(self)

    def done(self) -> None:
        self.weights.close(self)
        self.on_done(self)


def find_units(modules: Sequence[nn.Module]) -> list[GatedUnit]:
    """Return the units of all chunks, in the order of forward."""
    units: list[GatedUnit] = []
    for chunk, module in enumerate(modules):
        stage = stage_of(module)
        named = stage.units()
        parts = [module] if named is None else named
        units += [GatedUnit(part, chunk, named is None, stage.foreign) for part in parts]
    return units


def number_units(units: Sequence[GatedUnit]) -> dict[int, int]:
    """Return the number of the first unit that a parameter belongs to, by the parameter's id."""
    # In reversed order the first unit's number is set last, and remains.
    numbered = reversed(list(enumerate(units)))
    return {id(parameter): number for number, unit in numbered for parameter in unit.module.parameters()}


class WeightGatherer:
    """Gathers and releases the weights of this rank's units. `shards_of` returns the group that shards a buffer."""

    def __init__(
        self,
        units: list[GatedUnit],
        slots: dict[int, Slot],
        buffers: list[FlatBuffer],
        shards_of: Callable[[FlatBuffer], Group],
        ledger: Ledger,
    ) -> None:
        self.units, self.ledger, self._shards_of = units, ledger, shards_of
        self.overlaps = True  # Gathers run concurrently with compute.
        self.gather = GatherConfig()
        self.copies = NodeCopies()
        self._gathering: dict[int, PendingReduction] = {}
        self._orders: dict[Pass, list[GatedUnit]] = {}
        self._action: Pass | None = None
        self._opened: list[GatedUnit] = []
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self.checksum = 1  # of the units opened so far in stage 3, in order
        bucket_of = {id(slot): buffer.buckets[slot.bucket] for buffer in buffers for slot in buffer.slots}
        for unit in units:
            used = [bucket_of[id(slots[id(p)])] for p in unit.module.parameters() if id(p) in slots]
            unit.buckets = list(dict.fromkeys(used))
            unit.weights = self
            unit.closes = any(bucket.stage == 3 for bucket in unit.buckets)
            if any(bucket.stage for bucket in unit.buckets) and not unit.whole_chunk:
                setattr(unit.module, GATE, unit)

    # Stages 1 and 2.

    def updated(self, bucket: Bucket) -> None:
        """Begin to gather a bucket after the update of this rank's shard. The gather overlaps with other work."""
        self.copies.forget(bucket)
        if bucket.stage in (1, 2):
            self._gather(bucket)
            if not self.overlaps or any(unit.whole_chunk for unit in self.units):
                self.wait_for_gathers()

    def wait_for_gathers(self) -> None:
        """Wait for all gathers in flight."""
        for pending in self._gathering.values():
            pending.wait()
        self._gathering = {}

    # Stage 3.

    def begin(self, chunk: int, work: str) -> None:
        """Begin to gather the unit that a chunk's forward or backward will open first. Call it before the pass."""
        self._action, self._opened = (chunk, work, self.ledger.validating), []
        order = self._orders.get(self._action)
        # The order is empty in the backward of a frozen chunk, which opens no units.
        if order:
            self._gather_unit(order[0])
        for unit in self.units:
            if unit.chunk == chunk and unit.whole_chunk:
                self.open(unit)

    def end(self, chunk: int) -> None:
        """Release every unit of a chunk that is still open, after its forward or backward."""
        for unit in self.units:
            if unit.chunk == chunk:
                self.close(unit)
        if self._action is not None:
            self._orders[self._action] = self._opened
            if opened := [self._numbers[id(unit)] for unit in self._opened if unit.closes]:
                self.checksum = crc32(str(opened).encode(), self.checksum) or 1
        self._action = None

    def open(self, unit: GatedUnit) -> None:
        self._gather_unit(unit)
        for bucket in unit.buckets:
            if (pending := self._gathering.pop(id(bucket), None)) is not None:
                pending.wait()
        # Outside of a pass, for example when weights are exported, no order is recorded.
        if self._action is None:
            return
        self._opened.append(unit)
        order = self._orders.get(self._action, [])
        at = len(self._opened)
        if unit.foreign and unit.closes and order and (at > len(order) or order[at - 1] is not unit):
            raise UserError(
                "the module went through its blocks in another order than in the pass before, as where layers are "
                "dropped at random. In ZeRO stage 3 all ranks gather the same blocks, and can't know of a change: let "
                "every pass go through the same blocks, or set zero.stage=2"
            )
        if self.overlaps and at < len(order) and order[at - 1] is unit:
            self._gather_unit(order[at])

    def close(self, unit: GatedUnit) -> None:
        for bucket in unit.buckets:
            if bucket.stage == 3 and bucket.params.allocated and id(bucket) not in self._gathering:
                bucket.release_params()

    def _gather_unit(self, unit: GatedUnit) -> None:
        for bucket in unit.buckets:
            if bucket.stage == 3 and not bucket.params.allocated:
                bucket.allocate_params()
                self._gather(bucket)

    def _gather(self, bucket: Bucket) -> None:
        phase = self.ledger.current_phase if self.ledger.validating else "gather"
        if (pending := self.copies.begin_gather(bucket, self.ledger, phase)) is not None:
            self._gathering[id(bucket)] = pending
            return
        whole, share = bucket.params.tensor, bucket.own_params
        if share.device.type != whole.device.type:
            # Offloaded weights are first copied to their range of the whole tensor on the device.
            low, high = bucket.share
            share = whole[low - bucket.start : high - bucket.start].copy_(share, non_blocking=True)
        with self.ledger.phase(phase), self.ledger.layer(None):
            group = self._shards_of(bucket.buffer)
            # Integer tensors are packed weights of few bits, which need no further rounding.
            rounds = self.gather.rounds and whole.is_floating_point()
            if bucket.stage == 3 and rounds and not group.alone:
                self._gathering[id(bucket)] = GatheredCodes(self.gather, group, whole, share)
            else:
                self._gathering[id(bucket)] = group.all_gather(whole, share, wait=False)
        self._gathering[id(bucket)] = self.copies.wrap_gather(bucket, self._gathering[id(bucket)])
