"""A pipeline schedule as plain data: for every pipeline rank, the list of actions it takes, in order. Generators write
these tables, and the executor, the verifier, the simulator and the drawing read them; none of these knows a schedule by
its name, and what an operation means stands in `MEANING`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple


class Op(StrEnum):
    """What a rank does in one action: compute on one chunk of its layers, move one tensor, or, where the
    data-parallel ranks own shares, fetch a chunk's weights, free them, or add up its gradients' shares."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    GATHER = "gather"
    FREE = "free"
    REDUCE = "reduce"

    __hash__ = str.__hash__  # Enum's own is written in Python, and tables are looked up by op all the time


class Compute(NamedTuple):
    """What a compute means for one micro-batch and chunk. `needs`, `produces` and `releases` name what the chunk holds:
    its activations, the two halves of its gradient, and the factors of a weight gradient that comes later."""

    letter: str
    phase: Literal["forward", "backward"]  # the part of a step that it counts as
    direction: int  # of its result: 1 to the next stage, for the same direction's compute there, -1 back, 0 nowhere
    needs: tuple[str, ...]
    produces: tuple[str, ...]
    releases: tuple[str, ...]
    share: float = 1.0  # of the phase's time
    uses_weights: bool = True  # the chunk's weights must be there


ACTIVATIONS, INPUT, WEIGHT, FACTORS = "activations", "input gradient", "weight gradient", "factors"

# A new compute is a line here and a method of the executor.
MEANING: dict[Op, Compute] = {
    Op.FORWARD: Compute("F", "forward", 1, (), (ACTIVATIONS,), ()),
    Op.BACKWARD: Compute("B", "backward", -1, (ACTIVATIONS,), (INPUT, WEIGHT), (ACTIVATIONS,)),
    Op.INPUT_GRAD: Compute("I", "backward", -1, (ACTIVATIONS,), (INPUT, FACTORS), (ACTIVATIONS,), 0.5),
    Op.WEIGHT_GRAD: Compute("W", "backward", 0, (INPUT, FACTORS), (WEIGHT,), (FACTORS,), 0.5, uses_weights=False),
}


class PhaseTimes(NamedTuple):
    """The seconds of one micro-batch. `weights`: those of the backward that find weight gradients that can wait."""

    forward: float
    backward: float
    weights: float = 0.0

    @property
    def whole(self) -> float:
        return self.forward + self.backward


# The transfers of what a compute produces, and the direction in which they go.
SENDS = {Op.SEND_FORWARD: 1, Op.SEND_BACKWARD: -1}
RECEIVES = {Op.RECV_FORWARD: 1, Op.RECV_BACKWARD: -1}
SEND_IN = {direction: op for op, direction in SENDS.items()}
RECEIVE_IN = {direction: op for op, direction in RECEIVES.items()}

# What concerns the shares of the data-parallel ranks alone: it takes part in no dependency between stages.
SHARDING = (Op.GATHER, Op.FREE, Op.REDUCE)


@dataclass(frozen=True, slots=True)
class Action:
    """One line of a rank's list. `chunk` is always this rank's own: on a send the chunk that produced the tensor, on a
    receive the one that will consume it. `peer` is the rank of a transfer's other end, None for a compute."""

    op: Op
    micro_batch: int
    chunk: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.op.value} of micro-batch {self.micro_batch} chunk {self.chunk}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.op in SENDS else 'from'} rank {self.peer}"


Place = tuple[int, int]
Placement = tuple[Place, ...]


@dataclass(frozen=True)
class Table:
    """A whole schedule: `ranks[r]` is the ordered list of pipeline rank r.

    The model is cut into `pp * chunks` consecutive stages; `placement[stage]` is the (rank, chunk) that holds it, and a
    rank numbers its chunks in the order of their stages. Between neighbouring stages on one rank nothing is sent.
    """

    kind: str
    pp: int
    micro_batches: int
    chunks: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: Placement

    @cached_property
    def computes(self) -> tuple[Op, ...]:
        """The computes that occur in this table, in the order of `MEANING`."""
        found = {action.op for actions in self.ranks for action in actions}
        return tuple(op for op in MEANING if op in found)

    @property
    def trains(self) -> bool:
        """Whether gradients are computed, so that activations are held until they are released."""
        return any(WEIGHT in MEANING[op].produces for op in self.computes)

    def stage(self, rank: int, chunk: int) -> int:
        """The position in the pipeline of a rank's chunk, 0 at the embedding."""
        return self.placement.index((rank, chunk))

    def beside(self, step: int, rank: int, chunk: int) -> Place | None:
        """The (rank, chunk) `step` stages further on (1) or back (-1); None beyond the ends and for a step of 0."""
        return self._beside[step, rank, chunk]

    @cached_property
    def _beside(self) -> dict[tuple[int, int, int], Place | None]:
        ahead, behind = (*self.placement[1:], None), (None, *self.placement[:-1])
        found: dict[tuple[int, int, int], Place | None] = {}
        for place, after, before in zip(self.placement, ahead, behind, strict=True):
            found |= {(1, *place): after, (-1, *place): before, (0, *place): None}
        return found


def held(op: Op, *names: str) -> int:
    """Return how many chunks hold one of these things more (1) or fewer (-1) after this operation."""
    meaning = MEANING.get(op)
    return sum((name in meaning.produces) - (name in meaning.releases) for name in names) if meaning else 0


def most_held(actions: Iterable[Action]) -> int:
    """Return the most micro-batches, of one chunk each, that are in flight on a rank at once in a training step: from
    their forward until their activations are released or, where weight gradients come later, the factors of those."""
    return max(accumulate((held(action.op, ACTIVATIONS, FACTORS) for action in actions), initial=0))


def action_counts(actions: Iterable[Action]) -> dict[str, int]:
    """How many actions of each kind, and `in_flight`: the most micro-batches at once."""
    actions = tuple(actions)
    counts = Counter(action.op.value for action in actions)
    return dict(sorted(counts.items())) | {"in_flight": most_held(actions)}
