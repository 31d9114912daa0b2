"""A parameter server, for study: some of the data-parallel ranks sum the gradients of all and send the sums back.

Server j of k sums the j-th of k equal slices of every bucket. All ranks push their slices to the servers, which add
them up in the order of the ranks, and then every rank pulls the sums. So a server receives and sends n / k buckets in
a group of n ranks, while a ring spreads the same bytes evenly over all ranks.

With a staleness of s, a rank's gradients of a step reach the servers 0 to s steps late, and are summed with the
gradients that arrive in that step. They were computed with weights that are up to s updates old. The delay of each rank
and step is drawn from the seed, as if ranks had different speeds. No gradient is more than s steps late, and each is
summed exactly once. So a run is reproducible bit for bit, unlike one with a server that sums whatever has arrived.

This file imports torch only when it is needed, so that the planner can use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.spec.layout.params import stream_seed
from meshwright.spec.traffic.ledger import OPERATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
    from meshwright.engine.sharding.reducers import LinkCost, PendingReduction
    from meshwright.spec.layout.params import ParamRecord

WIDE_BYTES = 4  # Late gradients are held in float32 or wider.


def steps_late(seed: int, step: int, rank: int, staleness: int) -> int:
    """Return the number of steps after which a data-parallel rank's gradients of a step reach the servers."""
    return stream_seed(seed, "server", step, rank) % (staleness + 1)


def rank_bytes(servers: int, ranks: int, index: int, summed: int) -> tuple[int, int]:
    """Return (payload, wire bytes) that one rank of a group sends for a sum of `summed` bytes.

    Every rank pushes all its gradients. A server also sends its slice of the sum to every rank. Bytes that a server
    sends to itself are part of the payload, but not of the wire bytes.
    """
    if index >= servers:
        return summed, summed
    slice_bytes = summed // servers
    return summed + ranks * slice_bytes, summed + (ranks - 2) * slice_bytes


class ServerReducer(PlainReducer):
    """Sums through the first `servers` ranks of the group."""

    def __init__(self, servers: int, staleness: int = 0, seed: int = 0) -> None:
        self.servers, self.staleness, self.seed = servers, staleness, seed
        self._step, self._scale = 1, 1.0
        self._buffers: Sequence[FlatBuffer] = ()
        self._late: dict[Bucket, deque[Tensor]] = {}  # the sums that arrive in one step, in two, ...

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        """Return the mean calls of a rank. Servers send more than other ranks, but the ledger sums over ranks."""
        return [("all_to_all", elements * element_bytes)] * 2

    def of_rank(self, op: str, sent: tuple[int, int], ranks: int, index: int) -> tuple[int, int]:
        return rank_bytes(self.servers, ranks, index, sent[0] // 2) if OPERATIONS[op].is_exchange else sent

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        return False

    def seconds(
        self, network: LinkCost, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        """Return the seconds of a sum (see `ReducerPlan`), which grow with the number of ranks per server."""
        ranks_per_server = ranks / self.servers
        return ranks_per_server * super().seconds(network, op, elements, element_bytes, ranks, records, on_node)

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        return self.staleness * elements * max(WIDE_BYTES, element_bytes)

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        import torch

        from meshwright.engine.sharding.compression.residual import wide

        self._buffers = buffers
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            size = bucket.stop - bucket.start
            like = bucket.own_grads
            new = (torch.zeros(size, dtype=wide(like.dtype), device=like.device) for _ in range(self.staleness))
            self._late[bucket] = deque(new)

    def begin_step(self, step: int, scale: float) -> None:
        self._step, self._scale = step, scale

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if self.staleness:
            self._delay(self._late[bucket], grads, max(0, group.index))
        return ServerSum(self, grads, group)

    def _delay(self, late: deque[Tensor], grads: Tensor, rank: int) -> None:
        """Replace a rank's gradients by those that reach the servers in this step."""
        steps = steps_late(self.seed, self._step, rank, self.staleness)
        arriving = late.popleft()
        # Held gradients are stored without the loss scale, which may change before they arrive.
        held = None
        if steps:
            held = grads.to(arriving.dtype).div(self._scale)
            grads.zero_()
        grads.add_(arriving, alpha=self._scale)
        late.append(arriving.zero_())
        if held is not None:
            late[steps - 1].add_(held)

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        for steps in range(self.staleness):
            for buffer in self._buffers:
                yield f"late{steps + 1}", buffer, [self._late[bucket][steps] for bucket in buffer.buckets]


class ServerSum:
    """A sum through the servers. The push is in flight; the pull happens in `wait`."""

    def __init__(self, reducer: ServerReducer, grads: Tensor, group: Group) -> None:
        self._grads, self._group, self._servers = grads, group, reducer.servers
        if group.alone:
            return
        self._width = grads.numel() // self._servers
        self._serves = group.index < self._servers
        self._pushed = grads.new_empty(group.size * self._width if self._serves else 0)
        self._pending = group.all_to_all(
            self._pushed, grads, wait=False, sends=self._parts(True), receives=self._parts(self._serves, all_ranks=True)
        )

    def _parts(self, any_: bool, all_ranks: bool = False) -> list[int]:
        """Return the elements to or from each rank: one slice per server, or with `all_ranks` one per rank.

        Without `any_` all are zero.
        """
        size, servers = self._group.size, self._servers
        takes_part = [any_ and (all_ranks or rank < servers) for rank in range(size)]
        return [self._width if takes else 0 for takes in takes_part]

    def wait(self) -> None:
        group = self._group
        if group.alone:
            return
        self._pending.wait()
        sums = self._pushed
        if self._serves:
            # In the order of the ranks, so that the sum is the same in every run.
            first, *others = sums.view(group.size, self._width)
            total = first.clone()
            for pushed in others:
                total += pushed
            sums = total.repeat(group.size)
        group.all_to_all(self._grads, sums, sends=self._parts(self._serves, all_ranks=True), receives=self._parts(True))
