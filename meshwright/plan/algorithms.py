"""The seconds of our own algorithms of sums (`comm/algorithms.py`) on a cluster, round by round. No torch.

A round takes as long as its slowest message: inside a node over the senders' own links, between nodes over adapters,
which all messages that leave the node at once share. Other groups of the same axis work on the node at the same time.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.comm.algorithms import ALGORITHMS, rounds_of
from meshwright.plan.cluster import Cluster
from meshwright.plan.efficiency import START, collective_seconds, wait_seconds


@lru_cache(maxsize=10_000)
def _rounds(kind: str, size: int, op: str, on_node: int) -> tuple[tuple[int, int], ...]:
    """Returns for each round the most pieces that one rank of a node sends to another one of it, and the pieces that
    leave the node."""
    places = [list(rounds_of(kind, size, place, op, on_node)) for place in range(on_node)]
    found = []
    for number in range(len(places[0])):
        inside = outside = 0
        for rounds in places:
            each, _ = rounds[number]
            if each.to // on_node:  # these places are those of the first node
                outside += len(each.sent)
            else:
                inside = max(inside, len(each.sent))
        found.append((inside, outside))
    return tuple(found)


def algorithm_seconds(cluster: Cluster, kind: str, op: str, payload: float, size: int, on_node: int) -> float:
    """Returns the seconds of an all_reduce or reduce_scatter of `payload` bytes over a group of `size` ranks, so many
    of which are on one node."""
    if size <= 1 or payload <= 0:
        return 0.0
    if kind == "torch":
        return collective_seconds(cluster, op, payload, size, on_node)
    on_node, piece = min(on_node, size), payload / size
    share = cluster.ops.get("send", 1.0)
    link = cluster.node.link_gb_s * 1e9 * cluster.efficiency.link * share
    network = cluster.network.node_gb_s * 1e9 * cluster.efficiency.network * share * on_node / cluster.node.devices
    total = 0.0
    for inside, outside in _rounds(kind, size, op, on_node):
        latency = cluster.network.latency_us if outside else cluster.node.link_latency_us
        total += START + latency * 1e-6 + wait_seconds(cluster) + max(inside * piece / link, outside * piece / network)
    return total


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


def fits(kind: str, size: int) -> bool:
    """Whether an algorithm can sum over so many ranks."""
    return kind != "halving_doubling" or size & (size - 1) == 0


def fastest(cluster: Cluster, op: str, payload: float, size: int, on_node: int) -> str:
    """Returns the algorithm, torch's own included, that is expected to be fastest for one sum."""
    kinds = ["torch", *(kind for kind in ALGORITHMS if fits(kind, size))]
    return min(kinds, key=lambda kind: algorithm_seconds(cluster, kind, op, payload, size, on_node))
