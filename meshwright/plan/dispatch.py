"""What mixtures of experts send over ep, given where their rows went. No torch.

How many rows a rank sends to another is known only once the router has chosen, so the planner states what experts with
equal numbers of rows would send. Given the numbers, everything is exact: this is what a ledger must have counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.plan.communication import Detail, Line, Traffic
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE
from meshwright.spec.model.experts import ExpertsPart, exchange_axes
from meshwright.spec.model.part import Coordinate, MicroBatch
from meshwright.spec.traffic.ledger import wire_bytes

Rows = Sequence[Sequence[int]]  # [from][to]: the rows that each rank of an ep group sends to each, itself included


def dispatch_traffic(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, recomputed: bool = False
) -> list[Detail]:
    """Returns the all_to_alls over ep of one block and one micro-batch, by rank of the group: counts, rows and weights
    there, results back, and their gradients. `recomputed`: backward repeats the forward with the rows of the first
    pass, which need not be counted again."""
    return [_of_rank(part, at, batch, rows, rank, recomputed) for rank in range(len(rows))]


def _of_rank(part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, rank: int, recomputed: bool) -> Detail:
    found: Detail = {}
    for phase, axis, payload, wire in _calls(part, at, batch, rows, rank, recomputed):
        line = Line(phase, axis, "all_to_all")
        found[line] = found.get(line, Traffic()).plus(Traffic(1, payload, wire))
    return found


def _calls(
    part: ExpertsPart, at: Coordinate, batch: MicroBatch, rows: Rows, rank: int, recomputed: bool
) -> Iterator[tuple[str, str, int, int]]:
    """Yields the phase, the axis, the payload and the wire bytes of every call of a rank."""
    if counts := part.count_bytes:
        for axis in exchange_axes(at):
            yield "forward", axis, counts, wire_bytes("all_to_all", counts, at.size(axis))
    there, back = hops(at, rows, rank)
    for exchange in part.exchanges(batch):
        again = recomputed and exchange.phase == "forward"
        for phase in (exchange.phase, "backward") if again else (exchange.phase,):
            for axis, sent, stays in back if exchange.back else there:
                yield phase, axis, sent * exchange.row_bytes, (sent - stays) * exchange.row_bytes


Hops = list[tuple[str, int, int]]  # (axis, rows that go into the call, rows of these that stay on the rank)


def hops(at: Coordinate, rows: Rows, rank: int) -> tuple[Hops, Hops]:
    """Returns the calls that bring a rank's rows to their experts, and those that bring results back."""
    sent, found = sum(rows[rank]), sum(each[rank] for each in rows)
    here = at.size(EP_NODE)
    if exchange_axes(at) == ("ep",):
        return [("ep", sent, rows[rank][rank])], [("ep", found, rows[rank][rank])]
    first = rank // here * here
    near, alike = range(first, first + here), range(rank % here, len(rows), here)
    passing = sum(rows[source][to] for source in near for to in alike)  # rows of its node for ranks of its number
    kept, arrived = sum(rows[rank][to] for to in alike), sum(rows[source][rank] for source in near)
    return (
        [(EP_NODE, sent, kept), (EP_ACROSS, passing, arrived)],
        [(EP_ACROSS, found, arrived), (EP_NODE, passing, kept)],
    )
