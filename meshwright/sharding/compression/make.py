"""The reducer of a config."""

from __future__ import annotations

from meshwright.config.comm import LOW_RANK, ReduceConfig
from meshwright.sharding.compression.exchange import ExchangeReducer
from meshwright.sharding.compression.low_rank import LowRankReducer
from meshwright.sharding.reducers import PLAIN_REDUCER, Reducer


def make_reducer(config: ReduceConfig, seed: int) -> Reducer:
    """Returns the reducer that `comm.reduce` asks for; `seed` keys its random numbers."""
    if config.kind == "plain":
        return PLAIN_REDUCER
    return LowRankReducer(config, seed) if config.kind in LOW_RANK else ExchangeReducer(config, seed)
