"""Checks of the cases that run in a world: they must equal one process, or the same ranks on Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.nccl import bodies
from tests.nccl.exact_cases import Exact
from tests.nccl.lanes import Found, Lane
from tests.nccl.same_cases import EXACT, Same
from tests.nccl.transports import TRANSPORTS
from tests.support.oracle import Outcome, Reference, complaints, relative

COPIES = 1e-12  # The bound for sums of the same numbers in the same order.


def check_exact(lane: Lane, case: Exact, plant: Any = None) -> Found:
    """Compare every rank with one process on the same device."""
    reference = _reference(lane, case)
    ends = lane.world(case.ranks).run(bodies.compare_with_one, case, lane.transport, reference, plant)
    outcomes = [outcome for outcome, _ in ends]
    return Found(complaints(outcomes, EXACT), max(map(largest, outcomes)), max(sent for _, sent in ends))


def _reference(lane: Lane, case: Exact) -> Reference:
    """Return the reference of a case. Cases that differ only in their layout share it."""
    key = repr((case.alone(lane.transport), case.case.data))
    found: Reference | None = lane.shared.get(key)
    if found is None:
        (found,) = lane.world(1).run(bodies.find_reference, case, lane.transport)
        lane.shared.put(key, found)
    return found


def largest(o: Outcome) -> float:
    named = (o.gradients[0], o.overlapped[0], o.parameters[0], o.moments[0])
    return float(max(*named, o.norm, o.counted, o.validation))


def check_same(lane: Lane, case: Same) -> Found:
    """Compare every rank with the same rank of a run on Gloo in other processes."""
    ours = lane.world(case.ranks).run(bodies.few_steps, case, lane.transport)
    theirs = lane.gloo(case.ranks).run(bodies.few_steps, case, TRANSPORTS["gloo"])
    found, worst = [], 0.0
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        differences = {key: relative(mine[key], other[key]) for key in ("losses", "norms")}
        if case.bound == EXACT:
            differences |= apart(mine["parameters"], other["parameters"])
        worst = max(worst, *differences.values())
        wrong = {name: error for name, error in differences.items() if not error <= case.bound}
        if wrong:
            name = max(wrong, key=lambda each: wrong[each])
            found.append(f"rank {rank}: {name} differs from Gloo's by {wrong[name]:.1e}")
        if mine["bytes"] != other["bytes"]:
            found.append(f"rank {rank} sent {mine['bytes']} bytes in the last step, and on Gloo {other['bytes']}")
    return Found([*found[:3], *(_copies(ours) if case.copies else [])], worst, max(each["bytes"] for each in ours))


def apart(mine: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest difference of every parameter, relative to its largest value."""
    found = {}
    for name, value in mine.items():
        scale = max(float(np.abs(other[name]).max()), 1e-12)
        error = float(np.abs(value - other[name]).max()) / scale
        found[name] = error if error == error else np.inf
    return found


def _copies(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Return complaints about parameters that differ between ranks, all of which hold every parameter."""
    found = []
    for rank, each in enumerate(ranks[1:], 1):
        differences = apart(each["parameters"], ranks[0]["parameters"])
        name = max(differences, key=lambda one: differences[one])
        if differences[name] > COPIES:
            found.append(f"rank {rank} holds another {name} than rank 0, by {differences[name]:.1e}")
    return found[:2]
