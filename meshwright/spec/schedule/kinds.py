"""The schedules: per kind one pure function from sizes to the order of computes on a rank, where its stages live, and
one shared function that adds the transfers. `build` is the way in; `register` adds a kind."""

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

LARGEST_TABLE = 2**21  # stages x micro-batches of a table; a larger one would fill gigabytes


def looped(pp: int, chunks: int) -> Placement:
    """The placement that goes round the ranks once per chunk: stage = chunk * pp + rank."""
    return tuple((rank, chunk) for chunk in range(chunks) for rank in range(pp))


Order = Callable[[int, int, int, int], list[Action]]  # of one rank's computes: (pp, micro-batches, chunks, rank)


@dataclass(frozen=True)
class Kind:
    """One kind of schedule, and all that anybody has to know of it. `placement(pp, chunks)` gives the (rank, chunk) of
    each stage, a rank's chunks numbered in the order of their stages. `in_flight(pp, micro_batches, chunks, rank)` is,
    where there is a closed formula, the most micro-batches, of one chunk each, in flight on a rank (`most_held`);
    without one they are counted in the table. `seconds(ranks, micro_batches, chunks)` is in the same way a closed
    formula of the step, within a few percent of the table's, of what each rank takes for a micro-batch."""

    order: Order
    placement: Callable[[int, int], Placement] = looped
    chunks: tuple[int, ...] = ()  # the numbers of chunks per rank that it can run (empty: any)
    trains: bool = True
    in_flight: Callable[[int, int, int, int], int] | None = None
    seconds: Callable[[Sequence[PhaseTimes], int, int], float] | None = None

    def takes(self, chunks: int) -> bool:
        return not self.chunks or chunks in self.chunks


def gpipe(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """All forwards, then all backwards: simple, and every micro-batch's activations are alive at once. Backwards run in
    the forwards' order, so that gradients add up in the same order under every kind."""
    return [Action(op, i, 0) for op in (Op.FORWARD, Op.BACKWARD) for i in range(micro_batches)]


def one_forward_one_backward(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """1F1B: gpipe's bubble with at most pp - rank activations alive, since after a warm-up of forwards every
    forward is followed by the backward that frees the oldest."""
    forwards = [Action(Op.FORWARD, i, 0) for i in range(micro_batches)]
    backwards = [Action(Op.BACKWARD, i, 0) for i in range(micro_batches)]
    return _alternate(forwards, backwards, warm_up=pp - rank - 1)


def zero_bubble_h1(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """ZB-H1 of "Zero Bubble Pipeline Parallelism": 1F1B whose weight gradients fill the gaps. A rank computes the
    input gradients as early as 1F1B does and each weight gradient `rank` micro-batches later, so that every rank has
    as many micro-batches in flight as the first one of 1F1B. Bubble: (pp - 1) x (F + I - W)."""
    forwards, inputs, weights = (
        [Action(op, i, 0) for i in range(micro_batches)] for op in (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
    )
    warm_up = pp - rank - 1
    due, order = iter(weights), []
    for action in _alternate(forwards, inputs, warm_up):
        order.append(action)
        # In the cool-down a weight gradient follows every input gradient: the next one is still on its way.
        if action.op is Op.INPUT_GRAD and action.micro_batch >= min(rank, micro_batches - warm_up):
            order.append(next(due))
    return [*order, *due]


def interleaved(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Interleaved 1F1B: each rank holds `chunks` thin stages and takes micro-batches through them in groups of pp:
    the bubble is smaller by `chunks`. When the first group is not full it is planned as if it were, and micro-batches
    that don't exist are struck out: dependencies never cross micro-batches, so what remains is as sound as the full
    order and needs no more memory. (Larger groups would have a smaller bubble then, and more activations alive.)"""
    if chunks == 1:
        return one_forward_one_backward(pp, micro_batches, chunks, rank)
    order = _rounds(pp, micro_batches, chunks)
    forwards = [Action(Op.FORWARD, i, chunk) for i, chunk in order]
    backwards = [Action(Op.BACKWARD, i, chunks - 1 - chunk) for i, chunk in order]
    planned = _alternate(forwards, backwards, warm_up=2 * (pp - rank - 1) + (chunks - 1) * pp)
    return [action for action in planned if action.micro_batch >= 0]


def forward_only(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Validation: every micro-batch once through the pipeline."""
    return [Action(Op.FORWARD, i, chunk) for i, chunk in _rounds(pp, micro_batches, chunks) if i >= 0]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + [action for pair in pairs for action in pair] + backwards[steady:]


def _rounds(pp: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in groups of pp micro-batches, each group through all chunks. All groups are full: numbers
    below 0 fill up the first when pp does not divide the micro-batches."""
    missing = -micro_batches % pp
    firsts = range(-missing, micro_batches, pp)
    return [(first + i, chunk) for first in firsts for chunk in range(chunks) for i in range(pp)]


def _few_in_flight(pp: int, micro_batches: int, chunks: int, rank: int) -> int:
    """1F1B, interleaved or not: the warm-up and the forward after it."""
    warm_up = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    return min(micro_batches * chunks, warm_up + 1)


def _one_pass_seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
    """gpipe, 1F1B: (M - 1) x the slowest rank, plus one pass through all of them."""
    return (micro_batches - 1) * max(rank.whole for rank in ranks) + sum(rank.whole for rank in ranks)


def _interleaved_seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
    """The pass takes 1/chunks of its time. If the micro-batches don't fill their last group of p, gaps remain: about
    half of what the missing ones would have taken in all chunks but one (within 8 % of the tables where M >= p)."""
    slowest, missing = max(rank.whole for rank in ranks), -micro_batches % len(ranks) if chunks > 1 else 0
    gaps = missing * (chunks - 1) / 2 / chunks
    return (micro_batches + gaps) * slowest + (sum(rank.whole for rank in ranks) - slowest) / chunks


def _zero_bubble_seconds(ranks: Sequence[PhaseTimes], micro_batches: int, chunks: int) -> float:
    """M x the slowest rank and F + I - W of the others; with few micro-batches, one pass of F + I through all ranks."""
    slowest, passing = max(ranks, key=lambda rank: rank.whole), [rank.whole - rank.weights for rank in ranks]
    gaps = [max(0.0, rank.whole - 2 * rank.weights) for rank in ranks]
    full = micro_batches * slowest.whole + sum(gaps) - max(0.0, slowest.whole - 2 * slowest.weights)
    return max(full, sum(passing) + (micro_batches - 1) * max(passing) + ranks[0].weights)


KINDS = Registry("pipeline.schedule", {
    "gpipe": Kind(gpipe, chunks=(1,), in_flight=lambda pp, micro_batches, *_: micro_batches, seconds=_one_pass_seconds),
    "1f1b": Kind(one_forward_one_backward, chunks=(1,), in_flight=_few_in_flight, seconds=_one_pass_seconds),
    "zb-h1": Kind(
        zero_bubble_h1, chunks=(1,), in_flight=lambda pp, micro_batches, *_: min(pp, micro_batches),
        seconds=_zero_bubble_seconds,
    ),
    "interleaved": Kind(interleaved, in_flight=_few_in_flight, seconds=_interleaved_seconds),
    "forward_only": Kind(forward_only, trains=False),
})  # fmt: skip


def register(name: str, kind: Kind) -> None:
    """Add a schedule that configs can name."""
    KINDS.register(name, kind)


def training_kinds(chunks: int | None = None) -> list[str]:
    """The names of the schedules that train, those with so many chunks per rank if the number is given."""
    return [name for name, kind in KINDS.items() if kind.trains and (chunks is None or kind.takes(chunks))]


def default_kind(chunks: int) -> str:
    """The schedule for so many chunks per rank where nobody names one."""
    return "1f1b" if chunks == 1 else "interleaved"


def placement_of(kind: str, pp: int, chunks: int) -> Placement:
    """Where each stage lives under a kind of schedule: its (pipeline rank, chunk)."""
    return KINDS[kind].placement(pp, chunks)


def ends_of(kind: str, pp: int, chunks: int) -> tuple[int, int]:
    """The pipeline ranks of the first stage and of the last."""
    placement = placement_of(kind, pp, chunks)
    return placement[0][0], placement[-1][0]


def computes(kind: str, pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """What one rank computes, in order: its list without all that moves data."""
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
    """The table of a schedule for `pp` pipeline ranks, each with `chunks` stages, and `micro_batches`; from ZeRO stage
    2 on with what is done about the data-parallel ranks' shares. The table of its `validation` has the stages where
    training has them, and forwards alone."""
    return with_shares(with_transfers(compute_table(kind, pp, micro_batches, chunks, validation)), zero_stage)


def compute_table(kind: str, pp: int, micro_batches: int, chunks: int = 1, validation: bool = False) -> Table:
    """Return the table of `build` without transfers: enough for its times."""
    _check(kind, pp, micro_batches, chunks)
    name = "forward_only" if validation else kind
    ranks = tuple(tuple(KINDS[name].order(pp, micro_batches, chunks, rank)) for rank in range(pp))
    return Table(name, pp, micro_batches, chunks, ranks, placement_of(kind, pp, chunks))


def with_shares(table: Table, zero_stage: int) -> Table:
    """Stage 2: after each compute that completes weight gradients (and its send), their shares are added up. Stage 3
    also: around each compute that uses weights, its chunk's are fetched and freed."""
    if zero_stage < 2:
        return table
    ranks = []
    for actions in table.ranks:
        out: list[Action] = []
        due: list[Action] = []
        for action in actions:
            meaning = MEANING.get(action.op)
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
    """A table of computes with the sends and receives between ranks added.

    The computes of all ranks are put in one global order, that in which they end when a backward takes twice a forward,
    and each transfer happens at once after the compute that feeds it. Every rank's list is its part of that one order,
    so no set of ranks can wait in a circle even if every send blocks until its receive is reached, and any two ranks
    list their common transfers alike, in both directions taken together. A send directly follows its compute; a receive
    stands before whatever the receiver is computing when the tensor comes, so that posting it there, without waiting,
    never holds the sender up.
    """
    simulation = simulate(table, forward=1.0 * table.chunks, backward=2.0 * table.chunks)
    ended = [(timed.end, rank, timed.action) for rank, row in enumerate(simulation.ranks) for timed in row]
    ranks: list[list[Action]] = [[] for _ in range(table.pp)]
    for _, rank, action in sorted(ended, key=lambda item: item[:2]):
        ranks[rank].append(action)
        direction = MEANING[action.op].direction
        taker = table.beside(direction, rank, action.chunk)
        if taker is not None and taker[0] != rank:
            peer, chunk = taker
            ranks[rank].append(Action(SEND_IN[direction], action.micro_batch, action.chunk, peer))
            ranks[peer].append(Action(RECEIVE_IN[direction], action.micro_batch, chunk, rank))
    return replace(table, ranks=tuple(tuple(actions) for actions in ranks))
