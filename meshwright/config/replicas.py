"""The sections on training that synchronises rarely: replicas that take steps of their own, and a parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.config.comm import LOW_RANK, ReduceConfig
from meshwright.errors import UserError


@dataclass(frozen=True)
class OuterReduceConfig(ReduceConfig):
    """How the replicas' changes are summed: as they are, or compressed."""

    section: ClassVar[str] = "train.local.compress"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive:
            raise UserError(f"{self.section}.adaptive is not there: choose {self.section}.kind yourself")
        if self.kind in LOW_RANK:
            raise UserError(
                f"{self.section}.kind={self.kind} sends matrices, and replicas sum pieces of buckets: use int8, int4 "
                "or topk"
            )


@dataclass(frozen=True)
class LocalConfig:
    """What the replicas of `layout.replicas` do between and at their synchronisations."""

    steps: int = 50  # updates of each replica from one synchronisation of a parameter to the next
    outer: Literal["nesterov", "sgd", "average"] = "nesterov"  # what is done with the mean of the replicas' changes
    outer_lr: float = 0.7
    momentum: float = 0.9  # with outer=nesterov
    fragments: int = 1  # parts of the parameters that are synchronised in turn
    delay: int = 0  # steps that go on while a fragment is summed
    shares: tuple[int, ...] = ()  # parts of the global batch that the replicas take; empty: equal ones
    compress: OuterReduceConfig = field(default_factory=OuterReduceConfig)

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
        return 1.0 if self.outer == "average" else self.outer_lr

    def parts(self, samples: int, replicas: int) -> list[range]:
        """Returns which of a step's samples each replica takes."""
        shares: Sequence[int] = self.shares or (1,) * replicas
        ends = [samples * upto // sum(shares) for upto in accumulate(shares)]
        return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class ServerConfig:
    """A parameter server, for study: some data-parallel ranks sum the gradients of all."""

    ranks: int = 0  # that sum; 0: there is no server
    staleness: int = 0  # steps by which a rank's gradients may come late; 0: all are waited for

    def __post_init__(self) -> None:
        not_negative("train.server", self, "ranks", "staleness")
        if self.staleness and not self.ranks:
            raise UserError(
                f"train.server.staleness={self.staleness} has no effect without a server: set train.server.ranks"
            )
