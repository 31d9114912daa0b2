"""Computes the exact traffic of mixtures of experts over ep from the rows that each rank sent. No torch.

The number of rows that a rank sends to another is known only after the router has chosen, so the planner assumes
experts with equal numbers of rows. Given the actual numbers, the result is exact: a ledger must have counted the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.plan.communication import Detail, Line, Traffic
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.experts import ExpertsPart, exchange_axes
from meshwright.spec.model.part import Coordinate, MicroBatch
from meshwright.spec.traffic.ledger import wire_bytes

# Indexed by [from][to]: the rows that each rank of an ep group sends to each rank, itself included.
Rows = Sequence[Sequence[int]]


def dispatch_traffic(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, recomputed: bool = False
) -> list[Detail]:
    """Return, for each rank of the group, the traffic of one block and one micro-batch over ep.

    The all_to_alls carry counts, rows and weights to the experts, the results back, and the gradients of both. With
    `recomputed`, backward repeats the forward with the rows of the first pass, whose counts are not exchanged again.
    """
    return [_of_rank(part, at, batch, rows, rank, recomputed) for rank in range(len(rows))]


def _of_rank(part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, rank: int, recomputed: bool) -> Detail:
    detail: Detail = {}
    for phase, axis, payload, wire in _calls(part, at, batch, rows, rank, recomputed):
        line = Line(phase, axis, "all_to_all")
        detail[line] = detail.get(line, Traffic()).plus(Traffic(1, payload, wire))
    return detail


def _calls(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, rank: int, recomputed: bool
) -> Iterator[tuple[str, str, int, int]]:
    """Yield (phase, axis, payload bytes, wire bytes) for every call of a rank."""
    if counts := part.count_bytes:
        for axis in exchange_axes(at):
            yield "forward", axis, counts, wire_bytes("all_to_all", counts, at.size(axis))
    there, back = hops(at, rows, rank)
    for exchange in part.exchanges(batch):
        again = recomputed and exchange.forward
        for phase in (exchange.phase, "backward") if again else (exchange.phase,):
            for axis, sent, stays in back if exchange.back else there:
                yield phase, axis, sent * exchange.row_bytes, (sent - stays) * exchange.row_bytes


Hops = list[tuple[str, int, int]]  # For each call: (axis, rows that go into it, rows of these that stay on the rank).


def hops(at: Coordinate, rows: Rows, rank: int) -> tuple[Hops, Hops]:
    """Return the calls that bring a rank's rows to their experts, and those that bring the results back.

    With two hops, a row first goes to the rank on the same node whose number in the node is that of the destination,
    and then across nodes.
    """
    sent = sum(rows[rank])
    received = sum(each[rank] for each in rows)
    here = at.size(EP_NODE)
    if len(exchange_axes(at)) == 1:
        return [("ep", sent, rows[rank][rank])], [("ep", received, rows[rank][rank])]
    first = rank // here * here
    near = range(first, first + here)
    same_number = range(rank % here, len(rows), here)
    # The rows of this rank's node for all ranks with its number pass through it.
    passing = sum(rows[source][to] for source in near for to in same_number)
    kept = sum(rows[rank][to] for to in same_number)
    arrived = sum(rows[source][rank] for source in near)
    return (
        [(EP_NODE, sent, kept), (EP_ACROSS, passing, arrived)],
        [(EP_ACROSS, received, arrived), (EP_NODE, passing, kept)],
    )
