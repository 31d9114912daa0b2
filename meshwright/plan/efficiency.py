"""How long products, memory passes and collectives take on a cluster: one curve each, shared by all. No torch."""

from __future__ import annotations

import math
from functools import lru_cache

from meshwright.plan.cluster import Cluster, Device

# Tiles that product kernels are cut into, with the share of the best rate each can reach: a smaller tile reads its
# factors more often from shared memory.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.96), (128, 64, 0.84), (64, 64, 0.65))
DEPTH = 96  # k at which a tile's start and end cost as much as its inside
CORE_DEPTH = 12  # the same on a processor's core
ALIGNED = 8  # elements of two bytes in the 16-byte loads that tensor cores need
UNALIGNED = 0.12  # the rate without them


@lru_cache(maxsize=100_000)
def tile_share(m: int, n: int, k: int, count: int, units: int) -> float:
    """The share of its best rate that a product of this shape reaches: filled tiles, full waves, depth, alignment."""
    if units == 1:  # a processor's core: no tiles are dealt out, and no loads need to be aligned
        return k / (k + CORE_DEPTH)
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * count
        filled = m * n * count / (tiles * rows * columns)
        waves = tiles / units
        best = max(best, rate * filled * waves / math.ceil(waves))
    share = best * k / (k + DEPTH)
    if k % ALIGNED or n % ALIGNED:
        share *= UNALIGNED
    return share


def product_seconds(
    device: Device, precision: str, efficiency: float, memory_rate: float,
    m: int, n: int, k: int, count: int, element: int,
) -> float:  # fmt: skip
    """One product [m, k] x [k, n], `count` times: its operations, or its bytes where those take longer (both, one after
    the other, on a processor whose rate for that is known)."""
    flops = 2.0 * m * n * k * count
    moved = element * count * (m * k + k * n + m * n)
    rate = device.rate(precision) * efficiency * tile_share(m, n, k, count, device.units)
    if device.product_gb_s:
        return flops / rate + moved / (device.product_gb_s * 1e9)
    return max(flops / rate, moved / memory_rate)


def wire_rate(cluster: Cluster, size: int, per_node: int) -> float:
    """Bytes a second that each rank of a ring sends, all rings of a node at once.

    Inside a node the device's own link. Across nodes a group with `per_node` ranks on a node owns that share of
    the node's adapters, and its ring crosses them once.
    """
    link = cluster.node.link_gb_s * 1e9 * cluster.efficiency.link
    if size <= per_node:
        return link
    share = per_node / cluster.node.devices
    return min(link, cluster.network.node_gb_s * 1e9 * cluster.efficiency.network * share)


def hop_seconds(cluster: Cluster, size: int, per_node: int) -> float:
    """The latency of one way round a ring."""
    nodes = max(1, -(-size // per_node))
    inside = (size - nodes) * cluster.node.link_latency_us
    return (inside + (nodes if nodes > 1 else 0) * cluster.network.latency_us) * 1e-6


# Time that any collective takes before the first byte moves.
START = 10e-6


def wait_seconds(cluster: Cluster) -> float:
    """Besides its time, of every call at which ranks meet: where their own cores move the bytes, these are taken."""
    return cluster.node.wait_us * 1e-6


def collective_seconds(cluster: Cluster, op: str, payload: float, size: int, per_node: int) -> float:
    """One collective of `payload` bytes (as the ledger counts them) over `size` ranks, between computations."""
    if size <= 1 or payload <= 0:
        return 0.0
    return wait_seconds(cluster) + bare_seconds(cluster, op, payload, size, per_node)


def bare_seconds(cluster: Cluster, op: str, payload: float, size: int, per_node: int) -> float:
    """The same, one right after another."""
    per_node = max(1, min(per_node, size))
    rate = wire_rate(cluster, size, per_node) * cluster.ops.get(op, 1.0)
    ring = hop_seconds(cluster, size, per_node)
    if op == "send":
        latency = cluster.network.latency_us if per_node < size else cluster.node.link_latency_us
        return START + latency * 1e-6 + payload / rate
    if op == "all_to_all":
        return START + ring / size * math.log2(size) + payload * (size - 1) / size / rate
    once = payload * (size - 1) / size / rate
    if op != "all_reduce":
        return START + ring + once
    nodes = max(1, -(-size // per_node))
    tree = 2 * math.log2(max(2, nodes)) * cluster.network.latency_us * 1e-6 + hop_seconds(cluster, per_node, per_node)
    return START + min(2 * ring, tree + 0.1 * once) + 2 * once
