"""The reducer of a config."""

from __future__ import annotations

from meshwright.config.comm import LOW_RANK, ReduceConfig
from meshwright.config.sections import Config
from meshwright.engine.sharding.algorithms import AlgorithmReducer
from meshwright.engine.sharding.compression.adaptive import AdaptiveReducer
from meshwright.engine.sharding.compression.exchange import ExchangeReducer
from meshwright.engine.sharding.compression.low_rank import LowRankReducer
from meshwright.engine.sharding.reducers import PLAIN_REDUCER, Reducer
from meshwright.engine.sharding.server import ServerReducer


def reducer_of(config: Config, node_size: int) -> Reducer:
    """Returns the reducer that a config asks for; the run's seed keys its random numbers."""
    server, seed, comm = config.train.server, config.train.seed, config.comm
    if server.ranks:
        return ServerReducer(server.ranks, server.staleness, seed)
    if comm.algorithm.sums_itself:
        return AlgorithmReducer(comm.algorithm.dp, node_size, comm.known_links, comm.switches)
    return make_compressing(comm.reduce, seed)


def make_compressing(config: ReduceConfig, seed: int, keeps_sums: bool = True) -> Reducer:
    """`keeps_sums`: see `ExchangeReducer`."""
    if config.adaptive:
        return AdaptiveReducer(config, seed)
    if config.kind == "plain":
        return PLAIN_REDUCER
    return LowRankReducer(config, seed) if config.kind in LOW_RANK else ExchangeReducer(config, seed, keeps_sums)
