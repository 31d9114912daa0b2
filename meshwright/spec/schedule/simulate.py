"""The timeline of a schedule table: makespan, bubble and peak activations, without running anything.

Model: a rank computes one action at a time, in the order of its list. A result leaves the moment it is produced,
travels `send` long while both ends go on computing, and is waited for only by the compute that takes it in. So only the
order of the computes matters here.
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
Result = tuple[int, int, int, int]  # what a compute waits for or passes on: direction, micro-batch, rank, chunk


class Timed(NamedTuple):
    """An action and when it happens; a transfer's times are those of the tensor's journey."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A table with times. `bubble` is the idle share of ranks x makespan; `peak_activations[rank]` counts
    micro-batches in flight of that rank's whole share (one chunk is 1/chunks)."""

    table: Table
    makespan: float
    bubble: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    times: Times = field(repr=False)
    arrived: dict[Result, float] = field(repr=False)
    send: float = 0.0

    @cached_property
    def ranks(self) -> tuple[tuple[Timed, ...], ...]:
        """Every action with its times, by rank."""
        return tuple(
            tuple(self._timed(rank, action) for action in actions if action.op not in SHARDING)
            for rank, actions in enumerate(self.table.ranks)
        )

    def _timed(self, rank: int, action: Action) -> Timed:
        direction = SENDS.get(action.op) or RECEIVES.get(action.op)
        if direction is None:
            return Timed(action, *self.times[action.op, action.micro_batch, rank, action.chunk])
        taker = self.table.beside(direction, rank, action.chunk) if action.op in SENDS else (rank, action.chunk)
        assert taker is not None, f"rank {rank}: {action} leaves the pipeline"
        there = self.arrived[direction, action.micro_batch, taker[0], taker[1]]
        return Timed(action, there - self.send, there)


def simulate(
    table: Table, forward: Duration = 1.0, backward: Duration = 2.0, send: float = 0.0, weights: Duration | None = None
) -> Simulation:
    """Time a table. A number for `forward` or `backward` is the time of a rank's whole share of one micro-batch, so
    that a chunk takes 1/chunks of it; a function gives that of one (rank, chunk). Parts of a phase take their share;
    `weights`: the part of the backward that finds weight gradients."""
    _check_time("send", send)
    phases = {name: _durations(table, name, given) for name, given in (("forward", forward), ("backward", backward))}
    durations = {
        op: [[MEANING[op].share * value for value in row] for row in phases[MEANING[op].phase]] for op in table.computes
    }
    if weights is not None and Op.WEIGHT_GRAD in durations:
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
    bubble = max(0.0, 1.0 - math.fsum(busy) / (table.pp * makespan)) if makespan else 0.0
    peaks = tuple((most_held(actions) if table.trains else 1) / table.chunks for actions in table.ranks)
    return Simulation(table, makespan, bubble, busy, peaks, times, arrived, send)


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} time {value:g} is no duration: give a finite number of at least 0")


def _durations(table: Table, name: str, given: Duration) -> list[list[float]]:
    """Durations by [rank][chunk]."""
    if not callable(given):
        _check_time(name, given)
        return [[given / table.chunks] * table.chunks for _ in range(table.pp)]
    durations = [[given(rank, chunk) for chunk in range(table.chunks)] for rank in range(table.pp)]
    for value in chain.from_iterable(durations):
        _check_time(name, value)
    return durations


def _run(table: Table, durations: dict[Op, list[list[float]]], send: float) -> tuple[Times, dict[Result, float]]:
    """Start and end of every compute, and when each result that goes on arrived where it is needed. Every rank runs
    until it lacks an input and is taken up again when that arrives: one visit per action."""
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
            if table.beside(-direction, rank, action.chunk) is not None:
                if key not in arrived:
                    waiting[key] = rank
                    break
                start = max(start, arrived[key])
            clock[rank] = end = start + durations[action.op][rank][action.chunk]
            times[action.op, action.micro_batch, rank, action.chunk] = (start, end)
            position[rank] += 1
            taker = table.beside(direction, rank, action.chunk)
            if taker is not None:
                taken = (direction, action.micro_batch, *taker)
                arrived[taken] = end + (send if taker[0] != rank else 0.0)
                if taken in waiting:
                    runnable.append(waiting.pop(taken))
    for rank in waiting.values():
        raise AssertionError(f"rank {rank} never gets the input of {computes[rank][position[rank]]}")
    return times, arrived
