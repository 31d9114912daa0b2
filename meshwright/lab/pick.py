"""Choice of the fastest all-reduce algorithm for a group, from its links' speeds (`comm.algorithm: auto`). No torch.

A round of one of our algorithms takes as long as its slowest message. Messages inside a node travel over the sender's
link. Messages between nodes travel over adapters, shared by all messages that leave the node in the round. torch's
algorithm is assumed to be a ring.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.config.comm import LinkConfig
from meshwright.engine.sharding.reducers import Links
from meshwright.lab.algorithms import ALGORITHMS, rounds_of
from meshwright.spec.traffic.ledger import OPERATIONS, bus_factor

# One of our algorithms is chosen if it takes at most this fraction of torch's time. torch's sums overlap with backward
# and ours do not, so a small gain is not worth it.
MAX_TIME_RATIO = 0.8


@lru_cache(maxsize=10_000)
def rounds_on_node(kind: str, size: int, op: str, on_node: int) -> tuple[tuple[int, int], ...]:
    """Return (inside, outside) for each round: the most chunks that one rank sends to another of its node, and the
    total number of chunks that leave the node."""
    by_place = [list(rounds_of(kind, size, place, op, on_node)) for place in range(on_node)]
    chunks = []
    for number in range(len(by_place[0])):
        inside = outside = 0
        for rounds in by_place:
            sends, _ = rounds[number]
            # These are the places of the first node, so a target beyond `on_node` is on another node.
            if sends.to // on_node:
                outside += len(sends.sent)
            else:
                inside = max(inside, len(sends.sent))
        chunks.append((inside, outside))
    return tuple(chunks)


def algorithm_seconds(links: Links, kind: str, op: str, payload: float, size: int, on_node: int) -> float:
    """Return the seconds of an all_reduce or reduce_scatter of `payload` bytes over a group of `size` ranks, `on_node`
    neighbours of which share a node."""
    if size <= 1 or payload <= 0:
        return 0.0
    on_node = min(on_node, size)
    if kind not in ALGORITHMS:
        # A ring is as slow as its slowest link, and each of its rounds waits for one message.
        across = size > on_node
        rate, latency = (min(links.link, links.network), links.network_s) if across else (links.link, links.link_s)
        trips = OPERATIONS[op].rounds
        return links.extra + bus_factor(op, size) * payload / rate + trips * (size - 1) * latency
    total = 0.0
    chunk = payload / size
    for inside, outside in rounds_on_node(kind, size, op, on_node):
        latency = links.network_s if outside else links.link_s
        total += links.extra + latency + max(inside * chunk / links.link, outside * chunk / links.network)
    return total


def fits(kind: str, size: int) -> bool:
    """Return whether an algorithm can sum over `size` ranks."""
    return kind != "halving_doubling" or size & (size - 1) == 0


def fastest(links: Links, op: str, payload: float, size: int, on_node: int) -> str:
    """Return the algorithm that is expected to be fastest for one sum. This is torch's, unless another one takes at
    most `MAX_TIME_RATIO` of its time."""
    kinds = ["torch", *(kind for kind in ALGORITHMS if fits(kind, size))]
    seconds = {kind: algorithm_seconds(links, kind, op, payload, size, on_node) for kind in kinds}
    best = min(seconds, key=lambda kind: seconds[kind])
    return best if seconds[best] <= MAX_TIME_RATIO * seconds["torch"] else "torch"


def links_of(config: LinkConfig, on_node: int, node_size: int) -> Links:
    """Return the links of a group that has `on_node` ranks on a node."""
    link, latency = config.link_gb_s * 1e9, config.latency_us * 1e-6
    # The groups on a node share its adapters, so a group with fewer ranks on the node has a smaller share.
    network = config.network_gb_s * 1e9 * on_node / node_size if config.network_gb_s else link
    return Links(link, network, latency, latency)
