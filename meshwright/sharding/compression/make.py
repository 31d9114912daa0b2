"""The reducer of a config."""

from __future__ import annotations

from meshwright.config.comm import LOW_RANK, CommConfig, ReduceConfig
from meshwright.sharding.algorithms import AlgorithmReducer
from meshwright.sharding.compression.exchange import ExchangeReducer
from meshwright.sharding.compression.low_rank import LowRankReducer
from meshwright.sharding.reducers import PLAIN_REDUCER, Reducer


def make_reducer(config: CommConfig, seed: int, node_size: int) -> Reducer:
    """Returns the reducer that a config asks for; `seed` keys its random numbers."""
    if config.algorithm != "torch":
        return AlgorithmReducer(config.algorithm, node_size)
    return make_compressing(config.reduce, seed)


def make_compressing(config: ReduceConfig, seed: int) -> Reducer:
    if config.kind == "plain":
        return PLAIN_REDUCER
    return (LowRankReducer if config.kind in LOW_RANK else ExchangeReducer)(config, seed)
