"""The section `faults`: what is done about wrong numbers, silent corruption and slow ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive, seconds_of
from meshwright.errors import UserError

LEAST_WINDOW = 8  # values from which a median says something


@dataclass(frozen=True)
class FaultsConfig:
    """A bad step makes no update until it is known why it is bad."""

    nonfinite: bool = True  # a loss or gradient that is not finite is a bad step; false: it is skipped, unexamined
    # A loss or gradient norm far above the last ones. tell: it is replayed and noted, and trained if it is genuine;
    # act: a genuine one is a bad step too, for which `action` stands.
    spike: Literal["off", "tell", "act"] = "tell"
    spike_factor: float = 10.0  # how many deviations above the median of the window
    window: int = 64  # the good steps that a step is compared with
    # Whether a bad step is computed again from the same inputs: no, by the same ranks, or, if it is as bad then, with
    # the ranks' samples exchanged too, which tells a rank that is broken from samples that are.
    replay: Literal["off", "here", "elsewhere"] = "here"
    action: Literal["skip", "rollback", "stop"] = "skip"  # where it is the data or the model
    max_skips: int = 25  # skipped steps in a row after which a run gives up
    max_faults: int = 3  # faults of one rank after which the run stops with its name
    locate: bool = True  # norms of what units pass on are kept, by which a fault is laid to a rank and a layer
    check_every: int = 100  # steps between comparisons of what several ranks hold alike; 0: none
    slow_factor: float = 1.5  # times the median of the ranks, from which a rank is slow; 0: none is named
    slow_steps: int = 10  # steps for which it must be,
    slow_seconds: float = 10.0  # and for so many seconds: disturbances by other programs are shorter
    elastic: bool = False  # a lost rank or node does not end the run: it goes on with those that are left
    rest: str = "10min"  # for which the device of a rank that failed is not used, and twice as long each further time
    lost_after: str = "15s"  # after which a node that gives no sign is taken to be lost

    @property
    def rest_s(self) -> float:
        return seconds_of("faults.rest", self.rest)

    @property
    def lost_after_s(self) -> float:
        return seconds_of("faults.lost_after", self.lost_after)

    def __post_init__(self) -> None:
        assert self.rest_s and self.lost_after_s
        positive("faults", self, "spike_factor", "window", "max_skips", "max_faults", "slow_steps")
        not_negative("faults", self, "check_every", "slow_factor", "slow_seconds")
        if self.window < LEAST_WINDOW:
            raise UserError(f"faults.window={self.window} is too few steps to compare with: use {LEAST_WINDOW} or more")
        if 0 < self.slow_factor <= 1.0:
            raise UserError(f"faults.slow_factor={self.slow_factor:g} must be above 1, e.g. 1.5 (or 0: none is named)")
