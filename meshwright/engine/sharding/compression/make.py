"""The reducers by name, with the plan that the planner uses for each. Torch is imported only to make a reducer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.config.comm import LOW_RANK, CommConfig, ReduceConfig
from meshwright.config.replicas import LocalConfig, ServerConfig
from meshwright.config.sections import Config
from meshwright.engine.sharding.compression.sizes import CompressionPlan, UndecidedPlan
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
    def name(self) -> str:
        """The name of the reducer in `REDUCERS`."""
        if self.server.ranks:
            return "server"
        if self.comm.algorithm.sums_itself:
            return "algorithm"
        if self.reduce.adaptive:
            return "adaptive"
        if self.reduce.kind == "plain":
            return "plain"
        return "low rank" if self.reduce.kind in LOW_RANK else "exchange"

    @property
    def plan(self) -> ReducerPlan:
        return REDUCERS[self.name].plan(self)

    def make(self) -> Reducer:
        return REDUCERS[self.name].reducer(self)


class ReducerEntry(NamedTuple):
    """A way to sum gradients. Both functions return the same type of object if it works without torch."""

    plan: Callable[[ReducerRequest], ReducerPlan]
    reducer: Callable[[ReducerRequest], Reducer]


def _server(asked: ReducerRequest) -> Reducer:
    make: Callable[..., Reducer] = load_object("meshwright.lab.server:ServerReducer")
    return make(asked.server.ranks, asked.server.staleness, asked.seed)


def _algorithm(asked: ReducerRequest) -> Reducer:
    comm = asked.comm
    make: Callable[..., Reducer] = load_object("meshwright.lab.reducers:AlgorithmReducer")
    return make(comm.algorithm.dp, asked.node_size, comm.known_links, comm.switches)


def _adaptive(asked: ReducerRequest) -> Reducer:
    from meshwright.engine.sharding.compression.adaptive import AdaptiveReducer

    return AdaptiveReducer(asked.reduce, asked.seed)


def _low_rank(asked: ReducerRequest) -> Reducer:
    from meshwright.engine.sharding.compression.low_rank import LowRankReducer

    return LowRankReducer(asked.reduce, asked.seed)


def _exchange(asked: ReducerRequest) -> Reducer:
    from meshwright.engine.sharding.compression.exchange import ExchangeReducer

    return ExchangeReducer(asked.reduce, asked.seed, asked.keeps_sums)


REDUCERS: dict[str, ReducerEntry] = {
    "server": ReducerEntry(_server, _server),
    "algorithm": ReducerEntry(_algorithm, _algorithm),
    "plain": ReducerEntry(lambda asked: PLAIN_REDUCER, lambda asked: PLAIN_REDUCER),
    "adaptive": ReducerEntry(lambda asked: UndecidedPlan(asked.reduce), _adaptive),
    "low rank": ReducerEntry(lambda asked: CompressionPlan(asked.reduce), _low_rank),
    "exchange": ReducerEntry(lambda asked: CompressionPlan(asked.reduce), _exchange),
}


def gradient_sums(config: Config, node_size: int) -> ReducerRequest:
    """Return the settings with which data-parallel ranks sum gradients. `node_size`: ranks per node."""
    train = config.train
    return ReducerRequest(config.comm.reduce, train.seed, True, config.comm, train.server, node_size)


def replica_sums(local: LocalConfig, seed: int) -> ReducerRequest:
    """Return the settings with which replicas sum their changes."""
    return ReducerRequest(local.compress, seed, keeps_sums=False)
