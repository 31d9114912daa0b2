"""What replicas synchronise, and when: which part of a share is in which fragment, and which fragments begin to be
summed, or arrive, in a step. The outer update and the planner read the same functions. No torch."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from meshwright.config.replicas import LocalConfig
from meshwright.spec.traffic.placement import ALIGN


def fragment_bounds(share: int, fragments: int, replicas: int) -> list[tuple[int, int]]:
    """Returns the range of each fragment in a share of so many elements. A fragment is a part of every share, so that
    all ranks send alike. The ranges are of whole pieces for all replicas, so the last may reach beyond the share, and
    of a small share some are empty."""
    unit = ALIGN * replicas
    units = -(-share // unit)
    return list(pairwise(units * number // fragments * unit for number in range(fragments + 1)))


class Moment(NamedTuple):
    """What happens after the update of a step: fragments whose sums arrive, and then fragments whose sums begin. With
    `at_once` the latter are waited for."""

    arrive: tuple[int, ...]
    begin: tuple[int, ...]
    at_once: bool


def moment_of(config: LocalConfig, step: int, last: bool) -> Moment:
    """Returns what replicas synchronise after the update of a step, the first of which is step 1. After the `last` one
    of a run all that is under way arrives, and then everything is synchronised once more."""
    under_way = [f for before in range(config.delay, 0, -1) for f in _due(config, step - before)]
    if last:
        return Moment(tuple(under_way), tuple(range(config.fragments)), at_once=True)
    arrive = _due(config, step - config.delay) if config.delay else ()
    return Moment(tuple(arrive), tuple(_due(config, step)), at_once=not config.delay)


def _due(config: LocalConfig, step: int) -> list[int]:
    """The fragments whose sums begin after a step: each once in `steps` steps, evenly spread, the last at the end."""
    at = (step - 1) % config.steps + 1
    spread = range(config.fragments) if step > 0 else ()
    return [f for f in spread if (f + 1) * config.steps // config.fragments == at]
