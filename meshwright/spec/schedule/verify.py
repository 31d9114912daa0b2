"""Proof that a schedule table is complete and cannot deadlock, from its lists alone, without trust in its generator.

An error names the rank and the action at fault. The time grows linearly with the number of actions: about a second for
200,000 of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.table import (
    ACTIVATIONS,
    FACTORS,
    INPUT,
    MEANING,
    RECEIVE_IN,
    RECEIVES,
    SEND_IN,
    SENDS,
    SHARDING,
    WEIGHT,
    Action,
    Op,
    Place,
    Table,
)

# A tensor in transit between ranks: its direction, its micro-batch, and the place that consumes it.
Tensor = tuple[int, int, Place]

# A table of up to this many computes is proven itself. A larger one repeats the same pattern more often, so a table
# with fewer micro-batches is proven in its place.
LARGEST_PROVEN = 50_000


@lru_cache(maxsize=8)
def verified(
    kind: str, pp: int, micro_batches: int, chunks: int, zero_stage: int = 0, validation: bool = False
) -> Table:
    """Return the table of `build` after verifying it. This is the table that a trainer runs."""
    table = build(kind, pp, micro_batches, chunks, zero_stage, validation)
    stages = pp * chunks
    # Whole rounds of pp micro-batches are dropped, so that an incomplete round is as full as in the table itself.
    surplus = max(0, micro_batches - max(LARGEST_PROVEN // stages, 4 * pp)) // pp * pp
    verify(build(kind, pp, micro_batches - surplus, chunks, zero_stage, validation) if surplus else table)
    return table


def verify(table: Table) -> None:
    """Raise AssertionError unless every rank can run its list to the end, and all lists together are one training step.

    Complete: each (micro-batch, chunk) produces its activations and, in a table that trains, both halves of its
    gradient, exactly once and after the things they need, and releases the activations. Each tensor that crosses ranks
    is sent once after it is produced and received once before it is used.

    Safe: any two ranks list their common transfers of one direction in the same order. All lists run to their end both
    if sends are buffered and if each send blocks until its receive is reached.
    """
    _check_placement(table)
    for rank in range(table.pp):
        _check_rank(table, rank)
        _check_shares(table, rank)
    _check_pairs(table)
    _check_progress(table, buffered=True)
    _check_progress(table, buffered=False)


def _check_placement(table: Table) -> None:
    if len(table.ranks) != table.pp:
        raise AssertionError(f"the table lists {len(table.ranks)} ranks, not pp={table.pp}")
    places = [(rank, chunk) for rank in range(table.pp) for chunk in range(table.chunks)]
    if sorted(table.placement) != places:
        raise AssertionError("the placement does not give every rank and chunk exactly one stage")
    for rank in range(table.pp):
        if [chunk for owner, chunk in table.placement if owner == rank] != list(range(table.chunks)):
            raise AssertionError(f"rank {rank} does not number its chunks in the order of their stages")


@dataclass(slots=True)
class _Progress:
    """The state of one micro-batch in one chunk of a rank."""

    had: set[str] = field(default_factory=set)  # everything that was produced
    held: set[str] = field(default_factory=set)  # everything that was produced and not released
    sent: set[int] = field(default_factory=set)  # the directions in which its results were sent
    received: set[int] = field(default_factory=set)  # the directions of the inputs that were received


def _check_rank(table: Table, rank: int) -> None:
    """Check one rank's list by itself: it is complete, nothing occurs twice, and inputs precede their uses."""
    done: dict[tuple[int, int], _Progress] = defaultdict(_Progress)
    for action in table.ranks[rank]:
        if action.op in SHARDING:
            continue
        if not (0 <= action.micro_batch < table.micro_batches and 0 <= action.chunk < table.chunks):
            raise AssertionError(f"rank {rank}: {action} has no place in this schedule")
        here = done[action.micro_batch, action.chunk]
        if action.op in MEANING:
            _check_compute(table, rank, action, here, done)
        else:
            _check_transfer(table, rank, action, here)
    whole = {ACTIVATIONS, INPUT, WEIGHT} if table.trains else {ACTIVATIONS}
    for key in product(range(table.micro_batches), range(table.chunks)):
        _check_end(table, rank, key, done[key], whole)


def _check_compute(
    table: Table, rank: int, action: Action, here: _Progress, done: dict[tuple[int, int], _Progress]
) -> None:
    meaning = MEANING[action.op]
    if here.had.intersection(meaning.produces):
        raise AssertionError(f"rank {rank}: {action} occurs twice, or after an action with the same result")
    for need in meaning.needs:
        if need not in here.held:
            raise AssertionError(f"rank {rank}: {action} comes without the {need} before it")
    source = table.beside(-meaning.direction, rank, action.chunk)
    if source is not None and source[0] != rank and meaning.direction not in here.received:
        raise AssertionError(f"rank {rank}: {action} comes without {RECEIVE_IN[meaning.direction].value} before it")
    if source is not None and source[0] == rank and not _ready(meaning.direction, done[action.micro_batch, source[1]]):
        raise AssertionError(f"rank {rank}: {action} comes without the result of chunk {source[1]} before it")
    here.had.update(meaning.produces)
    here.held.update(meaning.produces)
    here.held.difference_update(meaning.releases)


def _ready(direction: int, there: _Progress) -> bool:
    """Return whether the result that is passed on in a direction has been produced."""
    return (ACTIVATIONS if direction > 0 else INPUT) in there.had


def _check_transfer(table: Table, rank: int, action: Action, here: _Progress) -> None:
    sends = action.op in SENDS
    direction = (SENDS if sends else RECEIVES)[action.op]
    other = table.beside(direction if sends else -direction, rank, action.chunk)
    if other is None or other[0] == rank or other[0] != action.peer or (direction < 0 and not table.trains):
        raise AssertionError(f"rank {rank}: {action} has no place in this schedule")
    before = here.sent if sends else here.received
    if direction in before:
        raise AssertionError(f"rank {rank}: {action} occurs twice")
    if sends and not _ready(direction, here):
        raise AssertionError(f"rank {rank}: {action} comes without the result that it sends")
    before.add(direction)


def _check_end(table: Table, rank: int, key: tuple[int, int], here: _Progress, whole: set[str]) -> None:
    micro_batch, chunk = key
    where = f"micro-batch {micro_batch} chunk {chunk}"
    for missing in sorted(whole - here.had):
        raise AssertionError(f"rank {rank}: the {missing} of {where} is missing")
    for name in (ACTIVATIONS, FACTORS) if table.trains else ():
        if name in here.held:
            raise AssertionError(f"rank {rank}: the {name} of {where} are never released")
    for direction in (1, -1) if table.trains else (1,):
        consumer = table.beside(direction, rank, chunk)
        if consumer is not None and consumer[0] != rank and direction not in here.sent:
            send = Action(SEND_IN[direction], micro_batch, chunk, consumer[0])
            raise AssertionError(f"rank {rank}: {send} is missing")


def _check_shares(table: Table, rank: int) -> None:
    """Check the sharding operations of a rank.

    If weights are gathered, every compute that uses them is directly between its own gather and free. If gradients are
    reduced, the reduces are in the order of the computes that complete weight gradients, one for each.
    """
    actions = table.ranks[rank]
    if any(action.op in (Op.GATHER, Op.FREE) for action in actions):
        for i, action in enumerate(actions):
            uses = action.op in MEANING and MEANING[action.op].uses_weights
            for op, at in ((Op.GATHER, i - 1), (Op.FREE, i + 1)):
                if uses and actions[at : at + 1] != (Action(op, action.micro_batch, action.chunk),):
                    raise AssertionError(f"rank {rank}: {action} comes without its {op.value}")
    reduces = [(a.micro_batch, a.chunk) for a in actions if a.op is Op.REDUCE]
    completed = [(a.micro_batch, a.chunk) for a in actions if a.op in MEANING and WEIGHT in MEANING[a.op].produces]
    if reduces and reduces != completed:
        raise AssertionError(f"rank {rank}: the reduces do not match the weight gradients and their order")


def _tensor(table: Table, rank: int, transfer: Action) -> Tensor:
    if transfer.op in RECEIVES:
        return RECEIVES[transfer.op], transfer.micro_batch, (rank, transfer.chunk)
    direction = SENDS[transfer.op]
    consumer = table.beside(direction, rank, transfer.chunk)
    assert consumer is not None, f"rank {rank}: {transfer} leaves the pipeline"
    return direction, transfer.micro_batch, consumer


def _check_pairs(table: Table) -> None:
    """Check that any two ranks list their common transfers of one direction in the same order.

    Otherwise a receive would get the wrong tensor. The directions need no common order, because activations and
    gradients use separate groups whose calls don't wait for each other.
    """
    common: dict[tuple[int, int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(table.ranks):
        for action in actions:
            if action.peer is not None:
                direction = SENDS.get(action.op) or RECEIVES[action.op]
                common[rank, action.peer, direction].append(action)
    for (rank, peer, direction), mine in common.items():
        for ours, theirs in zip(mine, common[peer, rank, direction], strict=True) if rank < peer else ():
            if _tensor(table, rank, ours) != _tensor(table, peer, theirs):
                raise AssertionError(
                    f"rank {rank}: {ours} meets rank {peer}: {theirs}: "
                    "the two list their common transfers in different orders"
                )


def _check_progress(table: Table, buffered: bool) -> None:
    """Check that every list runs to its end. A receive waits for its send and, unless sends are buffered, a send waits
    for its receive."""
    position = [0] * table.pp
    waits: list[Tensor | None] = [None] * table.pp
    sent: set[Tensor] = set()
    runnable = list(range(table.pp))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(table.ranks[rank]):
            action = table.ranks[rank][position[rank]]
            if action.peer is not None:
                tensor = _tensor(table, rank, action)
                # The peer already waits at the other end of this transfer, so both continue.
                if waits[action.peer] == tensor:
                    waits[action.peer] = None
                    position[action.peer] += 1
                    runnable.append(action.peer)
                elif buffered and action.op in SENDS:
                    sent.add(tensor)
                elif tensor not in sent:
                    waits[rank] = tensor
                    break
            position[rank] += 1
    stuck = [rank for rank in range(table.pp) if position[rank] < len(table.ranks[rank])]
    if stuck:
        how = "with buffered sends" if buffered else "when sends block until received"
        named = "; ".join(f"rank {rank} at {table.ranks[rank][position[rank]]}" for rank in stuck)
        raise AssertionError(f"deadlock {how}: {named}")
