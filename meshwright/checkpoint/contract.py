"""The interface of one rank's trainer that saving and loading need, whichever class implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from meshwright.comm.mesh import Mesh
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.optim.owned import MatrixState
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


class CheckpointedTrainer(Protocol):
    """A trainer that can be saved and restored."""

    step_number: int
    consumed: int  # The number of samples consumed so far.
    # Called before an update changes tensors that a save may still be copying.
    before_update: Callable[[], object]

    @property
    def ctx(self) -> RankContext: ...

    @property
    def data_parallel(self) -> DataParallel: ...

    @property
    def writes(self) -> bool:
        """True on the one rank that creates and removes checkpoint folders."""

    def states(self) -> Iterator[State | SideState | MatrixState]:
        """Yield this rank's tensors, which a save reads and a load fills."""

    def counters(self) -> Mapping[str, float | str | None]:
        """Return the values that are saved with the tensors: the number of updates, the loss scale."""

    def restore(self, step: int, consumed: int, counters: Mapping[str, Any]) -> None:
        """Set the values that `counters` returned, after all tensors have been filled."""

    def publish(self) -> None:
        """Copy the loaded state to the model's weights. Every rank calls this after all have filled their tensors."""
