"""The reducer of a config."""

from __future__ import annotations

from meshwright.config.comm import LOW_RANK, CommConfig
from meshwright.sharding.algorithms import AlgorithmReducer
from meshwright.sharding.compression.exchange import ExchangeReducer
from meshwright.sharding.compression.low_rank import LowRankReducer
from meshwright.sharding.reducers import PLAIN_REDUCER, Reducer


def make_reducer(config: CommConfig, seed: int, node_size: int) -> Reducer:
    """Returns the reducer that a config asks for; `seed` keys its random numbers."""
    if config.algorithm != "torch":
        return AlgorithmReducer(config.algorithm, node_size, config.known_links)
    if config.reduce.kind == "plain":
        return PLAIN_REDUCER
    compressing = LowRankReducer if config.reduce.kind in LOW_RANK else ExchangeReducer
    return compressing(config.reduce, seed)
