"""Time the compression and decompression of messages without any network."""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.group import DONE, Group, Pending
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.reducers import PendingReduction, Reducer


class SoloGroup:
    """A stand-in for a group in which all other ranks instantly send the same data as this one.

    A sum over it only takes the time for compressing and decompressing messages.
    """

    alone = False

    def __init__(self, group: Group) -> None:
        self.size, self.index = group.size, group.index

    def all_reduce(self, x: Tensor, op: str = "sum", wait: bool = True) -> Pending:
        return DONE

    def all_to_all(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        out.copy_(x)
        return DONE

    def all_gather(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        out.copy_(x.expand_as(out))
        return DONE

    def reduce_scatter(self, out: Tensor, x: Tensor, wait: bool = True) -> Pending:
        out.copy_(x.view(self.size, -1)[self.index])
        return DONE


def begin_sum(
    reducer: Reducer, bucket: Bucket, grads: Tensor, shards: Group, replicas: Group, links: bool
) -> PendingReduction:
    """Begin the sum of gradients that a bucket's ZeRO stage requests from a reducer; without `links`, do not send."""
    group = shards if bucket.stage else replicas
    used: Group = group if links else SoloGroup(group)  # type: ignore[assignment]
    if bucket.stage:
        return reducer.reduce_scatter(bucket, grads.new_empty(bucket.own_grads.numel()), grads, used)
    return reducer.all_reduce(bucket, grads, used)
