"""The schedules: per kind one pure function from sizes to the order of computes on a rank, and one shared
function that adds the transfers. `build` is the way in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwright.config.sections import LARGEST_TABLE
from meshwright.errors import UserError, nearest
from meshwright.pipeline.simulate import simulate
from meshwright.pipeline.table import RECV_OF, SEND_OF, STEP, Action, Op, Table, looped


def gpipe(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """All forwards, then all backwards: simple, and every micro-batch's activations are alive at once.

    Backwards run in the forwards' order, so that gradients add up in the same order under every kind.
    """
    return [Action(op, i, 0) for op in (Op.FORWARD, Op.BACKWARD) for i in range(micro_batches)]


def one_forward_one_backward(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """1F1B: gpipe's bubble with at most pp - rank activations alive, since after a warm-up of forwards every
    forward is followed by the backward that frees the oldest."""
    forwards = [Action(Op.FORWARD, i, 0) for i in range(micro_batches)]
    backwards = [Action(Op.BACKWARD, i, 0) for i in range(micro_batches)]
    return _alternate(forwards, backwards, warm_up=pp - rank - 1)


def interleaved(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Interleaved 1F1B: each rank holds `chunks` thin stages and takes micro-batches through them in groups
    of pp, which cuts the bubble by `chunks`.

    When the first group is not full it is planned as if it were, and the micro-batches that don't exist are
    struck out: dependencies never cross micro-batches, so what remains is as sound as the full order and
    needs no more memory. (Larger groups would have a smaller bubble then, and more activations alive.)
    """
    if chunks == 1:
        return one_forward_one_backward(pp, micro_batches, chunks, rank)
    order = _rounds(pp, micro_batches, chunks)
    forwards = [Action(Op.FORWARD, i, chunk) for i, chunk in order]
    backwards = [Action(Op.BACKWARD, i, chunks - 1 - chunk) for i, chunk in order]
    planned = _alternate(forwards, backwards, warm_up=2 * (pp - rank - 1) + (chunks - 1) * pp)
    return [action for action in planned if action.micro_batch >= 0]


def forward_only(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Validation: every micro-batch once through the pipeline."""
    order = _rounds(pp, micro_batches, chunks)
    return [Action(Op.FORWARD, i, chunk) for i, chunk in order if i >= 0]


Generator = Callable[[int, int, int, int], list[Action]]
KINDS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "forward_only": forward_only,
}
ONE_CHUNK = ("gpipe", "1f1b")


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + [action for pair in pairs for action in pair] + backwards[steady:]


def _rounds(pp: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in groups of pp micro-batches, each group through all chunks.

    All groups are full: numbers below 0 fill up the first when pp does not divide the micro-batches.
    """
    missing = -micro_batches % pp
    return [
        (first + i, chunk)
        for first in range(-missing, micro_batches, pp)
        for chunk in range(chunks)
        for i in range(pp)
    ]


def computes(kind: str, pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """What one rank computes, in order: its list without all that moves data."""
    _check(kind, pp, micro_batches, chunks)
    return KINDS[kind](pp, micro_batches, chunks, rank)


def _check(kind: str, pp: int, micro_batches: int, chunks: int) -> None:
    if kind not in KINDS:
        raise UserError(f"unknown schedule '{kind}'{nearest(kind, KINDS)}: the kinds are {', '.join(KINDS)}")
    for name, value in (("pp", pp), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"{name}={value} leaves nothing to schedule: give at least 1")
    if chunks > 1 and kind in ONE_CHUNK:
        raise UserError(
            f"schedule '{kind}' holds one chunk per rank, not {chunks}: use interleaved, or chunks=1"
        )
    if pp * micro_batches * chunks > LARGEST_TABLE:
        raise UserError(
            f"pp={pp} x micro_batches={micro_batches} x chunks={chunks} is too large a table: "
            f"keep the product within {LARGEST_TABLE}"
        )


def build(kind: str, pp: int, micro_batches: int, chunks: int = 1, zero_stage: int = 0) -> Table:
    """The table of a schedule for `pp` pipeline ranks, each with `chunks` stages, and `micro_batches`; from ZeRO stage
    2 on with what is done about the data-parallel ranks' shares."""
    _check(kind, pp, micro_batches, chunks)
    orders = (KINDS[kind](pp, micro_batches, chunks, rank) for rank in range(pp))
    return with_shares(with_transfers(_table(kind, pp, micro_batches, chunks, orders)), zero_stage)


def _table(kind: str, pp: int, micro_batches: int, chunks: int, orders: Iterable[list[Action]]) -> Table:
    return Table(
        kind=kind,
        pp=pp,
        micro_batches=micro_batches,
        chunks=chunks,
        ranks=tuple(tuple(order) for order in orders),
        placement=looped(pp, chunks),
    )


def with_shares(table: Table, zero_stage: int) -> Table:
    """Stage 2: after each backward (and its send), its gradients' shares are added up. Stage 3 also: around each
    compute, its chunk's weights are fetched and freed."""
    if zero_stage < 2:
        return table
    ranks = []
    for actions in table.ranks:
        out: list[Action] = []
        due: list[Action] = []
        for action in actions:
            compute = action.op in STEP
            if compute or action.op is not Op.SEND_BACKWARD:
                out += due
                due = []
            around = [Action(op, action.micro_batch, action.chunk) for op in (Op.GATHER, Op.FREE)]
            out += [around[0], action, around[1]] if compute and zero_stage == 3 else [action]
            if action.op is Op.BACKWARD:
                due = [Action(Op.REDUCE, action.micro_batch, action.chunk)]
        ranks.append(tuple(out + due))
    return replace(table, ranks=tuple(ranks))


def with_transfers(table: Table) -> Table:
    """A table of computes with the sends and receives between ranks added.

    The computes of all ranks are put in one global order, that in which they end when a backward takes twice
    a forward, and each transfer happens at once after the compute that feeds it. Every rank's list is its
    part of that one order, so no set of ranks can wait in a circle even if every send blocks until its
    receive is reached, and any two ranks list their common transfers alike, in both directions taken
    together. A send directly follows its compute; a receive stands before whatever the receiver is computing
    when the tensor comes, so that posting it there, without waiting, never holds the sender up.
    """
    simulation = simulate(table, forward=1.0 * table.chunks, backward=2.0 * table.chunks)
    ended = sorted(
        ((timed.end, rank, timed.action) for rank, row in enumerate(simulation.ranks) for timed in row),
        key=lambda item: item[:2],
    )
    ranks: list[list[Action]] = [[] for _ in range(table.pp)]
    for _, rank, action in ended:
        ranks[rank].append(action)
        consumer = table.consumer(action.op, rank, action.chunk)
        if consumer is not None and consumer[0] != rank:
            peer, chunk = consumer
            ranks[rank].append(Action(SEND_OF[action.op], action.micro_batch, action.chunk, peer))
            ranks[peer].append(Action(RECV_OF[action.op], action.micro_batch, chunk, rank))
    return replace(table, ranks=tuple(tuple(actions) for actions in ranks))
