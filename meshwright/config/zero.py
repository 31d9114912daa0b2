"""The section of a config that says what is sharded over the data-parallel ranks, and where it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.config.blocks import positive
from meshwright.errors import UserError


@dataclass(frozen=True)
class OffloadConfig:
    """Where offloaded states are stored. They are brought to the device in pieces, one ahead of its use."""

    optimizer: Literal["none", "cpu", "disk"] = "none"  # masters and moments
    params: Literal["none", "cpu", "disk"] = "none"  # with zero.stage=3
    path: str = ""  # folder of the files on disk
    buffer_mib: float = 64.0  # size of a piece; a few are held at a time

    def __post_init__(self) -> None:
        positive("zero.offload", self, "buffer_mib")
        if "disk" in (self.optimizer, self.params) and not self.path:
            raise UserError("zero.offload.path is empty: name a folder on a fast disk to offload to")


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded over the data-parallel ranks: optimizer states (1), gradients too (2), parameters too (3)."""

    stage: int = 0
    shard_group: Literal["dp", "node"] = "dp"  # node: divided inside a node, copied across nodes
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UserError(f"zero.stage={self.stage} is not one of 0, 1, 2, 3")
