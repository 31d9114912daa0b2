"""A pipeline schedule as plain data: for every pipeline rank, the list of actions it takes, in order.

Generators write these tables. The executor, the verifier, the simulator and the drawing read them. None of these knows
a schedule by its name; `MEANING` defines the meaning of each operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple


class Op(StrEnum):
    """The operation of one action.

    A rank computes on one chunk of its layers, or sends or receives one tensor. If its data-parallel group shards
    weights or gradients (ZeRO stages 2 and 3), it also all-gathers a chunk's weights, frees them, or reduces its
    gradients to their shares.
    """

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

    # Enum's own __hash__ is written in Python, which is slow for tables that are looked up by op all the time.
    __hash__ = str.__hash__


class Compute(NamedTuple):
    """The meaning of a compute for one micro-batch and chunk.

    `needs`, `produces` and `releases` name things that the chunk holds: its activations, the two halves of its
    gradient, and the factors of a deferred weight gradient.
    """

    letter: str
    phase: Literal["forward", "backward"]  # the part of a step to which its time counts
    direction: int  # the stage that takes its result: 1 the next one, -1 the previous one, 0 none
    needs: tuple[str, ...]
    produces: tuple[str, ...]
    releases: tuple[str, ...]
    share: float = 1.0  # its fraction of the phase's time
    uses_weights: bool = True  # the chunk's weights must have been gathered


ACTIVATIONS, INPUT, WEIGHT, FACTORS = "activations", "input gradient", "weight gradient", "factors"

# Adding a compute takes a line here and a method of the executor.
MEANING: dict[Op, Compute] = {
    Op.FORWARD: Compute("F", "forward", 1, (), (ACTIVATIONS,), ()),
    Op.BACKWARD: Compute("B", "backward", -1, (ACTIVATIONS,), (INPUT, WEIGHT), (ACTIVATIONS,)),
    Op.INPUT_GRAD: Compute("I", "backward", -1, (ACTIVATIONS,), (INPUT, FACTORS), (ACTIVATIONS,), 0.5),
    Op.WEIGHT_GRAD: Compute("W", "backward", 0, (INPUT, FACTORS), (WEIGHT,), (FACTORS,), 0.5, uses_weights=False),
}


class PhaseTimes(NamedTuple):
    """The seconds of one micro-batch. `weights` is the part of `backward` that computes deferrable weight gradients."""

    forward: float
    backward: float
    weights: float = 0.0

    @property
    def whole(self) -> float:
        return self.forward + self.backward


# The transfers of computed results, with their direction: 1 to the next stage, -1 to the previous one.
SENDS = {Op.SEND_FORWARD: 1, Op.SEND_BACKWARD: -1}
RECEIVES = {Op.RECV_FORWARD: 1, Op.RECV_BACKWARD: -1}
SEND_IN = {direction: op for op, direction in SENDS.items()}
RECEIVE_IN = {direction: op for op, direction in RECEIVES.items()}

# Operations that only concern the shards of the data-parallel ranks. No dependency between stages involves them.
SHARDING = (Op.GATHER, Op.FREE, Op.REDUCE)


@dataclass(frozen=True, slots=True)
class Action:
    """One line of a rank's list.

    `chunk` always belongs to this rank: on a send it is the chunk that produced the tensor, on a receive the one that
    will consume it. `peer` is the rank at the other end of a transfer, and None for a compute.
    """

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
        used = {action.op for actions in self.ranks for action in actions}
        return tuple(op for op in MEANING if op in used)

    @property
    def trains(self) -> bool:
        """True if gradients are computed, so that activations are held until a backward releases them."""
        return any(WEIGHT in MEANING[op].produces for op in self.computes)

    def stage(self, rank: int, chunk: int) -> int:
        """Return the stage number of a rank's chunk. Stage 0 holds the embedding."""
        return self.placement.index((rank, chunk))

    def beside(self, step: int, rank: int, chunk: int) -> Place | None:
        """Return the (rank, chunk) of the next stage (`step` 1) or the previous one (-1). Return None beyond the ends
        of the pipeline and for a `step` of 0."""
        return self._beside[step, rank, chunk]

    @cached_property
    def _beside(self) -> dict[tuple[int, int, int], Place | None]:
        ahead, behind = (*self.placement[1:], None), (None, *self.placement[:-1])
        neighbours: dict[tuple[int, int, int], Place | None] = {}
        for place, after, before in zip(self.placement, ahead, behind, strict=True):
            neighbours |= {(1, *place): after, (-1, *place): before, (0, *place): None}
        return neighbours


def held(op: Op, *names: str) -> int:
    """Return the change that an operation makes to the number of held things `names`: how many of them it produces,
    minus how many it releases."""
    meaning = MEANING.get(op)
    return sum((name in meaning.produces) - (name in meaning.releases) for name in names) if meaning else 0


def most_held(actions: Iterable[Action]) -> int:
    """Return the most micro-batches, of one chunk each, that are in flight on a rank at once in a training step.

    A micro-batch is in flight from its forward until its activations are released, or, if its weight gradients are
    deferred, until their factors are.
    """
    return max(accumulate((held(action.op, ACTIVATIONS, FACTORS) for action in actions), initial=0))


def action_counts(actions: Iterable[Action]) -> dict[str, int]:
    """Count the actions by operation, and add `in_flight`: the most micro-batches in flight at once."""
    actions = tuple(actions)
    counts = Counter(action.op.value for action in actions)
    return dict(sorted(counts.items())) | {"in_flight": most_held(actions)}
