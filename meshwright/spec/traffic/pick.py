"""Which algorithm sums fastest over a group, by the figures of the links: what `comm.algorithm: auto` asks. No torch.

A round of one of our algorithms takes as long as its slowest message: inside a node over the senders' own links,
between nodes over adapters, which all messages that leave the node at once share. torch's sum is taken to be a ring.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.config.comm import LinkConfig
from meshwright.spec.traffic.algorithms import ALGORITHMS, rounds_of
from meshwright.spec.traffic.ledger import bus_factor

WORTH = 0.8  # torch's sums hide behind backward and ours do not, so a little time is not worth leaving them


class Links(NamedTuple):
    """Bytes per second of a rank's link into its node and of its group's share of the node's adapters, and the seconds
    of a message's latency over either. `extra`: seconds that each round takes besides."""

    link: float
    network: float
    link_s: float
    network_s: float
    extra: float = 0.0


@lru_cache(maxsize=10_000)
def rounds_on_node(kind: str, size: int, op: str, on_node: int) -> tuple[tuple[int, int], ...]:
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


def algorithm_seconds(links: Links, kind: str, op: str, payload: float, size: int, on_node: int) -> float:
    """Returns the seconds of an all_reduce or reduce_scatter of `payload` bytes over a group of `size` ranks, so many
    neighbours of which are on one node."""
    if size <= 1 or payload <= 0:
        return 0.0
    on_node, piece = min(on_node, size), payload / size
    if kind == "torch":
        across = size > on_node
        rate, latency = (min(links.link, links.network), links.network_s) if across else (links.link, links.link_s)
        trips = 2 if op == "all_reduce" else 1
        return links.extra + bus_factor(op, size) * payload / rate + trips * (size - 1) * latency
    total = 0.0
    for inside, outside in rounds_on_node(kind, size, op, on_node):
        late = links.network_s if outside else links.link_s
        total += links.extra + late + max(inside * piece / links.link, outside * piece / links.network)
    return total


def fits(kind: str, size: int) -> bool:
    """Whether an algorithm can sum over so many ranks."""
    return kind != "halving_doubling" or size & (size - 1) == 0


def fastest(links: Links, op: str, payload: float, size: int, on_node: int) -> str:
    """Returns the algorithm that is expected to be fastest for one sum: torch's, unless another one takes at most
    `WORTH` of its time."""
    kinds = ["torch", *(kind for kind in ALGORITHMS if fits(kind, size))]
    taken = {kind: algorithm_seconds(links, kind, op, payload, size, on_node) for kind in kinds}
    best = min(taken, key=lambda kind: taken[kind])
    return best if taken[best] <= WORTH * taken["torch"] else "torch"


def links_of(config: LinkConfig, on_node: int, node_size: int) -> Links:
    """Returns the links of a group that has so many ranks on a node."""
    link, latency = config.link_gb_s * 1e9, config.latency_us * 1e-6
    network = config.network_gb_s * 1e9 * on_node / node_size if config.network_gb_s else link
    return Links(link, network, latency, latency)
