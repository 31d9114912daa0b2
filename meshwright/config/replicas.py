"""The config sections on training that synchronises rarely: replicas that train separately, and a parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.config.comm import ReduceConfig
from meshwright.errors import UserError


@dataclass(frozen=True)
class OuterReduceConfig(ReduceConfig):
    """The compression of the weight changes that replicas send to each other."""

    section: ClassVar[str] = "train.local.compress"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive:
            raise UserError(f"{self.section}.adaptive is not available: choose {self.section}.kind yourself")
        if self.facts.sends_factors:
            raise UserError(
                f"{self.section}.kind={self.kind} sends matrices, and replicas sum pieces of buckets: use int8, int4 "
                "or topk"
            )


@dataclass(frozen=True)
class LocalConfig:
    """Local training of the replicas of `layout.replicas`: the steps between synchronisations, and the outer optimizer
    at them."""

    steps: int = 50  # updates of each replica from one synchronisation of a parameter to the next
    # The update from the mean of the replicas' changes: nesterov (DiLoCo), sgd, or plain averaging.
    outer: Literal["nesterov", "sgd", "average"] = "nesterov"
    outer_lr: float = 0.7  # for nesterov and sgd
    momentum: float = 0.9  # for nesterov
    fragments: int = 1  # the parameters are divided into this many fragments, which are synchronised in turn
    delay: int = 0  # steps that the replicas train while a fragment is being summed
    shares: tuple[int, ...] = ()  # relative shares of the global batch by replica, e.g. (3, 1); empty: equal shares
    compress: OuterReduceConfig = field(default_factory=OuterReduceConfig)

    @property
    def has_momentum(self) -> bool:
        return self.outer == "nesterov"

    def __post_init__(self) -> None:
        positive("train.local", self, "steps", "outer_lr", "fragments")
        not_negative("train.local", self, "delay")
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"train.local.momentum={self.momentum} must be at least 0 and below 1")
        if self.shares and min(self.shares) < 1:
            raise UserError(f"train.local.shares={list(self.shares)} must be whole numbers above zero, e.g. [3, 1]")
        for key, kinds in (("outer_lr", ("nesterov", "sgd")), ("momentum", ("nesterov",))):
            if self.outer not in kinds and getattr(self, key) != getattr(LocalConfig, key):
                raise UserError(
                    f"train.local.{key} has no effect with train.local.outer={self.outer}: leave it out, or set outer "
                    f"to {' or '.join(kinds)}"
                )
        if self.fragments > self.steps:
            raise UserError(
                f"train.local.fragments={self.fragments} can't be synchronised in turn within train.local.steps="
                f"{self.steps}: lower fragments"
            )
        if self.delay >= self.steps:
            raise UserError(
                f"train.local.delay={self.delay} must be below train.local.steps={self.steps}: a fragment has arrived "
                "before it is summed again"
            )

    @property
    def lr(self) -> float:
        """The outer learning rate. Averaging is a step of rate 1 along the mean change."""
        return 1.0 if self.outer == "average" else self.outer_lr

    def parts(self, samples: int, replicas: int) -> list[range]:
        """Return the range of a step's samples that each replica takes."""
        shares: Sequence[int] = self.shares or (1,) * replicas
        ends = [samples * upto // sum(shares) for upto in accumulate(shares)]
        return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class ServerConfig:
    """A parameter server, for study: some of the data-parallel ranks sum the gradients of all."""

    ranks: int = 0  # number of ranks that sum; 0: there is no server
    staleness: int = 0  # steps by which a rank's gradients may be late; 0: the server waits for all

    def __post_init__(self) -> None:
        not_negative("train.server", self, "ranks", "staleness")
        if self.staleness and not self.ranks:
            raise UserError(
                f"train.server.staleness={self.staleness} has no effect without a server: set train.server.ranks"
            )
