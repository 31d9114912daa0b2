"""The schedule by which replicas synchronise fragments of their weights. No torch.

It gives the range of each fragment in a share, and the fragments whose all-reduce starts or arrives in each step. The
outer update and the planner use the same functions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from meshwright.config.replicas import LocalConfig
from meshwright.spec.traffic.placement import ALIGN


def fragment_bounds(share: int, fragments: int, replicas: int) -> list[tuple[int, int]]:
    """Return the range of each fragment in a share of `share` elements.

    Every share is divided into all fragments, so that all ranks send equally much. Range bounds are multiples of
    ALIGN x `replicas` elements. The last range may therefore extend beyond the share, and some ranges of a small share
    are empty.
    """
    unit = ALIGN * replicas
    units = -(-share // unit)
    return list(pairwise(units * number // fragments * unit for number in range(fragments + 1)))


class FragmentMoment(NamedTuple):
    """The fragments to synchronise after the update of a step: first the all-reduces of `arrive` are completed, then
    the ones of `begin` are started. With `at_once`, the step also waits for these."""

    arrive: tuple[int, ...]
    begin: tuple[int, ...]
    at_once: bool


def moment_of(config: LocalConfig, step: int, last: bool) -> FragmentMoment:
    """Return the fragments that replicas synchronise after the update of step `step`, counted from 1.

    After the `last` step of a run, all fragments in flight arrive, and then every fragment is synchronised once more.
    """
    in_flight = [f for before in range(config.delay, 0, -1) for f in _due(config, step - before)]
    if last:
        return FragmentMoment(tuple(in_flight), tuple(range(config.fragments)), at_once=True)
    arrive = _due(config, step - config.delay) if config.delay else ()
    return FragmentMoment(tuple(arrive), tuple(_due(config, step)), at_once=not config.delay)


def _due(config: LocalConfig, step: int) -> list[int]:
    """Return the fragments whose all-reduce starts after a step.

    Each fragment starts once in `config.steps` steps. The starts are evenly spread, and the last fragment's is at the
    end of that period.
    """
    at = (step - 1) % config.steps + 1
    # Before the first step nothing is due. `moment_of` asks for such steps because of the delay.
    spread = range(config.fragments) if step > 0 else ()
    return [f for f in spread if (f + 1) * config.steps // config.fragments == at]
