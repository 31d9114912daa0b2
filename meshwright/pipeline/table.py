"""A pipeline schedule as plain data: for every pipeline rank, the list of actions it takes, in order.

Generators write these tables, and the executor, the verifier, the simulator and the drawing all read the
same one; none of them knows a schedule by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Op(StrEnum):
    """What a rank does in one action: compute on one chunk of its layers, move one tensor, or, where the
    data-parallel ranks own shares, fetch a chunk's weights, free them, or add up its gradients' shares."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    GATHER = "gather"
    FREE = "free"
    REDUCE = "reduce"

    __hash__ = str.__hash__  # Enum's own is written in Python, and tables are looked up by op all the time


# Per compute, the transfers of what it produces, and how far on in the pipeline the taker stands.
SEND_OF = {Op.FORWARD: Op.SEND_FORWARD, Op.BACKWARD: Op.SEND_BACKWARD}
RECV_OF = {Op.FORWARD: Op.RECV_FORWARD, Op.BACKWARD: Op.RECV_BACKWARD}
STEP = {Op.FORWARD: 1, Op.BACKWARD: -1}

# Per transfer, the compute whose result it carries.
SENT = {send: compute for compute, send in SEND_OF.items()}
RECEIVED = {recv: compute for compute, recv in RECV_OF.items()}


# What concerns the shares of the data-parallel ranks alone: it takes part in no dependency between stages.
SHARDING = (Op.GATHER, Op.FREE, Op.REDUCE)


@dataclass(frozen=True, slots=True)
class Action:
    """One line of a rank's list.

    `chunk` is always this rank's own: on a send the chunk that produced the tensor, on a receive the chunk
    that will consume it. `peer` is the pipeline rank of the other end of a transfer, None for a compute.
    """

    op: Op
    micro_batch: int
    chunk: int
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.op.value} of micro-batch {self.micro_batch} chunk {self.chunk}"
        if self.peer is None:
            return text
        return f"{text} {'to' if self.op in SENT else 'from'} rank {self.peer}"


Place = tuple[int, int]


@dataclass(frozen=True)
class Table:
    """A whole schedule: `ranks[r]` is the ordered list of pipeline rank r.

    The model is cut into `pp * chunks` consecutive stages; `placement[stage]` is the (rank, chunk) that holds
    it. Neighbouring stages on one rank hand over locally: there are no transfers between them.
    """

    kind: str
    pp: int
    micro_batches: int
    chunks: int
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[Place, ...]

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def has_backward(self) -> bool:
        return self.kind != "forward_only"

    @cached_property
    def _stage_of(self) -> dict[Place, int]:
        return {place: stage for stage, place in enumerate(self.placement)}

    def stage(self, rank: int, chunk: int) -> int:
        """The position in the pipeline of a rank's chunk, 0 at the embedding."""
        return self._stage_of[rank, chunk]

    def place(self, stage: int) -> Place:
        """The (rank, chunk) that holds a stage."""
        return self.placement[stage]

    def consumer(self, op: Op, rank: int, chunk: int) -> Place | None:
        """The (rank, chunk) that takes what this compute produces, None at the pipeline's end."""
        return self._beside[STEP[op], rank, chunk]

    def producer(self, op: Op, rank: int, chunk: int) -> Place | None:
        """The (rank, chunk) whose result this compute takes in, None at the pipeline's end."""
        return self._beside[-STEP[op], rank, chunk]

    @cached_property
    def _beside(self) -> dict[tuple[int, int, int], Place | None]:
        """Who holds the next stage (1) and the one before (-1), by (step, rank, chunk)."""
        padded = (None, *self.placement, None)
        return {
            (step, rank, chunk): padded[1 + stage + step]
            for stage, (rank, chunk) in enumerate(self.placement)
            for step in (1, -1)
        }


def action_counts(actions: Iterable[Action]) -> dict[str, int]:
    """How many actions of each kind, and `in_flight`: the most forwards at once that waited for their backward."""
    counts: dict[str, int] = {}
    waiting = most = 0
    for action in actions:
        counts[action.op.value] = counts.get(action.op.value, 0) + 1
        waiting += {Op.FORWARD: 1, Op.BACKWARD: -1}.get(action.op, 0)
        most = max(most, waiting)
    return dict(sorted(counts.items())) | {"in_flight": most}


def looped(pp: int, chunks: int) -> tuple[Place, ...]:
    """The placement that goes round the ranks once per chunk: stage = chunk * pp + rank."""
    return tuple((rank, chunk) for chunk in range(chunks) for rank in range(pp))
