"""What saving and loading need of one rank's trainer, whoever provides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from meshwright.comm.mesh import Mesh
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.sharding.buffers import SideState, State
from meshwright.engine.sharding.data_parallel import DataParallel
from meshwright.spec.layout import Layout
from meshwright.spec.traffic.ledger import Ledger


class RankContext(Protocol):
    """The run's config and this rank's place in it."""

    @property
    def config(self) -> Config: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def device(self) -> Device: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def rank(self) -> int: ...


class Checkpointed(Protocol):
    """A trainer that can be saved and restored."""

    step_number: int
    consumed: int  # samples
    before_update: Callable[[], object]  # called before an update changes what a save may still be copying

    @property
    def ctx(self) -> RankContext: ...

    @property
    def data_parallel(self) -> DataParallel: ...

    @property
    def writes(self) -> bool:
        """Whether this is the one rank that makes and removes checkpoints' folders."""

    def states(self) -> Iterator[State | SideState]:
        """Yields this rank's tensors, which a save reads and a load fills."""

    def counters(self) -> Mapping[str, float | None]:
        """Returns the numbers that are saved beside the tensors: updates made, the loss scale."""

    def restore(self, step: int, consumed: int, counters: Mapping[str, Any]) -> None:
        """Sets the values that `counters` returned, after the tensors have been filled."""

    def publish(self) -> None:
        """Copies the loaded state to the model's weights. Every rank calls it after all have filled their tensors."""
