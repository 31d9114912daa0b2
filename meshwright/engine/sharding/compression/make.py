"""Makes the reducer that a config asks for, and the plan of it that the planner uses. Torch is imported only to make a
reducer that needs it."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config.comm import CommConfig, ReduceConfig
from meshwright.config.replicas import LocalConfig, ServerConfig
from meshwright.config.sections import Config
from meshwright.engine.sharding.compression.sizes import UndecidedPlan
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, Reducer, ReducerPlan
from meshwright.plugins import load_object


class ReducerRequest(NamedTuple):
    """All settings of a sum. `seed` keys random numbers. For `keeps_sums` see `ExchangeReducer`."""

    reduce: ReduceConfig
    seed: int = 0
    keeps_sums: bool = True
    comm: CommConfig = CommConfig()
    server: ServerConfig = ServerConfig()
    node_size: int = 1

    @property
    def plan(self) -> ReducerPlan:
        """The part of the reducer that the planner uses."""
        if (own := self._of_lab()) is not None:
            return own
        if self.reduce.adaptive:
            return UndecidedPlan(self.reduce)
        if not self.reduce.compresses:
            return PLAIN_REDUCER
        plan: ReducerPlan = load_object(self.reduce.facts.plan)(self.reduce)
        return plan

    def make(self) -> Reducer:
        if (own := self._of_lab()) is not None:
            return own
        if self.reduce.adaptive:
            return adaptive(self)
        if not self.reduce.compresses:
            return PLAIN_REDUCER
        reducer: Reducer = load_object(self.reduce.facts.reducer)(self)
        return reducer

    def _of_lab(self) -> Reducer | None:
        """Return the reducer of `lab` that the config asks for, if any. It is its own plan and needs no torch."""
        made: Reducer | None = None
        if self.server.ranks:
            made = load_object("meshwright.lab.server:ServerReducer")(
                self.server.ranks, self.server.staleness, self.seed
            )
        elif self.comm.algorithm.sums_itself:
            comm = self.comm
            make = load_object("meshwright.lab.reducers:AlgorithmReducer")
            made = make(comm.algorithm.dp, self.node_size, comm.known_links, comm.switches)
        return made


def adaptive(asked: ReducerRequest) -> Reducer:
    from meshwright.engine.sharding.compression.adaptive import AdaptiveReducer

    return AdaptiveReducer(asked.reduce, asked.seed)


def low_rank(asked: ReducerRequest) -> Reducer:
    from meshwright.engine.sharding.compression.low_rank import LowRankReducer

    return LowRankReducer(asked.reduce, asked.seed)


def exchange(asked: ReducerRequest) -> Reducer:
    from meshwright.engine.sharding.compression.exchange import ExchangeReducer

    return ExchangeReducer(asked.reduce, asked.seed, asked.keeps_sums)


def gradient_sums(config: Config, node_size: int) -> ReducerRequest:
    """Return the settings with which data-parallel ranks sum gradients. `node_size`: ranks per node."""
    train = config.train
    return ReducerRequest(config.comm.reduce, train.seed, True, config.comm, train.server, node_size)


def replica_sums(local: LocalConfig, seed: int) -> ReducerRequest:
    """Return the settings with which replicas sum their changes."""
    return ReducerRequest(local.compress, seed, keeps_sums=False)
