"""How a bucket's gradients are summed over data-parallel ranks, as an object that may be replaced.

A reducer is told which bucket it reduces, may keep state of its own between steps (what a lossy reduction left out,
say), and declares its calls to the planner. This file imports no torch, so that the planner can ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.spec.traffic.placement import ALIGN

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.comm.group import Group
    from meshwright.engine.sharding.buffers import Bucket, FlatBuffer, Slot
    from meshwright.spec.layout.params import ParamRecord

    # Name, buffer, tensors and their records by the slot's id, and what draws a new one.
    SideTensors = tuple[str, FlatBuffer, dict[int, tuple[Tensor, ParamRecord]], Callable[[Slot], None]]


class PendingReduction(Protocol):
    """A reduction under way. After `wait` the result can be used (on an accelerator, by what is launched after it)."""

    def wait(self) -> None: ...


class Network(Protocol):
    """The links between ranks as the planner prices them: seconds of a sum or another call of `payload` bytes over a
    group of `ranks`, so many of which are on one node."""

    def collective(self, op: str, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of a collective of the back end."""

    def algorithm(self, kind: str, op: str, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of one of our own algorithms."""

    def through_one(self, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of a sum for which everything passes through one rank."""


class ReducerPlan(Protocol):
    """What the planner needs to know of a reducer."""

    @property
    def mixes(self) -> bool:
        """Whether what becomes of an element depends on others of its bucket, or on random numbers. Ranks that hold
        copies of a parameter would then not find the same sums, so such a reducer is only asked for buckets without
        copies and without vectors (`BufferKey.compressed`); the others are summed plainly."""

    @property
    def align(self) -> int:
        """Where elements are mixed: parameters, and the pieces of ranks, begin at multiples of so many elements, so
        that whoever works on blocks of as many finds the same ones in every layout that cuts between them."""

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        """The (op, payload bytes) that one rank's ledger counts when `op`, all_reduce or reduce_scatter, is asked of
        this reducer for so many gradients over a group of so many ranks. `records` are those of a whole
        bucket's parameters; there are none where a share is summed over replicas. `on_node`: neighbours of the group
        that are on one node."""

    def state_bytes(self, elements: int, element_bytes: int, gathered: int = 0) -> int:
        """The bytes that a rank keeps between steps for a bucket of so many gradients. `gathered`: those of them whose
        sum this rank makes and all others get, where they do."""

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        """Return True if a sum of this size begins during backward."""

    def seconds(
        self, network: Network, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        """Return the seconds of the sum whose calls `calls` lists. (Making compressed messages is not in them.)"""


class Reducer(ReducerPlan, Protocol):
    """Sums gradients over a group. Its collectives are methods of the group that it is given, called in the same order
    on every rank, when it is asked or in `wait`. It is asked for groups of one rank too, where these do nothing."""

    def prepare(self, buffers: Sequence[FlatBuffer]) -> None:
        """Called once, before any gradient exists: the place to allocate states."""

    def begin_step(self, step: int, scale: float) -> None:
        """Called before a step's first gradient. Gradients are stored multiplied by `scale`, which may be another one
        in the next step."""

    def all_reduce(self, bucket: Bucket, grads: Tensor, group: Group) -> PendingReduction:
        """Begins to replace `grads` by their sum over `group`. In ZeRO stage 0 these are the whole bucket's; where
        shards are replicated (`zero.shard_group=node`) they are this rank's share, already summed inside the node."""

    def reduce_scatter(self, bucket: Bucket, out: Tensor, grads: Tensor, group: Group) -> PendingReduction:
        """Begins to set `out` to this rank's share of the sum over `group` of `grads`, the whole bucket's: once per
        step in ZeRO stage 1, once per micro-batch in stages 2 and 3. Nobody else uses `grads` before `wait` returns."""

    def states(self) -> Iterator[tuple[str, FlatBuffer, list[Tensor]]]:
        """Yields what a checkpoint must hold: a name, a buffer, and one tensor per bucket, of the whole bucket, of this
        rank's share, or of the part of it that this rank alone holds (`Split.written`). Such a state is *additive*:
        what counts is its sum over the ranks that hold an element. A checkpoint stores one row for each of them, and
        the ranks of another layout add up the rows assigned to them. A layout without a state `x.sums` adds it to
        `x`."""

    def side_states(self) -> Iterator[SideTensors]:
        """Yields what else a checkpoint must hold, of other shapes than the parameters', see `SideState`."""

    def counters(self) -> Mapping[str, float | None]:
        """Returns numbers that a checkpoint must hold, the same on all ranks."""

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Takes those of a checkpoint, whichever layout saved it, after the states have been filled."""


class CollectiveSums:
    """The base of reducers whose sums are collectives of the back end, each as fast as elsewhere."""

    def calls(
        self, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord] = (),
        on_node: int = 1,
    ) -> Iterable[tuple[str, int]]:  # fmt: skip
        return [(op, elements * element_bytes)]

    def overlaps(self, op: str, payload: int, ranks: int, on_node: int) -> bool:
        return True

    def seconds(
        self, network: Network, op: str, elements: int, element_bytes: int, ranks: int, records: Sequence[ParamRecord],
        on_node: int,
    ) -> float:  # fmt: skip
        calls = self.calls(op, elements, element_bytes, ranks, records, on_node)
        return sum(network.collective(each, payload, ranks, on_node) for each, payload in calls)


class PlainReducer(CollectiveSums):
    """A reducer that makes just the collective that it is asked for."""

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


def mixing(*plans: ReducerPlan) -> int:
    """Returns where parameters begin in buffers that one of these reducers may mix: at multiples of so many elements. 0
    if none of them mixes."""
    return max((plan.align for plan in plans if plan.mixes), default=0)
