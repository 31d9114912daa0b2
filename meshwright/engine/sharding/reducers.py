"""Reducers: replaceable objects that sum a bucket's gradients over data-parallel ranks.

A reducer knows the bucket that it reduces, may hold state between steps (for example the residuals of a lossy
reduction), and declares its calls to the planner. This file does not import torch, so that the planner can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from meshwright.spec.traffic.placement import ALIGN

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.engine.sharding.buffers import Bucket, FlatBuffer, Slot
    from meshwright.spec.layout.params import ParamRecord

    # The name, the buffer, the tensors with their records by the slot's id, and a function that draws a new tensor.
    SideTensors = tuple[str, FlatBuffer, dict[int, tuple[Tensor, ParamRecord]], Callable[[Slot], None]]


class PendingReduction(Protocol):
    """A reduction in flight. Its result can be used after `wait` (on an accelerator, by kernels launched after it)."""

    def wait(self) -> None: ...


class Links(NamedTuple):
    """The speed of a group's links: bytes per second of a rank's link into its node (`link`) and of the group's share
    of the node's adapters (`network`), and the latency of a message over either in seconds.

    `extra` are further seconds that each round takes.
    """

    link: float
    network: float
    link_s: float
    network_s: float
    extra: float = 0.0


class LinkCost(Protocol):
    """The planner's cost model of the links: the seconds of a call with `payload` bytes over a group of `ranks`.

    `on_node` is the number of the group's ranks on one node.
    """

    def collective(self, op: str, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of a collective of the back end (NCCL, Gloo)."""

    def links(self, ranks: int, on_node: int) -> Links:
        """Return the links of a group, as a reducer's own sends and receives use them."""

    def through_one(self, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of a sum that passes all data through one rank (a parameter server)."""


class ReducerPlan(Protocol):
    """The part of a reducer that the planner uses."""

    @property
    def mixes(self) -> bool:
        """True if the sum of an element depends on other elements of its bucket, or on random numbers.

        Ranks that hold copies of a parameter would then compute different sums. So such a reducer is used only for
        buckets without copies and without vectors (`BufferKey.compressed`); others are summed by the plain reducer.
        """

    @property
    def align(self) -> int:
        """The alignment, in elements, of parameters and of ranks' slices in buckets whose elements are mixed.

        A reducer that works on blocks of this many elements then has the same blocks in every layout.
        """

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        """Return the (op, payload bytes) of the calls that one rank's ledger counts for one `op` of this reducer.

        `op` is all_reduce or reduce_scatter of this many elements over a group of this many ranks. `records` are those
        of a whole bucket's parameters, and empty if a shard is summed over replicas. `on_node` is the number of
        neighbouring ranks of the group that are on one node.
        """

    def of_rank(self, op: str, sent: tuple[int, int], ranks: int, index: int) -> tuple[int, int]:
        """Return the (payload, wire) bytes of rank `index` of a group in its calls of `op`, from their mean `sent`."""

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        """Return the bytes that a rank holds between steps for a bucket of this many gradients.

        `gathered` is the number of elements that this rank sums for all others, if the reducer works in this way.
        """

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        """Return True if a sum of this size begins during backward."""

    def seconds(
        self, network: LinkCost, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        """Return the seconds of the sum whose calls `calls` lists, without the time for compressing messages."""


class Reducer(ReducerPlan, Protocol):
    """Sums gradients over a group.

    It communicates only with methods of the group that it is given, in the same order on every rank, when a sum is
    requested or in `wait`. The group may have a single rank; its collectives then do nothing.
    """

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        """Allocate states. It is called once, before any gradient exists."""

    def begin_step(self, step: int, scale: float) -> None:
        """Prepare for a step, before its first gradient.

        Gradients are stored multiplied by `scale`, which may change from step to step.
        """

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        """Begin to replace `grads` by their sum over `group`.

        In ZeRO stage 0 they are the gradients of the whole bucket. If shards are replicated (`zero.shard_group=node`),
        they are this rank's shard, already summed inside the node.
        """

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        """Begin to set `out` to this rank's shard of the sum over `group` of `grads`, the whole bucket's gradients.

        It is called once per step in ZeRO stage 1 and once per micro-batch in stages 2 and 3. No other code uses
        `grads` before `wait` returns, so a reducer may overwrite them.
        """

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        """Yield the states that a checkpoint must hold: (name, buffer, one tensor per bucket).

        A tensor covers the whole bucket, this rank's share, or the part of the share that only this rank holds
        (`Split.written`). Such a state is *additive*: only its sum over the ranks that hold an element matters. A
        checkpoint stores one row for each of these ranks, and the ranks of another layout add up the rows assigned to
        them. A layout without a state `x.sums` adds it to `x`.
        """

    def side_states(self) -> Iterator[SideTensors]:
        """Yield further tensors for checkpoints whose shapes differ from those of the parameters (see `SideState`)."""

    def counters(self) -> Mapping[str, float | None]:
        """Return numbers that a checkpoint must hold. They are the same on all ranks."""

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Restore the counters of a checkpoint of any layout, after the states have been loaded."""


class CollectiveSums:
    """The base class of reducers that only use collectives of the back end, at their usual speed."""

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        return [(op, elements * element_bytes)]

    def of_rank(self, op: str, sent: tuple[int, int], ranks: int, index: int) -> tuple[int, int]:
        return sent

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        return True

    def seconds(
        self, network: LinkCost, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        calls = self.calls(op, elements, element_bytes, ranks, records, on_node)
        return sum(network.collective(name, payload, ranks, on_node) for name, payload in calls)


class PlainReducer(CollectiveSums):
    """A reducer that passes every request directly to the group's collective."""

    mixes = False
    align = ALIGN

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        return 0

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        pass

    def begin_step(self, step: int, scale: float) -> None:
        pass

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        return group.all_reduce(grads, wait=False)

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        return group.reduce_scatter(out, grads, wait=False)

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        return iter(())

    def side_states(self) -> Iterator[SideTensors]:
        return iter(())

    def counters(self) -> Mapping[str, float | None]:
        return {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        pass


PLAIN_REDUCER = PlainReducer()


def mixing_alignment(*plans: ReducerPlan) -> int:
    """Return the alignment of parameters in buffers that one of these reducers mixes, or 0 if none of them mixes."""
    return max((plan.align for plan in plans if plan.mixes), default=0)
