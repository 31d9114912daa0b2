"""Data parallelism as a product: inside a node, where states are sharded, and across nodes, where they are
replicated."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.layout.layout import Layout, Parts
from meshwright.layout.params import REPLICA, SHARD


def node_parts(layout: Layout) -> Parts:
    """Returns the parts of dp where weights are sharded inside a node and replicated across nodes."""
    ranks = layout.group("dp", 0)
    inside = sum(rank < (layout.node_size or layout.world) for rank in ranks)
    neighbours = (group[at : at + inside] for group in layout.groups("dp") for at in range(0, len(ranks), inside))
    uneven = any(map(layout.crosses_node, neighbours))
    if inside == len(ranks) and not uneven:
        return ()
    if inside == 1 or len(ranks) % inside or uneven:
        raise UserError(
            f"zero.shard_group=node: a node of layout.node_size={layout.node_size} holds {inside} of the {len(ranks)} "
            "data-parallel ranks, which divides nothing evenly: set zero.shard_group=dp, or lower layout.tp or pp"
        )
    return (("dp", ((SHARD, inside), (REPLICA, len(ranks) // inside))),)
