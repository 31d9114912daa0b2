"""The timeline of a schedule table: makespan, bubble and peak activations, without running anything.

Model: a rank computes one action at a time, in the order of its list. A result leaves the moment it is
produced, travels `send` long while both ends go on computing, and is waited for only by the compute that
takes it in. So only the computes' order matters here; where the list posts its receives does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.pipeline.table import RECEIVED, SENT, SHARDING, Action, Op, Table

Duration = float | Callable[[int, int], float]
Compute = tuple[Op, int, int, int]  # what is done: compute op, micro-batch, rank, chunk


class Timed(NamedTuple):
    """An action and when it happens; a transfer's times are those of the tensor's journey."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A table with times. `bubble` is the idle share of ranks x makespan; `peak_activations[rank]` counts
    micro-batches of that rank's whole share (one chunk's activation is 1/chunks)."""

    table: Table
    makespan: float
    bubble: float
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    ranks: tuple[tuple[Timed, ...], ...]


def simulate(
    table: Table, forward: Duration = 1.0, backward: Duration = 2.0, send: float = 0.0
) -> Simulation:
    """Time a table. A number for `forward` or `backward` is the time of a rank's whole share of one
    micro-batch, so that a chunk takes 1/chunks of it; a function gives the time of one (rank, chunk)."""
    _check_time("send", send)
    durations = {
        Op.FORWARD: _durations(table, "forward", forward),
        Op.BACKWARD: _durations(table, "backward", backward),
    }
    times, journeys = _run(table, durations, send)
    makespan = max(end for _, end in times.values())
    if not math.isfinite(makespan):
        raise UserError("the times are too large to add up: give them in a larger unit")
    busy = tuple(
        math.fsum(durations[a.op][rank][a.chunk] for a in actions if a.op in durations)
        for rank, actions in enumerate(table.ranks)
    )
    return Simulation(
        table=table,
        makespan=makespan,
        bubble=max(0.0, 1.0 - math.fsum(busy) / (table.pp * makespan)) if makespan else 0.0,
        busy=busy,
        peak_activations=tuple(_peak(table, actions) / table.chunks for actions in table.ranks),
        ranks=tuple(
            tuple(_timed(rank, action, times, journeys, send) for action in actions if action.op not in SHARDING)
            for rank, actions in enumerate(table.ranks)
        ),
    )


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"{name} time {value:g} is no duration: give a finite number of at least 0")


def _durations(table: Table, name: str, given: Duration) -> list[list[float]]:
    """Durations by [rank][chunk]."""
    if not callable(given):
        _check_time(name, given)
        return [[given / table.chunks] * table.chunks for _ in range(table.pp)]
    durations = [[given(rank, chunk) for chunk in range(table.chunks)] for rank in range(table.pp)]
    for row in durations:
        for value in row:
            _check_time(name, value)
    return durations


def _run(
    table: Table, durations: dict[Op, list[list[float]]], send: float
) -> tuple[dict[Compute, tuple[float, float]], dict[Compute, float]]:
    """Start and end of every compute, and when each compute's input arrived, by compute.

    Every rank runs until it lacks an input and is taken up again when that arrives: one visit per action.
    """
    computes = [[action for action in actions if action.op in durations] for actions in table.ranks]
    times: dict[Compute, tuple[float, float]] = {}
    arrived: dict[Compute, float] = {}
    waiting: dict[Compute, int] = {}
    position, clock = [0] * table.pp, [0.0] * table.pp
    runnable = list(range(table.pp))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(computes[rank]):
            action = computes[rank][position[rank]]
            key = (action.op, action.micro_batch, rank, action.chunk)
            start = clock[rank]
            if table.producer(action.op, rank, action.chunk) is not None:
                if key not in arrived:
                    waiting[key] = rank
                    break
                start = max(start, arrived[key])
            clock[rank] = end = start + durations[action.op][rank][action.chunk]
            times[key] = (start, end)
            position[rank] += 1
            consumer = table.consumer(action.op, rank, action.chunk)
            if consumer is not None:
                taker = (action.op, action.micro_batch, *consumer)
                arrived[taker] = end + (send if consumer[0] != rank else 0.0)
                if taker in waiting:
                    runnable.append(waiting.pop(taker))
    for (op, micro_batch, rank, chunk), _ in waiting.items():
        raise AssertionError(f"rank {rank} never gets the input of {Action(op, micro_batch, chunk)}")
    return times, arrived


def _timed(
    rank: int,
    action: Action,
    times: dict[Compute, tuple[float, float]],
    arrived: dict[Compute, float],
    send: float,
) -> Timed:
    if action.op in SENT:
        left = times[SENT[action.op], action.micro_batch, rank, action.chunk][1]
        return Timed(action, left, left + send)
    if action.op in RECEIVED:
        there = arrived[RECEIVED[action.op], action.micro_batch, rank, action.chunk]
        return Timed(action, there - send, there)
    return Timed(action, *times[action.op, action.micro_batch, rank, action.chunk])


def _peak(table: Table, actions: tuple[Action, ...]) -> int:
    """The most chunk activations alive at once: each from its forward's start to its backward's end."""
    if not table.has_backward:
        return 1
    alive = peak = 0
    for action in actions:
        if action.op is Op.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.op is Op.BACKWARD:
            alive -= 1
    return peak
