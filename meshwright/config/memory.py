"""The config sections that set the contents of a rank's memory: sharded and offloaded states, recomputed
activations."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from meshwright.config.blocks import positive
from meshwright.errors import UserError


class Place(Enum):
    """A place of weights or states. The values are those of `zero.offload`."""

    DEVICE = "none"
    HOST = "cpu"
    DISK = "disk"


class Recomputed(Enum):
    """The part of a block that backward computes again."""

    NOTHING = "none"
    CORE = "selective"
    BLOCK = "full"


@dataclass(frozen=True)
class OffloadConfig:
    """The storage of offloaded states. They are copied to the device in slices, one slice ahead of its use."""

    optimizer: Literal["none", "cpu", "disk"] = "none"  # place of master weights and optimizer states
    params: Literal["none", "cpu", "disk"] = "none"  # place of each rank's shard of the weights, with zero.stage=3
    path: str = ""  # folder of the files on disk
    buffer_mib: float = 64.0  # size of a slice; a few are held at a time

    def __post_init__(self) -> None:
        positive("zero.offload", self, "buffer_mib")
        if Place.DISK in self.places and not self.path:
            raise UserError("zero.offload.path is empty: name a folder on a fast disk to offload to")

    @property
    def optimizer_at(self) -> Place:
        return Place(self.optimizer)

    @property
    def params_at(self) -> Place:
        return Place(self.params)

    @property
    def places(self) -> tuple[Place, Place]:
        """The places of master weights and optimizer states, and of the weights."""
        return self.optimizer_at, self.params_at


@dataclass(frozen=True)
class ZeroConfig:
    """ZeRO: shard optimizer states (1), gradients too (2) and parameters too (3) over the data-parallel ranks."""

    stage: int = 0
    shard_group: Literal["dp", "node"] = "dp"  # node: sharded inside a node, replicated across nodes
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @property
    def stays_in_node(self) -> bool:
        """True if states are sharded within each node and replicated across nodes."""
        return self.shard_group == "node"

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UserError(f"zero.stage={self.stage} is not one of 0, 1, 2, 3")


@dataclass(frozen=True)
class RecomputeConfig:
    """The activations that backward computes again, so that they need not be saved."""

    mode: str = "none"  # none, selective (the attention core), full (each block), every:N (each run of N blocks)
    offload: bool = False  # keep the inputs of recomputed blocks in host memory
    pieces: int = 1  # parts into which each MLP cuts the tokens; in every mode, backward recomputes them one by one

    def __post_init__(self) -> None:
        positive("recompute", self, "pieces")
        number = self.mode.removeprefix("every:")
        every = number != self.mode and number.isdecimal() and len(number) < 10 and int(number) > 0
        if self.mode not in ("none", "selective", "full") and not every:
            raise UserError(f"recompute.mode={self.mode} is not one of none, selective, full, every:N (N blocks)")
        if self.offload and not self.blocks:
            raise UserError(
                f"recompute.offload=true moves the inputs of recomputed blocks, and recompute.mode={self.mode} "
                "recomputes none: set recompute.mode=full"
            )

    @property
    def part(self) -> Recomputed:
        """The part of a block that is recomputed."""
        return Recomputed.BLOCK if self.blocks else Recomputed(self.mode)

    @property
    def core(self) -> bool:
        """True if only the attention core is recomputed."""
        return self.part is Recomputed.CORE

    @property
    def blocks(self) -> int:
        """The number of blocks that are recomputed together; 0: none are."""
        if self.mode == "full":
            return 1
        return int(self.mode.removeprefix("every:")) if self.mode.startswith("every:") else 0

    def offloaded(self, runs: int, first: bool, last: bool) -> range:
        """Return the runs of a chunk's blocks whose inputs are kept in host memory. `first` and `last` say whether the
        model begins or ends in the chunk.

        Two runs are left out: one whose input came from another stage, since that tensor stays on the device to receive
        its gradient, and the model's last, since its backward comes next."""
        return range(int(not first), runs - int(last)) if self.offload else range(0)
