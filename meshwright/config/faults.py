"""The config section `faults`, on wrong numbers, silent data corruption, slow ranks and lost ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive, seconds_of
from meshwright.errors import UserError

# The fewest values whose median is a useful comparison.
MIN_WINDOW = 8


@dataclass(frozen=True)
class FaultsConfig:
    """The detection and handling of faults. A bad step makes no update until the cause is known."""

    # Treat a loss or gradient that is not finite as a bad step; false: skip the step without examining it.
    nonfinite: bool = True
    # A spike is a loss or gradient norm far above the last ones. off: not detected. tell: it is replayed and reported,
    # and trained on if the replay gives it again. act: such a genuine spike is a bad step, to which `action` applies.
    spike: Literal["off", "tell", "act"] = "tell"
    spike_factor: float = 10.0  # a spike is this many deviations above the median of the window
    window: int = 64  # the number of good steps that a step is compared with
    # Compute a bad step again from the same inputs. off: no. here: on the same ranks. elsewhere: if it is as bad then,
    # once more with the ranks' samples exchanged, which tells a broken rank from bad samples.
    replay: Literal["off", "here", "elsewhere"] = "here"
    action: Literal["skip", "rollback", "stop"] = "skip"  # if the data or the model cause a bad step
    max_skips: int = 25  # skipped steps in a row after which a run gives up
    max_faults: int = 3  # faults of one rank after which the run stops and names the rank
    locate: bool = True  # keep norms of the units' outputs, by which a fault is attributed to a rank and a layer
    check_every: int = 100  # steps between comparisons of weights and states that several ranks replicate; 0: none
    slow_factor: float = 1.5  # a rank that takes this many times the ranks' median is slow; 0: none is reported
    slow_steps: int = 10  # a rank is reported if it is slow for this many steps
    slow_seconds: float = 10.0  # ... and for this long: disturbances by other programs are shorter
    elastic: bool = False  # after the loss of a rank or node, continue with those that are left
    rest: str = "10min"  # time for which a failed rank's device is not used; it doubles with each further failure
    lost_after: str = "15s"  # time without a sign of life after which a node counts as lost

    @property
    def detects_spikes(self) -> bool:
        return self.spike != "off"

    @property
    def trusts_replays(self) -> bool:
        """True if a spike that is computed again is trained on."""
        return self.spike == "tell"

    @property
    def replays(self) -> bool:
        """True if a bad step is computed again."""
        return self.replay != "off"

    @property
    def exchanges_samples(self) -> bool:
        """True if a step that is bad twice is computed once more with other ranks' samples."""
        return self.replay == "elsewhere"

    @property
    def goes_back(self) -> bool:
        """True if a bad step makes the run go back to a checkpoint."""
        return self.action == "rollback"

    @property
    def stops(self) -> bool:
        """True if a bad step stops the run."""
        return self.action == "stop"

    @property
    def rest_s(self) -> float:
        """The first rest of a failed rank's device, in seconds."""
        return seconds_of("faults.rest", self.rest)

    @property
    def lost_after_s(self) -> float:
        """The time without a sign of life after which a node counts as lost, in seconds."""
        return seconds_of("faults.lost_after", self.lost_after)

    def __post_init__(self) -> None:
        # These properties raise an error for a text that is no time.
        assert self.rest_s and self.lost_after_s
        positive("faults", self, "spike_factor", "window", "max_skips", "max_faults", "slow_steps")
        not_negative("faults", self, "check_every", "slow_factor", "slow_seconds")
        if self.window < MIN_WINDOW:
            raise UserError(f"faults.window={self.window} is too few steps to compare with: use {MIN_WINDOW} or more")
        if 0 < self.slow_factor <= 1.0:
            raise UserError(f"faults.slow_factor={self.slow_factor:g} must be above 1, e.g. 1.5 (or 0: none is named)")
