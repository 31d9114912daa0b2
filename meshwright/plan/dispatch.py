"""What mixtures of experts send over ep, given where their rows went. No torch.

How many rows a rank sends to another is known only once the router has chosen, so the planner states what experts with
equal numbers of rows would send. Given the numbers, everything is exact: this is what a ledger must have counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.comm.ledger import wire_bytes
from meshwright.parts.experts import ExpertsPart
from meshwright.parts.part import Coordinate, MicroBatch
from meshwright.plan.communication import Detail, Line, Traffic

Rows = Sequence[Sequence[int]]  # [from][to]: the rows that each rank of an ep group sends to each, itself included


def dispatch_traffic(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, recomputed: bool = False
) -> list[Detail]:
    """Returns the all_to_alls over ep of one block and one micro-batch, by rank of the group: counts, rows and weights
    there, results back, and their gradients. `recomputed`: backward repeats the forward with the rows of the first
    pass, which need not be counted again."""
    return [_of_rank(part, at, batch, rows, rank, recomputed) for rank in range(len(rows))]


def _of_rank(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, rank: int, recomputed: bool
) -> Detail:
    found: Detail = {}
    for phase, payload, wire in _calls(part, at, batch, rows, rank, recomputed):
        line = Line(phase, "ep", "all_to_all")
        found[line] = found.get(line, Traffic()).plus(Traffic(1, payload, wire))
    return found


def _calls(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, rank: int, recomputed: bool
) -> Iterator[tuple[str, int, int]]:
    """Yields the phase, the payload and the wire bytes of every call of a rank."""
    if counts := part.count_bytes:
        yield "forward", counts, wire_bytes("all_to_all", counts, at.size("ep"))
    there, back, stays = sum(rows[rank]), sum(each[rank] for each in rows), rows[rank][rank]
    for exchange in part.exchanges(batch):
        sent = back if exchange.back else there
        again = recomputed and exchange.phase == "forward"
        for phase in (exchange.phase, "backward") if again else (exchange.phase,):
            yield phase, sent * exchange.row_bytes, (sent - stays) * exchange.row_bytes
