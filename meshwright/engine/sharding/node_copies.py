"""A second copy of the weights inside each node (`comm.gather.node_copy`, ZeRO stage 3).

The first gather of a step crosses nodes. What it brings is then kept, divided among the ranks of the node, and every
later one of the step, of backward and of further micro-batches, gathers from there.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.group import Group
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.spec.traffic.ledger import Ledger


class NodeCopies:
    """This rank's parts of its node's copies."""

    def __init__(self) -> None:
        self.parts: dict[Bucket, Tensor] = {}
        self._groups: dict[Bucket, Group] = {}
        self._there: set[Bucket] = set()  # whose parts are those of the weights as they are now

    def keep(self, buffer: FlatBuffer, group: Group) -> None:
        """Allocates the parts of a buffer's weights that this rank of a node will keep."""
        for bucket in buffer.buckets:
            self._groups[bucket] = group
            self.parts[bucket] = bucket.own_params.new_zeros((bucket.stop - bucket.start) // group.size)

    def forget(self, bucket: Bucket | None = None) -> None:
        """Notes that a bucket's weights, or all, have changed or may have."""
        self._there = set() if bucket is None else self._there - {bucket}

    def gathered(self, bucket: Bucket, ledger: Ledger, phase: str) -> PendingReduction | None:
        """Begins to gather a bucket inside the node; None if the node has no copy of it yet."""
        if bucket not in self._there:
            return None
        with ledger.phase(phase), ledger.layer(None):
            return self._groups[bucket].all_gather(bucket.params.tensor, self.parts[bucket], wait=False)

    def copying(self, bucket: Bucket, pending: PendingReduction) -> PendingReduction:
        """Returns a gather from all ranks that also keeps this rank's part, where there is one to keep."""
        return Copying(self, bucket, pending) if bucket in self.parts else pending

    def copy(self, bucket: Bucket) -> None:
        group = self._groups[bucket]
        self.parts[bucket].copy_(bucket.params.tensor.view(group.size, -1)[group.index])
        self._there.add(bucket)


class Copying:
    """A gather under way, of which a part is kept."""

    def __init__(self, copies: NodeCopies, bucket: Bucket, pending: PendingReduction) -> None:
        self._copies, self._bucket, self._pending = copies, bucket, pending

    def wait(self) -> None:
        self._pending.wait()
        self._copies.copy(self._bucket)
