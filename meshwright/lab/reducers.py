"""The reducer that sums gradients with the algorithms of `lab/algorithms.py`, from sends and receives.

They are meant for study, and for networks on which they are faster than the back end's collectives. This file does not
import torch, so that the planner can use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.lab.algorithms import ALGORITHMS, Pieces, ring_order, rounds_of
from meshwright.lab.pick import algorithm_seconds, fastest, links_of
from meshwright.spec.layout.layout import neighbours_on_node
from meshwright.spec.traffic.ledger import OPERATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.config.comm import LinkConfig
    from meshwright.engine.sharding.buffers import Bucket
    from meshwright.engine.sharding.reducers import LinkCost, PendingReduction
    from meshwright.spec.layout.params import ParamRecord


class AlgorithmReducer(PlainReducer):
    """Sums with one of the algorithms while a sum is waited for.

    `auto` picks the one that is fastest over `links` for each sum, torch's collective included. `node_size` is the
    number of ranks per node, and `switches` has the switch of each node, if known.
    """

    def __init__(
        self, kind: str, node_size: int = 1, links: LinkConfig | None = None, switches: Sequence[int] = ()
    ) -> None:
        self.kind, self.node_size, self.links, self.switches = kind, node_size, links, switches
        self.steps: dict[tuple[Any, ...], list[Step]] = {}  # a cache by group, algorithm, op and device

    def chosen(self, op: str, payload: int, size: int, on_node: int) -> str:
        """Return the algorithm of a sum of `payload` bytes over a group of `size` ranks."""
        if self.kind != "auto" or self.links is None or size == 1:
            return self.kind
        return fastest(links_of(self.links, on_node, self.node_size), op, payload, size, on_node)

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        if ranks == 1:
            return []
        slice_bytes = elements // ranks * element_bytes
        kind = self.chosen(op, elements * element_bytes, ranks, on_node)
        if kind not in ALGORITHMS:
            return super().calls(op, elements, element_bytes, ranks, records, on_node)
        return [("send", len(step.sent) * slice_bytes) for step, _ in rounds_of(kind, ranks, 0, op, on_node)]

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        """Return True only for torch's collective (see `ReducerPlan`): the other algorithms sum after backward."""
        return self.chosen(op, payload, ranks, on_node) not in ALGORITHMS

    def seconds(
        self, network: LinkCost, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        payload = elements * element_bytes
        kind = self.chosen(op, payload, ranks, on_node)
        if kind not in ALGORITHMS:
            return network.collective(op, payload, ranks, on_node)
        return algorithm_seconds(network.links(ranks, on_node), kind, op, payload, ranks, on_node)

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        rounds = Rounds(self, "all_reduce", grads, grads, group)
        return rounds if rounds.kind in ALGORITHMS else super().all_reduce(bucket, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        rounds = Rounds(self, "reduce_scatter", out, grads, group)
        return rounds if rounds.kind in ALGORITHMS else super().reduce_scatter(bucket, out, grads, group)


class GatherToOne(PlainReducer):
    """The naive sum, for comparison: all ranks send their gradients to the first rank, which returns the sum.

    On average a rank sends as much as in a ring, but everything goes through the link of the first rank.
    """

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        return [("all_reduce", elements * element_bytes)]

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        return False

    def seconds(
        self, network: LinkCost, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        return network.through_one(elements * element_bytes, ranks, on_node)

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        return SumThroughFirst(grads, grads, group)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        return SumThroughFirst(out, grads, group)


class SumThroughFirst:
    """A sum through the first rank of a group. All communication happens in `wait`."""

    def __init__(self, out: Tensor, grads: Tensor, group: Group) -> None:
        self._out, self._grads, self._group = out, grads, group

    def wait(self) -> None:
        group, grads = self._group, self._grads
        others = range(1, group.size)
        if group.index == 0:
            received = grads.new_empty(grads.shape)
            # One rank after the other, so that one buffer is enough.
            for other in others:
                group.receive(received, other).wait()
                grads.add_(received)
            for pending in [group.send(grads, other) for other in others]:
                pending.wait()
        elif not group.alone:
            group.send(grads, 0).wait()
            group.receive(grads, 0).wait()
        if self._out is not grads:
            self._out.copy_(grads.view(group.size, -1)[max(0, group.index)])


class Step(NamedTuple):
    """One round. `sent` and `received` index the slices as `_pieces_index` returns them.

    `adds` says that received slices are added to the local ones; otherwise they replace them.
    """

    to: int
    sent: slice | Tensor
    source: int
    received: slice | Tensor
    arriving: int  # the number of slices that are received
    adds: bool


class Rounds:
    """A sum by one of the algorithms. All communication happens in `wait`."""

    def __init__(self, reducer: AlgorithmReducer, op: str, out: Tensor, grads: Tensor, group: Group) -> None:
        self._op, self._out, self._grads, self._group = op, out, grads, group
        self._reducer = reducer
        self._on_node = neighbours_on_node(group.ranks, reducer.node_size)
        self.kind = reducer.chosen(op, grads.nbytes, group.size, self._on_node)

    def wait(self) -> None:
        group = self._group
        pieces = self._grads.view(self._group.size, -1)
        if not group.alone:
            for step in self._steps(pieces.device):
                # Contiguous slices that replace others are received in place. All others need a buffer.
                direct = isinstance(step.received, slice) and not step.adds
                received = pieces[step.received] if direct else pieces.new_empty(step.arriving, pieces.shape[1])
                group.exchange(_take_slices(pieces, step.sent), step.to, received, step.source).wait()
                if not direct:
                    _put_slices(pieces, step.received, received, step.adds)
        if OPERATIONS[self._op].rounds == 1:
            self._out.copy_(pieces[max(0, group.index)])

    def _steps(self, device: Any) -> list[Step]:
        """Return the rounds of this rank, which are cached with their indices on the device."""
        group = self._group
        known = self._reducer.steps
        key = (self._group.name, self.kind, self._op, device)
        if key not in known:
            order = ring_order(group.ranks, self._reducer.node_size, self._reducer.switches)
            rounds = rounds_of(self.kind, group.size, group.index, self._op, self._on_node, order)
            known[key] = [
                Step(round_.to, _pieces_index(round_.sent, device), round_.source,
                     _pieces_index(round_.received, device), len(round_.received), adds)
                for round_, adds in rounds
            ]  # fmt: skip
        return known[key]


def _pieces_index(pieces: Pieces, device: Any) -> slice | Tensor:
    """Return an index of slices: a `slice` if they are neighbours, else a tensor of their numbers on the device.

    A list as an index would be copied to the device at every use, and the host would wait for the copy.
    """
    first = pieces[0] if pieces else 0
    if pieces == tuple(range(first, first + len(pieces))):
        return slice(first, first + len(pieces))
    import torch

    from meshwright.device import upload

    return upload(torch.tensor(pieces), device)


def _take_slices(pieces: Tensor, index: slice | Tensor) -> Tensor:
    return pieces[index] if isinstance(index, slice) else pieces.index_select(0, index)


def _put_slices(pieces: Tensor, index: slice | Tensor, received: Tensor, adds: bool) -> None:
    """Add received slices to the local ones, or replace them. (Contiguous ones that replace are received in place.)"""
    if isinstance(index, slice):
        pieces[index].add_(received)
    elif adds:
        pieces.index_add_(0, index, received)
    else:
        pieces.index_copy_(0, index, received)
