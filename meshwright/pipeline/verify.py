"""Proof that a schedule table is complete and cannot deadlock; it trusts no generator.

Everything a table must satisfy is checked from its lists alone, and a fault names the rank and the action.
"""

from __future__ import annotations

from collections import defaultdict

from meshwright.pipeline.table import RECEIVED, RECV_OF, SEND_OF, SENT, SHARDING, Action, Op, Place, Table

# One tensor on its way between ranks: the compute that makes it, its micro-batch, where it is consumed.
Tensor = tuple[Op, int, Place]


def verify(table: Table) -> None:
    """Raise AssertionError unless every rank can run its list, all of it, and the whole is one training step.

    Complete: each (micro-batch, stage) has one forward and one backward (none in forward_only), in that
    order; what crosses ranks is sent once after it is made and received once before it is used. Safe: any two
    ranks list their common transfers in the same order, and all lists run to their end both when sends are
    buffered and when each blocks until its receive is reached.
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


def _check_rank(table: Table, rank: int) -> None:
    """One rank's list by itself: complete, nothing twice, everything after what it needs."""
    needs = {
        (op, chunk, peer): _needs(table, rank, op, chunk)
        for chunk in range(table.chunks)
        for op, peer in _rows(table, rank, chunk)
    }
    done: set[tuple[Op, int, int]] = set()
    for action in table.ranks[rank]:
        if action.op in SHARDING:
            continue
        op, micro_batch, chunk = key = action.op, action.micro_batch, action.chunk
        if (op, chunk, action.peer) not in needs or not 0 <= micro_batch < table.micro_batches:
            raise AssertionError(f"rank {rank}: {action} has no place in this schedule")
        if key in done:
            raise AssertionError(f"rank {rank}: {action} comes twice")
        for needed_op, needed_chunk in needs[op, chunk, action.peer]:
            if (needed_op, micro_batch, needed_chunk) not in done:
                need = Action(needed_op, micro_batch, needed_chunk)
                raise AssertionError(f"rank {rank}: {action} comes without {need} before it")
        done.add(key)
    if len(done) < len(needs) * table.micro_batches:
        missing = (
            Action(op, micro_batch, chunk, peer)
            for micro_batch in range(table.micro_batches)
            for op, chunk, peer in needs
            if (op, micro_batch, chunk) not in done
        )
        raise AssertionError(f"rank {rank}: {next(missing)} is missing")


def _check_shares(table: Table, rank: int) -> None:
    """Where weights are gathered, every compute stands between its own gather and free; where gradients are reduced
    each time, every backward is followed by its reduce before anything else is computed."""
    actions = table.ranks[rank]
    gathers = any(action.op in (Op.GATHER, Op.FREE) for action in actions)
    for op, around in ((Op.GATHER, -1), (Op.FREE, 1)):
        if gathers:
            for i, action in enumerate(actions):
                beside = actions[i + around] if 0 <= i + around < len(actions) else None
                if action.op in (Op.FORWARD, Op.BACKWARD) and beside != Action(op, action.micro_batch, action.chunk):
                    raise AssertionError(f"rank {rank}: {action} comes without its {op.value}")
    reduces = [(a.micro_batch, a.chunk) for a in actions if a.op is Op.REDUCE]
    if reduces and reduces != [(a.micro_batch, a.chunk) for a in actions if a.op is Op.BACKWARD]:
        raise AssertionError(f"rank {rank}: the reduces are not those of the backwards, in their order")


def _rows(table: Table, rank: int, chunk: int) -> list[tuple[Op, int | None]]:
    """What a rank does for one chunk of one micro-batch, as (op, peer), in no order."""
    rows: list[tuple[Op, int | None]] = []
    for op in (Op.FORWARD, Op.BACKWARD) if table.has_backward else (Op.FORWARD,):
        rows.append((op, None))
        producer, consumer = table.producer(op, rank, chunk), table.consumer(op, rank, chunk)
        if producer is not None and producer[0] != rank:
            rows.append((RECV_OF[op], producer[0]))
        if consumer is not None and consumer[0] != rank:
            rows.append((SEND_OF[op], consumer[0]))
    return rows


def _needs(table: Table, rank: int, op: Op, chunk: int) -> list[tuple[Op, int]]:
    """What must stand earlier in the same list for the same micro-batch, as (op, chunk)."""
    if op in RECEIVED:
        return []
    if op in SENT:
        return [(SENT[op], chunk)]
    needs = [(Op.FORWARD, chunk)] if op is Op.BACKWARD else []
    producer = table.producer(op, rank, chunk)
    if producer is not None:
        needs.append((op, producer[1]) if producer[0] == rank else (RECV_OF[op], chunk))
    return needs


def _tensor(table: Table, rank: int, transfer: Action) -> Tensor:
    if transfer.op in RECEIVED:
        return RECEIVED[transfer.op], transfer.micro_batch, (rank, transfer.chunk)
    compute = SENT[transfer.op]
    consumer = table.consumer(compute, rank, transfer.chunk)
    assert consumer is not None, f"rank {rank}: {transfer} leaves the pipeline"
    return compute, transfer.micro_batch, consumer


def _check_pairs(table: Table) -> None:
    """Any two ranks must list their common transfers in one order, or point-to-point calls would mix up."""
    common: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(table.ranks):
        for action in actions:
            if action.peer is not None:
                common[rank, action.peer].append(action)
    for (rank, peer), mine in common.items():
        if rank > peer:
            continue
        for ours, theirs in zip(mine, common[peer, rank], strict=True):
            if _tensor(table, rank, ours) != _tensor(table, peer, theirs):
                raise AssertionError(
                    f"rank {rank}: {ours} meets rank {peer}: {theirs}: "
                    "the two list their common transfers in different orders"
                )


def _check_progress(table: Table, buffered: bool) -> None:
    """Run every list: a receive waits for its send, and without buffers a send waits for its receive."""
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
                if waits[action.peer] == tensor:
                    waits[action.peer] = None
                    position[action.peer] += 1
                    runnable.append(action.peer)
                elif buffered and action.op in SENT:
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
