"""Data parallelism as a product: inside a node, where states are divided, and across nodes, where they are copied."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.layout.layout import Layout, Parts
from meshwright.layout.params import REPLICA, SHARD


def node_parts(layout: Layout) -> Parts:
    """dp as a product where weights are divided inside a node and copied across nodes."""
    ranks = layout.group("dp", 0)
    inside = sum(rank < (layout.node_size or layout.world) for rank in ranks)
    if inside == len(ranks) and not _crosses(layout, inside):
        return ()
    if inside == 1 or len(ranks) % inside or _crosses(layout, inside):
        raise UserError(
            f"zero.shard_group=node: a node of layout.node_size={layout.node_size} holds {inside} of the {len(ranks)} "
            "data-parallel ranks, which divides nothing evenly: set zero.shard_group=dp, or lower layout.tp or pp"
        )
    return (("dp", ((SHARD, inside), (REPLICA, len(ranks) // inside))),)


def _crosses(layout: Layout, inside: int) -> bool:
    """Whether any `inside` neighbours of a data-parallel group stand on two nodes."""
    size = layout.node_size or layout.world
    parts = (group[at : at + inside] for group in layout.groups("dp") for at in range(0, len(group), inside))
    return any(part[0] // size != part[-1] // size for part in parts)
