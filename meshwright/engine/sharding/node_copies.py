"""A second copy of the weights inside each node (`comm.gather.node_copy`, ZeRO stage 3).

The first gather of a step crosses nodes. Its result is then kept, divided among the ranks of the node. All later
gathers of the step, in backward and in further micro-batches, gather from these parts.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.group import Group
from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
from meshwright.engine.sharding.reducers import PendingReduction
from meshwright.spec.traffic.ledger import Ledger


class NodeCopies:
    """This rank's parts of its node's copy of the weights."""

    def __init__(self) -> None:
        self.parts: dict[Bucket, Tensor] = {}
        self._groups: dict[Bucket, Group] = {}
        self._current: set[Bucket] = set()  # the buckets whose parts hold the current weights

    def keep(self, buffer: FlatBuffer, group: Group) -> None:
        """Allocate this rank's parts of the copy of a buffer's weights."""
        for bucket in buffer.buckets:
            self._groups[bucket] = group
            self.parts[bucket] = bucket.own_params.new_zeros((bucket.stop - bucket.start) // group.size)

    def forget(self, bucket: Bucket | None = None) -> None:
        """Mark the copy of a bucket, or of all, as stale, because the weights have changed or may have changed."""
        self._current = set() if bucket is None else self._current - {bucket}

    def begin_gather(self, bucket: Bucket, ledger: Ledger, phase: str) -> PendingReduction | None:
        """Begin to gather a bucket inside the node. Return None if the node has no current copy of it."""
        if bucket not in self._current:
            return None
        with ledger.phase(phase), ledger.layer(None):
            return self._groups[bucket].all_gather(bucket.params.tensor, self.parts[bucket], wait=False)

    def wrap_gather(self, bucket: Bucket, pending: PendingReduction) -> PendingReduction:
        """Wrap a gather from all ranks so that it also keeps this rank's part, if the bucket has a copy."""
        return CopyingGather(self, bucket, pending) if bucket in self.parts else pending

    def copy(self, bucket: Bucket) -> None:
        group = self._groups[bucket]
        self.parts[bucket].copy_(bucket.params.tensor.view(group.size, -1)[group.index])
        self._current.add(bucket)


class CopyingGather:
    """A gather in flight. Its `wait` also stores this rank's part of the node's copy."""

    def __init__(self, copies: NodeCopies, bucket: Bucket, pending: PendingReduction) -> None:
        self._copies, self._bucket, self._pending = copies, bucket, pending

    def wait(self) -> None:
        self._pending.wait()
        self._copies.copy(self._bucket)
