"""Fit the latency and bandwidth of links to measured times of collectives. No torch.

The model of a time is the planner's sum (plan/efficiency.py): a start, a latency for each hop round the ring, and the
bytes on the wire over the link's rate. All ops over one class of links share the latency. Each op has a separate rate,
because back ends are not equally good at all of them (Gloo's reduce_scatter takes longer than its all_reduce of the
same tensor). No rate exceeds the measured ones by more than MAX_RATE_RATIO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.plan.efficiency import START, adapter_share
from meshwright.spec.traffic.ledger import OPERATIONS, bus_factor

# The smallest coefficient that a fit may return, in seconds per byte or per hop.
MIN_COEFFICIENT = 1e-15
# A fitted rate is at most this many times that of the fastest measured call. The latency may account for the gap.
MAX_RATE_RATIO = 1.1


@dataclass(frozen=True)
class Measurement:
    """The time of one op with one payload over all groups of an axis at once. `seconds` is the median time of a call on
    the slowest rank."""

    axis: str
    op: str
    ranks: int
    per_node: int  # The ranks of a group on one node.
    payload: int
    seconds: float

    @property
    def across(self) -> bool:
        return self.per_node < self.ranks

    @property
    def algorithm_gb_s(self) -> float:
        return self.payload / self.seconds / 1e9

    @property
    def bus_gb_s(self) -> float:
        return self.algorithm_gb_s * bus_factor(self.op, self.ranks)


@dataclass(frozen=True)
class Link:
    """A class of links. `rates` are the bytes per second that one rank sends, by op. Across nodes they assume that each
    rank uses only its share of the node's adapters. Errors are relative to the measured times."""

    latency: float
    rates: dict[str, float]
    error: float  # The median error.
    worst: float
    points: int

    @property
    def rate(self) -> float:
        """The rate of all_reduce, which training uses most, or else the median of the other ops."""
        return self.rates.get("all_reduce") or float(np.median(list(self.rates.values())))


def hops(op: str, ranks: int, per_node: int) -> tuple[float, float]:
    """Return the number of latencies that one call pays (inside a node, across nodes). A call goes round the ring once,
    and an all_reduce twice. Over several nodes an all_reduce takes the latency of a tree."""
    nodes = -(-ranks // per_node)
    facts = OPERATIONS[op]
    if facts.is_message:
        return (0.0, 1.0) if nodes > 1 else (1.0, 0.0)
    if facts.rounds == 2 and nodes > 1:
        return per_node - 1.0, 2.0 * math.log2(nodes)
    times = math.log2(ranks) / ranks if facts.is_exchange else float(facts.rounds)
    return times * (ranks - nodes), times * (nodes if nodes > 1 else 0)


def fit_link(points: Sequence[Measurement], inside_latency: float | None = None) -> Link:
    """Fit one class of links. Across nodes, `inside_latency` is the known latency of the hops that stay in a node.
    Without it, all hops count the same."""
    ops = sorted({p.op for p in points})
    rows = np.zeros((len(points), 1 + len(ops)))
    times = np.zeros(len(points))
    for i, p in enumerate(points):
        inside, across = hops(p.op, p.ranks, p.per_node)
        if p.across and inside_latency is not None:
            known, count = inside * inside_latency, across
        else:
            known, count = 0.0, inside + across
        rows[i, 0] = count
        share = adapter_share(p.op, p.ranks, p.per_node) if p.across else bus_factor(p.op, p.ranks)
        rows[i, 1 + ops.index(p.op)] = p.payload * share
        times[i] = max(p.seconds - START - known, 1e-9)
    measured = np.array([p.seconds for p in points])
    coefficients = robust(rows, times, measured)
    # If times hardly grow with the size, or even fall, least squares finds a rate far above that of any call.
    fastest = (rows[:, 1:] / measured[:, None]).max(axis=0)
    coefficients[1:] = np.maximum(coefficients[1:], 1.0 / (MAX_RATE_RATIO * fastest))
    errors = np.abs(rows @ coefficients - times) / measured
    rates = {op: 1.0 / float(coefficients[1 + i]) for i, op in enumerate(ops)}
    return Link(float(coefficients[0]), rates, float(np.median(errors)), float(errors.max()), len(points))


def robust(rows: NDArray[np.float64], values: NDArray[np.float64], scale: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return positive coefficients c with rows @ c close to `values`, by least squares on errors relative to `scale`.
    Outliers have smaller weights (Huber's), since a busy machine makes single times long."""
    weights = np.ones(len(values))
    coefficients = np.full(rows.shape[1], MIN_COEFFICIENT)
    # Iteratively reweighted least squares.
    for _ in range(30):
        coefficients = _above_zero(rows * (weights / scale)[:, None], values * weights / scale)
        errors = np.abs(rows @ coefficients - values) / scale
        limit = max(2.0 * float(np.median(errors)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    return coefficients


def _above_zero(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares with positive coefficients. Those below MIN_COEFFICIENT are fixed there, and the others are
    fitted again."""
    free = np.ones(rows.shape[1], dtype=bool)
    coefficients = np.full(rows.shape[1], MIN_COEFFICIENT)
    while free.any():
        # Scale the columns: bytes and hops differ by many orders of magnitude.
        size = np.maximum(np.abs(rows[:, free]).max(axis=0), 1e-300)
        solution = np.linalg.lstsq(rows[:, free] / size, values, rcond=None)[0] / size
        if (solution > MIN_COEFFICIENT).all():
            coefficients[free] = solution
            break
        places = np.flatnonzero(free)
        free[places[solution <= MIN_COEFFICIENT]] = False
    return coefficients


def fit_links(points: Sequence[Measurement]) -> tuple[Link | None, Link | None]:
    """Fit the links inside a node and across nodes. A class that no group used is None."""
    near = [p for p in points if not p.across]
    far = [p for p in points if p.across]
    inside = fit_link(near) if near else None
    latency = inside.latency if inside else None
    return inside, fit_link(far, latency) if far else None
