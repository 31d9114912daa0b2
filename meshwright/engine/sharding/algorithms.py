"""The reducer that sums gradients by our own algorithms (`spec/traffic/algorithms.py`) on sends and receives.

They are there to be studied, and for networks on which they are better than the back end's own. This file imports no
torch, so that the planner can ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.spec.traffic.algorithms import Pieces, neighbours_on_node, ring_order, rounds_of
from meshwright.spec.traffic.pick import fastest, links_of

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.config.comm import LinkConfig
    from meshwright.engine.sharding.buffers import Bucket
    from meshwright.engine.sharding.reducers import Network, PendingReduction
    from meshwright.spec.layout.params import ParamRecord


class AlgorithmReducer(PlainReducer):
    """Sums by one of our own algorithms, when a sum is waited for, or (`auto`) by the one that is fastest over `links`
    for each sum, torch's included. `node_size`: ranks per node; `switches`: the switch of each node, if known."""

    def __init__(
        self, kind: str, node_size: int = 1, links: LinkConfig | None = None, switches: Sequence[int] = ()
    ) -> None:
        self.kind, self.node_size, self.links, self.switches = kind, node_size, links, switches
        self.steps: dict[tuple[Any, ...], list[Step]] = {}  # of all sums so far, by group, algorithm, op and device

    def chosen(self, op: str, payload: int, size: int, on_node: int) -> str:
        """Returns the algorithm of a sum of so many bytes over a group of so many ranks."""
        if self.kind != "auto" or self.links is None or size == 1:
            return self.kind
        return fastest(links_of(self.links, on_node, self.node_size), op, payload, size, on_node)

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        if ranks == 1:
            return []
        piece, kind = elements // ranks * element_bytes, self.chosen(op, elements * element_bytes, ranks, on_node)
        if kind == "torch":
            return super().calls(op, elements, element_bytes, ranks, records, on_node)
        return [("send", len(each.sent) * piece) for each, _ in rounds_of(kind, ranks, 0, op, on_node)]

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        """See `ReducerPlan`: our own algorithms sum after backward."""
        return self.chosen(op, payload, ranks, on_node) == "torch"

    def seconds(
        self, network: Network, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        payload = elements * element_bytes
        return network.algorithm(self.chosen(op, payload, ranks, on_node), op, payload, ranks, on_node)

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        rounds = Rounds(self, "all_reduce", grads, grads, group)
        return rounds if rounds.kind != "torch" else super().all_reduce(bucket, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        rounds = Rounds(self, "reduce_scatter", out, grads, group)
        return rounds if rounds.kind != "torch" else super().reduce_scatter(bucket, out, grads, group)


class GatherToOne(PlainReducer):
    """The naive sum, to compare with: all ranks send everything to the first, which adds up and sends the sum back. On
    average a rank sends what it sends in a ring, but all of it goes through the first one's link."""

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        return [("all_reduce", elements * element_bytes)]

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        return False

    def seconds(
        self, network: Network, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        return network.through_one(elements * element_bytes, ranks, on_node)

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


class Step(NamedTuple):
    """One round, with the pieces of either side as `_pieces_index` gives them; `adds`: what arrives is added."""

    to: int
    sent: slice | Tensor
    source: int
    received: slice | Tensor
    arriving: int  # the number of pieces
    adds: bool


class Rounds:
    """A sum that is made when it is waited for."""

    def __init__(self, reducer: AlgorithmReducer, op: str, out: Tensor, grads: Tensor, group: Group) -> None:
        self._op, self._out, self._grads, self._group = op, out, grads, group
        self._reducer = reducer
        self._on_node = neighbours_on_node(group.ranks, reducer.node_size)
        self.kind = reducer.chosen(op, grads.nbytes, group.size, self._on_node)

    def wait(self) -> None:
        group, pieces = self._group, self._grads.view(self._group.size, -1)
        if not group.alone:
            for step in self._steps(pieces.device):
                # What is gathered into one place arrives there; other pieces pass through a buffer.
                direct = isinstance(step.received, slice) and not step.adds
                found = pieces[step.received] if direct else pieces.new_empty(step.arriving, pieces.shape[1])
                group.exchange(_taken(pieces, step.sent), step.to, found, step.source).wait()
                if not direct:
                    _put(pieces, step.received, found, step.adds)
        if self._op == "reduce_scatter":
            self._out.copy_(pieces[max(0, group.index)])

    def _steps(self, device: Any) -> list[Step]:
        """Returns the rounds of this rank, made at the first sum of their kind: their indices stay on the device."""
        group, known, key = self._group, self._reducer.steps, (self._group.name, self.kind, self._op, device)
        if key not in known:
            order = ring_order(group.ranks, self._reducer.node_size, self._reducer.switches)
            rounds = rounds_of(self.kind, group.size, group.index, self._op, self._on_node, order)
            known[key] = [
                Step(each.to, _pieces_index(each.sent, device), each.source, _pieces_index(each.received, device),
                     len(each.received), adds)
                for each, adds in rounds
            ]  # fmt: skip
        return known[key]


def _pieces_index(pieces: Pieces, device: Any) -> slice | Tensor:
    """Returns a slice of neighbouring pieces, else their numbers on the device. (A list as an index would be copied
    there at every use, and the host would wait for it.)"""
    first = pieces[0] if pieces else 0
    if pieces == tuple(range(first, first + len(pieces))):
        return slice(first, first + len(pieces))
    import torch

    from meshwright.device import upload

    return upload(torch.tensor(pieces), device)


def _taken(pieces: Tensor, index: slice | Tensor) -> Tensor:
    return pieces[index] if isinstance(index, slice) else pieces.index_select(0, index)


def _put(pieces: Tensor, index: slice | Tensor, found: Tensor, adds: bool) -> None:
    """Writes what arrived over the pieces, or adds it to them."""
    if isinstance(index, slice):
        pieces[index].add_(found)
    elif adds:
        pieces.index_add_(0, index, found)
    else:
        pieces.index_copy_(0, index, found)
