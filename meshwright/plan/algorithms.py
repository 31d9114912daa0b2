"""Predict the seconds of our own all-reduce algorithms (`spec/traffic/algorithms.py`) and of the naive sum."""

from __future__ import annotations

from meshwright.plan.cluster import Cluster
from meshwright.plan.efficiency import START, collective_seconds, wait_seconds
from meshwright.spec.traffic import pick


def algorithm_seconds(cluster: Cluster, kind: str, op: str, payload: float, size: int, on_node: int) -> float:
    """Returns the seconds of an all_reduce or reduce_scatter of `payload` bytes over a group of `size` ranks, so many
    of which are on one node."""
    if kind == "torch":
        return collective_seconds(cluster, op, payload, size, on_node)
    share = cluster.ops.get("send", 1.0)
    link = cluster.node.link_gb_s * 1e9 * cluster.efficiency.link * share
    network = cluster.network.node_gb_s * 1e9 * cluster.efficiency.network * share
    links = pick.Links(
        link, network * min(on_node, size) / cluster.node.devices, cluster.node.link_latency_us * 1e-6,
        cluster.network.latency_us * 1e-6, START + wait_seconds(cluster),
    )  # fmt: skip
    return pick.algorithm_seconds(links, kind, op, payload, size, on_node)


def gather_to_one_seconds(cluster: Cluster, payload: float, size: int, on_node: int) -> float:
    """Returns the seconds of the naive sum: everything passes through one rank's link, in and then out, and what comes
    from and goes to other nodes through adapters."""
    link = cluster.node.link_gb_s * 1e9 * cluster.efficiency.link
    network = cluster.network.node_gb_s * 1e9 * cluster.efficiency.network
    away = size - min(on_node, size)
    taken = max((size - 1) * payload / link, on_node * payload / network if away else 0.0)
    given = max((size - 1 - away) * payload / link, away * payload / network)
    latency = cluster.network.latency_us if away else cluster.node.link_latency_us
    return taken + given + 2 * (START + latency * 1e-6 + wait_seconds(cluster))
