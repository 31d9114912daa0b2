"""The parameters of a rank, and the flat buffers that they are packed into: what is gathered and summed at once. No
torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.config.sections import ZeroConfig
from meshwright.plan.job import Job, kept_together
from meshwright.plan.stack import BYTES
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.part import Coordinate, Unit
from meshwright.spec.traffic.placement import (
    ALIGN,
    backward_order,
    bucket_elements,
    buffer_key,
    grad_bytes,
    place,
    shard_axes,
)


class HeldParameter(NamedTuple):
    """A parameter of a rank, the number of its unit, and how often each micro-batch gathers it in ZeRO stage 3."""

    record: ParamRecord
    unit: int
    fetches: int


def parameters(job: Job, held: Sequence[Stage]) -> list[HeldParameter]:
    """The parameters of a rank's chunks in the order of forward, both ends of a tie on one rank counted once, with the
    gathers of both. The list is the same for all tp ranks: their pieces have one size.

    A unit (embedding, block, head) is gathered for forward and, unless it and everything before it is frozen, for
    backward. Of N blocks that are recomputed together, all but the last are gathered once more for that. In backward an
    embedding stays until the chunk's is done, so that a second one with the same table finds it there.
    """
    together = job.config.recompute.blocks
    found: list[HeldParameter] = []
    ties: dict[str, int] = {}
    number = 0
    for stage in held:
        graded = not stage.first  # whether a gradient flows back to here: a stage's received input has one
        stays: set[str] = set()
        nodes = job.model.nodes_of(stage)
        runs = kept_together([node.unit for node in nodes], together)
        twice = {at for begin, end in runs for at in range(begin, end - 1)}
        for at, node in enumerate(nodes):
            unit, embeds = node.unit, not node.inputs
            records = unit_records(unit, job.at)
            graded |= (together > 0 and unit.stackable) or any(record.trained for record in records)
            fetches = 1 + graded + (at in twice) + job.config.compares
            for record in records:
                tie = tie_of(unit, number, record)
                if tie in ties:
                    first, more = ties[tie], fetches - (embeds and tie in stays)
                    found[first] = found[first]._replace(fetches=found[first].fetches + more)
                    continue
                stays |= {tie} if embeds else set()
                if tie:
                    ties[tie] = len(found)
                found.append(HeldParameter(record, number, fetches))
            number += 1
    return found


def tie_of(unit: Unit, number: int, record: ParamRecord) -> str:
    """Returns the name of a record's tie among a rank's units, empty without one. Ties inside a block are the block's
    own, since records of all blocks of one kind have the same names here."""
    return f"unit {number}: {record.tied}" if record.tied and unit.stackable else record.tied


def records_once(units: Iterable[tuple[Unit, int]], at: Coordinate) -> Iterator[tuple[int, ParamRecord, int]]:
    """Yields (number of the unit, record, count) of a rank's units with their counts; tied parameters appear once."""
    ties: set[str] = set()
    for number, (unit, count) in enumerate(units):
        for record in unit_records(unit, at):
            tie = tie_of(unit, number, record)
            if tie not in ties:
                yield number, record, count
            ties |= {tie} if tie else set()


def unit_records(unit: Unit, at: Coordinate) -> tuple[ParamRecord, ...]:
    """Returns the parameters of a unit, which are the same wherever it stands in the model."""
    return _unit_records(unit, unit.seen_by(at))


@lru_cache(maxsize=20_000)
def _unit_records(unit: Unit, at: Coordinate) -> tuple[ParamRecord, ...]:
    return tuple(unit.records(at).values())


def dtype_of(record: ParamRecord, precision: str) -> str:
    """Returns the dtype of a parameter: the run's precision, unless it must be wider or is packed into bytes."""
    if record.packs is not None:
        return "nf4"
    return "fp32" if record.wide and precision != "fp64" else precision


class PackedBuffer(NamedTuple):
    """A flat buffer and its parameters, which are in the order of backward."""

    # By all: dtype, data axes, further partial axes, whether trained, whether a reducer that mixes elements sums it.
    shared: tuple[str, str, tuple[str, ...], bool, bool]
    items: list[tuple[HeldParameter, str]]
    places: list[tuple[int, int]]  # (start, bucket) of each parameter
    buckets: list[tuple[int, int]]  # (start, stop) of each


def packed(
    params: Iterable[tuple[HeldParameter, str]], layout: Layout, bucket_mib: float, zero: ZeroConfig, grad_dtype: str,
    align: int,
) -> Iterator[PackedBuffer]:  # fmt: skip
    """Packs parameters (held, dtype), given in the order of forward, into buffers as `sharding` builds them. `align`:
    where parameters begin in buffers that a reducer mixes, see `ReducerPlan`; 0 if none does."""
    mixed_in = layout if align else None
    keyed = backward_order(params, lambda item: (item[1], *buffer_key(item[0].record, mixed_in)))
    for shared, items in keyed.items():
        sizes, units = [held.record.numel for held, _ in items], [held.unit for held, _ in items]
        elements = bucket_elements(bucket_mib * 2**20, grad_bytes(BYTES[shared[0]], BYTES[grad_dtype]))
        by_unit = shard_axes(layout, zero, shared[1], shared[3]).stage == 3
        unit = align if shared[4] else ALIGN
        placed = place(sizes, layout.size(shared[1]), elements, units if by_unit else None, unit)
        yield PackedBuffer(shared, items, *placed)
