"""The reducer that sums gradients by our own algorithms (`comm/algorithms.py`) on sends and receives.

They are there to be studied, and for networks on which they are better than the back end's own. This file imports no
torch, so that the planner can ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from meshwright.comm.algorithms import neighbours_on_node, rounds_of
from meshwright.sharding.reducers import PlainReducer

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.layout.params import ParamRecord
    from meshwright.sharding.buffers import Bucket
    from meshwright.sharding.reducers import PendingReduction


class AlgorithmReducer(PlainReducer):
    """Sums by one of our own algorithms, when a sum is waited for. `node_size`: ranks per node."""

    def __init__(self, kind: str, node_size: int = 1) -> None:
        self.kind, self.node_size = kind, node_size

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        if ranks == 1:
            return []
        piece = elements // ranks * element_bytes
        return [("send", len(each.sent) * piece) for each, _ in rounds_of(self.kind, ranks, 0, op, on_node)]

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        return Rounds(self, "all_reduce", grads, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        return Rounds(self, "reduce_scatter", out, grads, group)


class GatherToOne(PlainReducer):
    """The naive sum, to compare with: all ranks send everything to the first, which adds up and sends the sum back. Its
    calls are those of the first rank, through whose link all goes, (n-1) tensors in and as many out."""

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        return [("send", elements * element_bytes)] * (2 * (ranks - 1))

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        return ThroughOne(grads, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        return ThroughOne(out, grads, group)


class ThroughOne:
    """A sum through the first rank of a group, that is made when it is waited for."""

    def __init__(self, out: Tensor, grads: Tensor, group: Group) -> None:
        self._out, self._grads, self._group = out, grads, group

    def wait(self) -> None:
        group, grads = self._group, self._grads
        others = range(1, group.size)
        if group.index == 0:
            found = grads.new_empty(grads.shape)
            for other in others:
                group.receive(found, other).wait()
                grads.add_(found)
            for pending in [group.send(grads, other) for other in others]:
                pending.wait()
        elif not group.alone:
            group.send(grads, 0).wait()
            group.receive(grads, 0).wait()
        if self._out is not grads:
            self._out.copy_(grads.view(group.size, -1)[max(0, group.index)])


class Rounds:
    """A sum that is made when it is waited for."""

    def __init__(self, reducer: AlgorithmReducer, op: str, out: Tensor, grads: Tensor, group: Group) -> None:
        self._reducer, self._op, self._out, self._grads, self._group = reducer, op, out, grads, group

    def wait(self) -> None:
        group, pieces = self._group, self._grads.view(self._group.size, -1)
        on_node = neighbours_on_node(group.ranks, self._reducer.node_size)
        if not group.alone:
            for each, adds in rounds_of(self._reducer.kind, group.size, group.index, self._op, on_node):
                sent, found = pieces[list(each.sent)], pieces.new_empty(len(each.received), pieces.shape[1])
                send, receive = partial(group.send, sent, each.to), partial(group.receive, found, each.source)
                # Of two ranks that send to each other the first sends first: their messages may pass one at a time.
                first = each.to != each.source or group.index < each.to
                for pending in [call() for call in ((send, receive) if first else (receive, send))]:
                    pending.wait()
                received = list(each.received)
                pieces[received] = pieces[received] + found if adds else found
        if self._op == "reduce_scatter":
            self._out.copy_(pieces[max(0, group.index)])
