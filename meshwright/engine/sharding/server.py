"""A parameter server, for study: some of the data-parallel ranks sum the gradients of all and send the sums back.

Server j of k sums the j-th of k equal pieces of every bucket. All ranks push their pieces to the servers, which add
them up in the order of the ranks, and then every rank pulls the sums. So a server receives and sends n / k buckets in
a group of n ranks, where a ring spreads the same bytes evenly over all ranks.

With a staleness of s, a rank's gradients of a step reach the servers 0 to s steps late, and are summed with what the
others send then: they were computed with weights that are up to s updates old. How late is drawn for each rank and
step from the seed, as if ranks had different speeds; nobody is waited for more than s steps, and every gradient is
summed once. So a run can be repeated to the bit, which a server that sums whatever has arrived can't. No torch at the
top of this file, so that the planner can ask it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshwright.engine.sharding.reducers import PlainReducer
from meshwright.spec.layout.params import stream_seed

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.engine.sharding.buffers import Bucket, FlatBuffer
    from meshwright.engine.sharding.reducers import Network, PendingReduction
    from meshwright.spec.layout.params import ParamRecord

WIDE_BYTES = 4  # late gradients are kept in float32 at least


def steps_late(seed: int, step: int, rank: int, staleness: int) -> int:
    """Returns how many steps late the gradients of a step reach the servers from a rank of the data-parallel group."""
    return stream_seed(seed, "server", step, rank) % (staleness + 1)


def rank_bytes(servers: int, ranks: int, index: int, summed: int) -> tuple[int, int]:
    """Return (payload, bytes that leave it) of one rank of a group that sums so many bytes: a push of everything, and
    of a server a pull of its piece by every rank. What a server sends to itself stays."""
    piece, serves = summed // servers, index < servers
    return (summed + ranks * piece, summed + (ranks - 2) * piece) if serves else (summed, summed)


class ServerReducer(PlainReducer):
    """Sums through `servers` ranks of the group."""

    def __init__(self, servers: int, staleness: int = 0, seed: int = 0) -> None:
        self.servers, self.staleness, self.seed = servers, staleness, seed
        self._step, self._scale = 1, 1.0
        self._buffers: Sequence[FlatBuffer] = ()
        self._late: dict[Bucket, deque[Tensor]] = {}  # what arrives in one step, in two, ...

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        """The mean of all ranks: servers send more than others, which the sum over the ranks does not show."""
        return [("all_to_all", elements * element_bytes)] * 2

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        return False

    def seconds(
        self, network: Network, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        """See `ReducerPlan`: each server serves so many ranks."""
        crowded = ranks / self.servers
        return crowded * super().seconds(network, op, elements, element_bytes, ranks, records, on_node)

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        return self.staleness * elements * max(WIDE_BYTES, element_bytes)

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        import torch

        from meshwright.engine.sharding.compression.residual import wide

        self._buffers = buffers
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            size, like = bucket.stop - bucket.start, bucket.own_grads
            new = (torch.zeros(size, dtype=wide(like.dtype), device=like.device) for _ in range(self.staleness))
            self._late[bucket] = deque(new)

    def begin_step(self, step: int, scale: float) -> None:
        self._step, self._scale = step, scale

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        if self.staleness:
            self._delay(self._late[bucket], grads, max(0, group.index))
        return Serving(self, grads, group)

    def _delay(self, late: deque[Tensor], grads: Tensor, rank: int) -> None:
        """Replaces a rank's gradients by those that reach the servers in this step."""
        steps, arriving = steps_late(self.seed, self._step, rank, self.staleness), late.popleft()
        held = grads.to(arriving.dtype).div(self._scale) if steps else None
        grads.zero_() if steps else None
        grads.add_(arriving, alpha=self._scale)
        late.append(arriving.zero_())
        if held is not None:
            late[steps - 1].add_(held)

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        for steps in range(self.staleness):
            for buffer in self._buffers:
                yield f"late{steps + 1}", buffer, [self._late[bucket][steps] for bucket in buffer.buckets]


class Serving:
    """A sum through the servers: a push that is under way, and a pull when it is waited for."""

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
        """The elements to or from each rank: a piece for every server, or, of a server, one for every rank."""
        size, servers = self._group.size, self._servers
        takes = [any_ and (all_ranks or rank < servers) for rank in range(size)]
        return [self._width if each else 0 for each in takes]

    def wait(self) -> None:
        group = self._group
        if group.alone:
            return
        self._pending.wait()
        found = self._pushed
        if self._serves:
            pieces = found.view(group.size, self._width)
            total = pieces[0].clone()
            for piece in pieces[1:]:
                total += piece
            found = total.repeat(group.size)
        group.all_to_all(
            self._grads, found, sends=self._parts(self._serves, all_ranks=True), receives=self._parts(True)
        )
