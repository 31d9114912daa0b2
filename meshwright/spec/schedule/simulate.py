"""The timeline of a schedule table: makespan, bubble and peak activations, without running anything.

A rank computes one action at a time, in the order of its list. A result is sent the moment it is produced and takes
`send` seconds, during which both ends continue to compute. Only the compute that needs it waits for it. Therefore only
the order of the computes matters here, and transfers in the table are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.spec.schedule.table import MEANING, RECEIVES, SENDS, SHARDING, Action, Op, Table, most_held

Duration = float | Callable[[int, int], float]
Times = dict[tuple[Op, int, int, int], tuple[float, float]]  # start and end by op, micro-batch, rank, chunk
Result = tuple[int, int, int, int]  # a result by its direction, micro-batch, and the rank and chunk that consume it


class Timed(NamedTuple):
    """An action with its start and end. A transfer's times are those at which the tensor leaves and arrives."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A table with times.

    `bubble` is the idle fraction of ranks x makespan. `peak_activations[rank]` is the most micro-batches in flight, in
    units of all chunks of that rank (one chunk counts as 1/chunks).
    """

    table: Table
    makespan: float
    bubble: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    times: Times = field(repr=False)
    arrived: dict[Result, float] = field(repr=False)
    send: float = 0.0

    @cached_property
    def active(self) -> tuple[float, ...]:
        """The time of each rank from the start of its first compute to the end of its last one.

        The longest is the time of a step if every rank begins the next step without waiting for the others. Formulas of
        zero-bubble schedules count only the idle time in it.
        """
        rows: list[list[tuple[float, float]]] = [[] for _ in range(self.table.pp)]
        for (_, _, rank, _), span in self.times.items():
            rows[rank].append(span)
        return tuple(max(end for _, end in row) - min(start for start, _ in row) for row in rows)

    @cached_property
    def ranks(self) -> tuple[tuple[Timed, ...], ...]:
        """Every action with its times, by rank, except sharding operations."""
        return tuple(
            tuple(self._timed(rank, action) for action in actions if action.op not in SHARDING)
            for rank, actions in enumerate(self.table.ranks)
        )

    def _timed(self, rank: int, action: Action) -> Timed:
        direction = SENDS.get(action.op) or RECEIVES.get(action.op)
        if direction is None:
            return Timed(action, *self.times[action.op, action.micro_batch, rank, action.chunk])
        consumer = self.table.beside(direction, rank, action.chunk) if action.op in SENDS else (rank, action.chunk)
        assert consumer is not None, f"rank {rank}: {action} leaves the pipeline"
        arrival = self.arrived[direction, action.micro_batch, consumer[0], consumer[1]]
        return Timed(action, arrival - self.send, arrival)


def simulate(
    table: Table, forward: Duration = 1.0, backward: Duration = 2.0, send: float = 0.0, weights: Duration | None = None
) -> Simulation:
    """Simulate the times of a table.

    If `forward` or `backward` is a number, it is the time of one micro-batch in all chunks of a rank, and each chunk
    takes 1/chunks of it. If it is a function, it gives the time of one (rank, chunk). A compute that is part of a phase
    takes its `share` of the phase. `weights` replaces that share for weight gradients: it is their part of `backward`.
    """
    _check_time("send", send)
    phases = {name: _durations(table, name, given) for name, given in (("forward", forward), ("backward", backward))}
    durations = {
        op: [[MEANING[op].share * value for value in row] for row in phases[MEANING[op].phase]] for op in table.computes
    }
    if weights is not None and Op.WEIGHT_GRAD in durations:
        # Measured or estimated times replace the assumed halves of the backward.
        durations[Op.WEIGHT_GRAD] = later = _durations(table, "weights", weights)
        durations[Op.INPUT_GRAD] = [
            [max(0.0, whole - part) for whole, part in zip(*rows, strict=True)]
            for rows in zip(phases["backward"], later, strict=True)
        ]
    times, arrived = _run(table, durations, send)
    makespan = max(end for _, end in times.values())
    if not math.isfinite(makespan):
        raise UserError("the times are too large to add up: give them in a larger unit")
    busy = tuple(
        math.fsum(durations[a.op][rank][a.chunk] for a in actions if a.op in durations)
        for rank, actions in enumerate(table.ranks)
    )
    # Rounding can make the idle time slightly negative.
    bubble = max(0.0, 1.0 - math.fsum(busy) / (table.pp * makespan)) if makespan else 0.0
    peaks = tuple((most_held(actions) if table.trains else 1) / table.chunks for actions in table.ranks)
    return Simulation(table, makespan, bubble, busy, peaks, times, arrived, send)


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} time {value:g} is not a duration: give a finite number of at least 0")


def _durations(table: Table, name: str, given: Duration) -> list[list[float]]:
    """Return durations by [rank][chunk]."""
    if not callable(given):
        _check_time(name, given)
        return [[given / table.chunks] * table.chunks for _ in range(table.pp)]
    durations = [[given(rank, chunk) for chunk in range(table.chunks)] for rank in range(table.pp)]
    for value in chain.from_iterable(durations):
        _check_time(name, value)
    return durations


def _run(table: Table, durations: dict[Op, list[list[float]]], send: float) -> tuple[Times, dict[Result, float]]:
    """Return the start and end of every compute, and the arrival time of each result at the stage that consumes it.

    Every rank runs until it lacks an input, and is resumed when that arrives. Each action is therefore visited once.
    """
    computes = [[action for action in actions if action.op in durations] for actions in table.ranks]
    times: Times = {}
    arrived: dict[Result, float] = {}
    waiting: dict[Result, int] = {}
    position, clock = [0] * table.pp, [0.0] * table.pp
    runnable = list(range(table.pp))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(computes[rank]):
            action = computes[rank][position[rank]]
            direction = MEANING[action.op].direction
            key = (direction, action.micro_batch, rank, action.chunk)
            start = clock[rank]
            # The first stage of a direction, and computes without one, take no result of another stage.
            if table.beside(-direction, rank, action.chunk) is not None:
                if key not in arrived:
                    waiting[key] = rank
                    break
                start = max(start, arrived[key])
            clock[rank] = end = start + durations[action.op][rank][action.chunk]
            times[action.op, action.micro_batch, rank, action.chunk] = (start, end)
            position[rank] += 1
            consumer = table.beside(direction, rank, action.chunk)
            if consumer is not None:
                result = (direction, action.micro_batch, *consumer)
                arrived[result] = end + (send if consumer[0] != rank else 0.0)
                if result in waiting:
                    runnable.append(waiting.pop(result))
    for rank in waiting.values():
        raise AssertionError(f"rank {rank} never gets the input of {computes[rank][position[rank]]}")
    return times, arrived
