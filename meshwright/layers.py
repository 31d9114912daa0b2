"""Tensor-parallel layers for your own modules.

    from meshwright.layers import ColumnParallelLinear, RowParallelLinear

    net = nn.Sequential(ColumnParallelLinear(8, 32), nn.GELU(), RowParallelLinear(32, 8))
    trained = meshwright.wrap(net, {"layout": {"tp": 2}}, loss=loss)

They hold whole weights until `wrap` shards them, so a module of them also runs in one plain process.
"""

from meshwright.nn.own_layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelCrossEntropy,
    ParallelLayer,
    ParallelMLP,
    RowParallelLinear,
    TensorRegion,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelCrossEntropy",
    "ParallelLayer",
    "ParallelMLP",
    "RowParallelLinear",
    "TensorRegion",
    "VocabParallelEmbedding",
]
