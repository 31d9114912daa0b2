"""The pipeline schedules. `build` makes the table of a schedule, and `register` adds a kind.

Each kind has a pure function from sizes to the order of computes on a rank, and one that assigns stages to ranks. One
shared function adds the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.errors import UserError, either, nearest
from meshwright.plugins import Registry
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.schedule.table import (
    MEANING,
    RECEIVE_IN,
    SEND_IN,
    SENDS,
    WEIGHT,
    Action,
    Op,
    PhaseTimes,
    Placement,
    Table,
)
from meshwright.spec.schedule.v_shaped import dual_pipe_v, v_half, v_placement, zero_bubble_v

# In a config, the schedule that the planner chooses (`plan/schedules.py`). It has no stages and no table.
AUTO_SCHEDULE = "auto"
NOT_CHOSEN = (
    f"pipeline.schedule={AUTO_SCHEDULE} is chosen by `meshwright train`, and for a cluster by `meshwright cost` and "
    "`simulate`: set pipeline.schedule=1f1b or another one here"
)
LARGEST_TABLE = 2**21  # the most stages x micro-batches of a table; a larger one would fill gigabytes of memory


def looped(pp: int, chunks: int) -> Placement:
    """Return the placement that goes round the ranks once per chunk: stage = chunk * pp + rank."""
    return tuple((rank, chunk) for chunk in range(chunks) for rank in range(pp))


Seconds = Callable[[PhaseTimes], float]

# A function from (pp, micro-batches, chunks, rank) to the computes of that rank, in order.
Order = Callable[[int, int, int, int], list[Action]]


@dataclass(frozen=True)
class Kind:
    """One kind of schedule, with all facts about it that other modules use.

    `placement(pp, chunks)` gives the (rank, chunk) of each stage. A rank's chunks are numbered in the order of their
    stages. The other two functions are closed formulas, without which the values are taken from the table:

    - `in_flight(pp, micro_batches, chunks, rank)` is the most micro-batches, of one chunk each, in flight on a rank
      (`most_held`).
    - `seconds(ranks, micro_batches, chunks)` is the time of the pipeline's part of a step, from the times of one
      micro-batch on each rank. It is within a few percent of the simulated table's.
    """

    order: Order
    placement: Callable[[int, int], Placement] = looped
    chunks: tuple[int, ...] = ()  # the numbers of chunks per rank that it can run; empty: any
    trains: bool = True
    in_flight: Callable[[int, int, int, int], int] | None = None
    seconds: Callable[[Sequence[PhaseTimes], int, int], float] | None = None

    def takes(self, chunks: int) -> bool:
        return not self.chunks or chunks in self.chunks


def gpipe(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return all forwards, then all backwards. This is simple, but the activations of all micro-batches are alive at
    once.

    Backwards run in the order of the forwards, so that gradients are added in the same order under every kind.
    """
    return [Action(op, i, 0) for op in (Op.FORWARD, Op.BACKWARD) for i in range(micro_batches)]


def one_forward_one_backward(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of 1F1B. It has gpipe's bubble but at most pp - rank micro-batches in flight, since after a
    warm-up every forward is followed by the backward that frees the oldest activations."""
    forwards = [Action(Op.FORWARD, i, 0) for i in range(micro_batches)]
    backwards = [Action(Op.BACKWARD, i, 0) for i in range(micro_batches)]
    return _alternate(forwards, backwards, warm_up=pp - rank - 1)


def zero_bubble_h1(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of ZB-H1 of "Zero Bubble Pipeline Parallelism": 1F1B whose weight gradients fill the gaps.

    A rank computes input gradients as early as 1F1B does, and each weight gradient `rank` micro-batches later. Every
    rank then has as many micro-batches in flight as the first rank of 1F1B. The bubble is (pp - 1) x (F + I - W).
    """
    return _split_one_by_one(pp, micro_batches, rank, 1)


def zero_bubble_h2(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of ZB-H2, which is ZB-H1 with twice the warm-up: 2 pp - 1 micro-batches are in flight.

    From its first to its last compute a rank is idle for (pp - 1) x (F + I - 2 W), which is 0 if F = I = W.
    """
    return _split_one_by_one(pp, micro_batches, rank, 2)


def _split_one_by_one(pp: int, micro_batches: int, rank: int, depth: int) -> list[Action]:
    """Return 1F1B with `depth` times its warm-up, and weight gradients that follow depth x rank micro-batches later."""
    forwards, inputs, weights = (
        [Action(op, i, 0) for i in range(micro_batches)] for op in (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
    )
    warm_up = depth * (pp - rank - 1)
    due, order = iter(weights), []
    for action in _alternate(forwards, inputs, warm_up):
        order.append(action)
        # In the cool-down a weight gradient follows every input gradient, while the next input gradient is in transit.
        if action.op is Op.INPUT_GRAD and action.micro_batch >= min(depth * rank, micro_batches - warm_up):
            order.append(next(due))
    return [*order, *due]


def interleaved(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of interleaved 1F1B. Each rank holds `chunks` thin stages and takes micro-batches through them
    in groups of pp, which divides the bubble by `chunks`.

    If pp does not divide the micro-batches, the first group is planned as if it were full, and its micro-batches that
    don't exist are removed. Dependencies never cross micro-batches, so the remaining order is as sound as the full one
    and needs no more memory. (Larger groups would then have a smaller bubble, but more activations alive.)
    """
    if chunks == 1:
        return one_forward_one_backward(pp, micro_batches, chunks, rank)
    order = _rounds(pp, micro_batches, chunks)
    forwards = [Action(Op.FORWARD, i, chunk) for i, chunk in order]
    backwards = [Action(Op.BACKWARD, i, chunks - 1 - chunk) for i, chunk in order]
    # The warm-up is that of Megatron-LM's interleaved schedule.
    planned = _alternate(forwards, backwards, warm_up=2 * (pp - rank - 1) + (chunks - 1) * pp)
    return [action for action in planned if action.micro_batch >= 0]


def forward_only(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of validation: every micro-batch passes through the pipeline once."""
    return [Action(Op.FORWARD, i, chunk) for i, chunk in _rounds(pp, micro_batches, chunks) if i >= 0]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + [action for pair in pairs for action in pair] + backwards[steady:]


def _rounds(pp: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) in groups of pp micro-batches, each of which passes through all chunks.

    All groups are full: if pp does not divide the micro-batches, negative numbers fill up the first group.
    """
    missing = -micro_batches % pp
    firsts = range(-missing, micro_batches, pp)
    return [(first + i, chunk) for first in firsts for chunk in range(chunks) for i in range(pp)]


def _few_in_flight(pp: int, micro_batches: int, chunks: int, rank: int) -> int:
    """Return the micro-batches in flight under 1F1B, interleaved or not: the warm-up and the forward after it."""
    warm_up = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    return min(micro_batches * chunks, warm_up + 1)


def _one_pass_seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
    """Return the seconds under gpipe or 1F1B: (M - 1) x the slowest rank's time, plus one pass through all ranks."""
    return (micro_batches - 1) * max(rank.whole for rank in ranks) + sum(rank.whole for rank in ranks)


def _interleaved_seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
    """Return the seconds under interleaved 1F1B, in which the pass through all ranks takes 1/chunks of its time.

    If the micro-batches don't fill all groups of pp, gaps remain. They take about half the time that the missing
    micro-batches would have taken in all chunks but one. (This is within 8 % of the tables where M >= pp.)
    """
    slowest = max(rank.whole for rank in ranks)
    missing = -micro_batches % len(ranks) if chunks > 1 else 0
    gaps = missing * (chunks - 1) / 2 / chunks
    return (micro_batches + gaps) * slowest + (sum(rank.whole for rank in ranks) - slowest) / chunks


def _inputs(rank: PhaseTimes) -> float:
    return rank.backward - rank.weights


def _split_seconds(idle: Seconds, behind: Seconds) -> Callable[[Sequence[PhaseTimes], int, int], float]:
    """Return the formula of a schedule that splits backwards: M x the slowest rank's time, plus `idle` of every other.

    With few micro-batches, a pass of F + I through all ranks takes longer and determines the time. Each further
    micro-batch then follows after the time `behind`.
    """

    def seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
        slowest = max(ranks, key=lambda rank: rank.whole)
        gaps = sum(max(0.0, idle(rank)) for rank in ranks) - max(0.0, idle(slowest))
        passing = sum(rank.forward + _inputs(rank) for rank in ranks)
        few = passing + (micro_batches - 1) * max(map(behind, ranks)) + ranks[0].weights
        return max(micro_batches * slowest.whole + gaps, few)

    return seconds


# The idle times of ZB-H1 and ZB-H2 are exact for equal ranks. That of ZB-H2 includes the wait for the last rank, which
# begins F later than the one before it. Those of the V-shaped schedules were fitted to the simulated tables.
_h1_seconds = _split_seconds(lambda r: r.forward + _inputs(r) - r.weights, lambda r: r.forward + _inputs(r))
_h2_seconds = _split_seconds(
    lambda r: max(r.forward, r.forward + _inputs(r) - 2 * r.weights), lambda r: r.forward + _inputs(r)
)
_v_seconds = _split_seconds(
    lambda r: max(r.forward, _inputs(r), 2 * (_inputs(r) - r.weights)) / 2, lambda r: r.forward + r.weights
)
_dual_seconds = _split_seconds(
    lambda r: max(r.forward, max(r.forward, _inputs(r)) + _inputs(r) - r.weights) / 2,
    lambda r: r.forward + r.weights,
)


def _half_seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
    """Return the seconds under V-Half.

    Where F, I and W differ, the pattern has a gap for every micro-batch: a chain of computes of two neighbours, each of
    which waits for the one before it, is longer than the computes of one rank.
    """

    def gap(r: PhaseTimes) -> float:
        inputs, weights = _inputs(r), r.weights
        chains = (2 * r.forward - inputs - weights, 2 * inputs - r.forward - 2 * weights, r.forward - weights)
        return max(0.0, *chains) / 2

    ends = _split_seconds(lambda r: r.forward + _inputs(r) - r.weights / 2, lambda r: r.forward + r.weights)
    return ends(ranks, micro_batches, chunks) + micro_batches * max(map(gap, ranks))


KINDS = Registry("pipeline.schedule", {
    "gpipe": Kind(gpipe, chunks=(1,), in_flight=lambda pp, micro_batches, *_: micro_batches, seconds=_one_pass_seconds),
    "1f1b": Kind(one_forward_one_backward, chunks=(1,), in_flight=_few_in_flight, seconds=_one_pass_seconds),
    "zb-h1": Kind(
        zero_bubble_h1, chunks=(1,), in_flight=lambda pp, micro_batches, *_: min(pp, micro_batches),
        seconds=_h1_seconds,
    ),
    "zb-h2": Kind(
        zero_bubble_h2, chunks=(1,), in_flight=lambda pp, micro_batches, *_: min(2 * pp - 1, micro_batches),
        seconds=_h2_seconds,
    ),
    "interleaved": Kind(interleaved, in_flight=_few_in_flight, seconds=_interleaved_seconds),
    "zb-v": Kind(
        zero_bubble_v, v_placement, chunks=(2,),
        in_flight=lambda pp, m, _, rank: min(2 * pp, 2 * m, m + rank + 1),
        seconds=_v_seconds,
    ),
    "v-half": Kind(
        v_half, v_placement, chunks=(2,),
        in_flight=lambda pp, m, _, rank: min(pp + 2, 2 * m, m + 1 + (rank + 1) // 2),
        seconds=_half_seconds,
    ),
    "dualpipev": Kind(
        dual_pipe_v, v_placement, chunks=(2,),
        in_flight=lambda pp, m, _, rank: min(2 * pp + 1, 2 * m, m + rank + 1),
        seconds=_dual_seconds,
    ),
    "forward_only": Kind(forward_only, trains=False),
})  # fmt: skip


def register(name: str, kind: Kind) -> None:
    """Add a schedule that configs can name."""
    KINDS.register(name, kind)


def training_kinds(chunks: int | None = None) -> list[str]:
    """Return the names of the schedules that train. If `chunks` is given, only the ones that can run that many chunks
    per rank."""
    return [name for name, kind in KINDS.items() if kind.trains and (chunks is None or kind.takes(chunks))]


def default_kind(chunks: int) -> str:
    """Return the schedule that is used for `chunks` chunks per rank if the config names none."""
    return "1f1b" if chunks == 1 else "interleaved"


def placement_of(kind: str, pp: int, chunks: int) -> Placement:
    """Return the (pipeline rank, chunk) of each stage under a kind of schedule."""
    if kind == AUTO_SCHEDULE:
        raise UserError(NOT_CHOSEN)
    return KINDS[kind].placement(pp, chunks)


def ends_of(kind: str, pp: int, chunks: int) -> tuple[int, int]:
    """Return the pipeline ranks of the first and the last stage."""
    placement = placement_of(kind, pp, chunks)
    return placement[0][0], placement[-1][0]


def computes(kind: str, pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the computes of one rank, in order: its list without transfers and sharding operations."""
    _check(kind, pp, micro_batches, chunks)
    return KINDS[kind].order(pp, micro_batches, chunks, rank)


def _check(kind: str, pp: int, micro_batches: int, chunks: int) -> None:
    if kind not in KINDS:
        raise UserError(f"unknown schedule '{kind}'{nearest(kind, KINDS)}: the kinds are {', '.join(KINDS)}")
    for name, value in (("pp", pp), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"{name}={value} leaves nothing to schedule: give at least 1")
    if not KINDS[kind].takes(chunks):
        known = KINDS[kind].chunks
        holds = "one chunk" if known == (1,) else f"{either(known)} chunks"
        raise UserError(
            f"schedule '{kind}' holds {holds} per rank, not {chunks}: "
            f"use {either(training_kinds(chunks))}, or chunks={either(known)}"
        )
    if pp * micro_batches * chunks > LARGEST_TABLE:
        raise UserError(
            f"pp={pp} x micro_batches={micro_batches} x chunks={chunks} is too large a table: "
            f"keep the product within {LARGEST_TABLE}"
        )


def build(
    kind: str, pp: int, micro_batches: int, chunks: int = 1, zero_stage: int = 0, validation: bool = False
) -> Table:
    """Build the table of a schedule for `pp` pipeline ranks, each with `chunks` stages, and `micro_batches`.

    From ZeRO stage 2 on it includes the operations on the data-parallel ranks' shards. With `validation`, the table has
    forwards only, and the placement of the stages in training.
    """
    return with_shares(with_transfers(compute_table(kind, pp, micro_batches, chunks, validation)), zero_stage)


def compute_table(kind: str, pp: int, micro_batches: int, chunks: int = 1, validation: bool = False) -> Table:
    """Build the table of `build` without transfers and sharding operations, which is enough to simulate its times."""
    _check(kind, pp, micro_batches, chunks)
    name = "forward_only" if validation else kind
    ranks = tuple(tuple(KINDS[name].order(pp, micro_batches, chunks, rank)) for rank in range(pp))
    return Table(name, pp, micro_batches, chunks, ranks, placement_of(kind, pp, chunks))


def with_shares(table: Table, zero_stage: int) -> Table:
    """Add the operations on the data-parallel ranks' shards to a table.

    From ZeRO stage 2 on, each compute that completes weight gradients, and its send, are followed by a reduce. In stage
    3, each compute that uses weights is also preceded by a gather of its chunk's weights and followed by their freeing.
    """
    if zero_stage < 2:
        return table
    ranks = []
    for actions in table.ranks:
        out: list[Action] = []
        due: list[Action] = []
        for action in actions:
            meaning = MEANING.get(action.op)
            # A reduce follows the send of its compute's result, for which another stage waits.
            if action.op not in SENDS:
                out += due
                due = []
            around = [Action(op, action.micro_batch, action.chunk) for op in (Op.GATHER, Op.FREE)]
            fetches = zero_stage == 3 and meaning is not None and meaning.uses_weights
            out += [around[0], action, around[1]] if fetches else [action]
            if meaning is not None and WEIGHT in meaning.produces:
                due = [Action(Op.REDUCE, action.micro_batch, action.chunk)]
        ranks.append(tuple(out + due))
    return replace(table, ranks=tuple(ranks))


def with_transfers(table: Table) -> Table:
    """Add the sends and receives between ranks to a table of computes.

    The computes of all ranks are put in one global order: the order in which they end if a backward takes twice as long
    as a forward. Each transfer follows directly after the compute that feeds it. Every rank's list is its part of this
    global order. Therefore no set of ranks can wait in a circle, even if every send blocks until its receive is
    reached, and any two ranks list their common transfers of both directions in the same order. A send directly follows
    its compute. A receive precedes the compute that the receiver is running when the tensor arrives, so that posting it
    there, without waiting, never delays the sender.
    """
    # The factor cancels the division by chunks, so times are whole numbers and the order is free of rounding.
    simulation = simulate(table, forward=1.0 * table.chunks, backward=2.0 * table.chunks)
    ends = [(timed.end, rank, timed.action) for rank, row in enumerate(simulation.ranks) for timed in row]
    ranks: list[list[Action]] = [[] for _ in range(table.pp)]
    for _, rank, action in sorted(ends, key=lambda item: item[:2]):
        ranks[rank].append(action)
        direction = MEANING[action.op].direction
        consumer = table.beside(direction, rank, action.chunk)
        if consumer is not None and consumer[0] != rank:
            peer, chunk = consumer
            ranks[rank].append(Action(SEND_IN[direction], action.micro_batch, action.chunk, peer))
            ranks[peer].append(Action(RECEIVE_IN[direction], action.micro_batch, chunk, rank))
    return replace(table, ranks=tuple(tuple(actions) for actions in ranks))
