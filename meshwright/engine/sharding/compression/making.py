"""What making and reading compressed messages takes, without any link."""

from __future__ import annotations

from torch import Tensor

from meshwright.comm.group import DONE, Group, Pending
from meshwright.engine.sharding.buffers import Bucket
from meshwright.engine.sharding.reducers import PendingReduction, Reducer


class Nobody:
    """Stands for a group whose other ranks send what this one sends, at once: what is left is making messages."""

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


def summed(
    reducer: Reducer, bucket: Bucket, grads: Tensor, shards: Group, replicas: Group, links: bool
) -> PendingReduction:
    """Begins the sum that a bucket's ZeRO stage asks of a reducer, of these gradients; with no link if told so."""
    group = shards if bucket.stage else replicas
    asked: Group = group if links else Nobody(group)  # type: ignore[assignment]
    if bucket.stage:
        return reducer.reduce_scatter(bucket, grads.new_empty(bucket.own_grads.numel()), grads, asked)
    return reducer.all_reduce(bucket, grads, asked)
