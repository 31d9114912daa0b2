"""Derives what switches leave of a node's adapters to the groups of a layout. No torch.

Nodes on one switch reach each other at the full rate of their adapters. All links from a switch to the others carry
the traffic of its nodes at `1 / oversubscription` of that rate.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from meshwright.plan.cluster import Cluster
from meshwright.plan.job import Job
from meshwright.spec.layout.layout import Layout
from meshwright.spec.traffic.ledger import OPERATIONS

# Our algorithms visit the nodes of one switch after another, if `comm.switches` names the switches.
OWN_ORDER = frozenset({"dp", "edp"})


def adapter_rate_left(cluster: Cluster, job: Job, axis: str, op: str) -> float:
    """Return the share of its adapters' rate at which a group along `axis` sends to other nodes, from 0 to 1."""
    network, layout = cluster.network, job.layout
    if not network.is_oversubscribed or not layout.node_size:
        return 1.0
    comm = job.config.comm
    is_sorted = bool(comm.switches) and axis in OWN_ORDER and comm.algorithm.sums_itself
    crossing = _crossing(layout, axis, network.switch_nodes, tuple(comm.switches), is_sorted)
    share = crossing.rows if OPERATIONS[op].is_exchange else crossing.hops
    return min(1.0, 1.0 / (share * network.oversubscription)) if share else 1.0


class _Crossing:
    """The shares of a group's traffic between nodes that also cross from switch to switch.

    `hops` is the share of a ring's hops. If each hop carries the same bytes and every group does the same, a switch's
    links carry that share of the traffic of its nodes' adapters. `rows` is the share of the rows of an all_to_all.
    """

    def __init__(self, hops: float, rows: float) -> None:
        self.hops, self.rows = hops, rows


@lru_cache(maxsize=100_000)
def _crossing(layout: Layout, axis: str, switch_nodes: int, switches: tuple[int, ...], is_sorted: bool) -> _Crossing:
    """Return the largest shares among an axis's groups.

    Without `switches` the numbers of nodes follow the switches, so the first group stands for all.
    """
    groups = layout.groups(axis) if switches else (layout.group(axis, 0),)
    worst = [_of_group(layout, group, switch_nodes, switches, is_sorted) for group in groups]
    return _Crossing(max(each.hops for each in worst), max(each.rows for each in worst))


def _of_group(
    layout: Layout, group: tuple[int, ...], switch_nodes: int, switches: tuple[int, ...], is_sorted: bool
) -> _Crossing:
    assert layout.node_size
    nodes = list(dict.fromkeys(rank // layout.node_size for rank in group))
    if len(nodes) == 1:
        return _Crossing(0.0, 0.0)
    of_node = [switches[node] if switches else node // switch_nodes for node in nodes]
    if is_sorted:
        of_node.sort()
    # A ring of two nodes sends both ways over the same hop.
    hops = sum(a != b for a, b in pairwise([*of_node, of_node[0]])) / len(nodes)
    same_switch = sum(of_node.count(switch) - 1 for switch in of_node)
    rows = 1.0 - same_switch / (len(nodes) * (len(nodes) - 1))
    return _Crossing(hops, rows)
