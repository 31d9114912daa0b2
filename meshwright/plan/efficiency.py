"""Predicts the seconds of products and of collectives on a cluster, by one curve each for all predictions. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from meshwright.engine.sharding.reducers import Links
from meshwright.plan.cluster import Cluster, DeviceSpec
from meshwright.spec.traffic.ledger import OPERATIONS, bus_factor

# The tiles of product kernels (rows, columns, share of the best rate). Smaller tiles read their factors more often from
# shared memory and reach a smaller share.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.96), (128, 64, 0.84), (64, 64, 0.65))
DEPTH = 96  # The k at which a tile's prologue and epilogue cost as much as its main loop.
CORE_DEPTH = 12  # The same on a CPU core.
ALIGNED = 8  # Two-byte elements in a 16-byte load, which tensor cores need.
UNALIGNED = 0.12  # The share of the rate that many small products reach without such loads.
# The same share for one large product, such as an output layer. It is set so that padding a vocabulary of 50257 to
# 50304 makes a step of a GPT of 124M parameters on an A100 25 % faster, as nanoGPT observed.
UNALIGNED_LARGE = 0.35
START = 10e-6  # Seconds before the first byte of any collective moves.


@lru_cache(maxsize=100_000)
def tile_share(m: int, n: int, k: int, count: int, units: int) -> float:
    """Return the share of the best rate that a product of this shape reaches.

    The share depends on the padding of tiles, the last incomplete wave of tiles, the depth k and the alignment.
    """
    # A CPU core has no tiles to distribute and needs no alignment.
    if units == 1:
        return k / (k + CORE_DEPTH)
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * count
        filled = m * n * count / (tiles * rows * columns)
        waves = tiles / units
        best = max(best, rate * filled * waves / math.ceil(waves))
    share = best * k / (k + DEPTH)
    aligned = k % ALIGNED == 0 and n % ALIGNED == 0
    if aligned:
        return share
    return share * (UNALIGNED if count > 1 else UNALIGNED_LARGE)


def product_seconds(
    device: DeviceSpec, precision: str, efficiency: float, memory_rate: float,
    m: int, n: int, k: int, count: int, element: int,
) -> float:  # fmt: skip
    """Return the seconds of `count` products [m, k] x [k, n].

    That is the time of their FLOPs or of their bytes, whichever is longer, or the sum of both on a CPU whose rate of
    reading is known.
    """
    flops = 2.0 * m * n * k * count
    moved = element * count * (m * k + k * n + m * n)
    rate = device.rate(precision) * efficiency * tile_share(m, n, k, count, device.units)
    if device.product_gb_s:
        return flops / rate + moved / (device.product_gb_s * 1e9)
    return max(flops / rate, moved / memory_rate)


def wire_rate(cluster: Cluster, size: int, per_node: int, left: float = 1.0) -> float:
    """Return the bytes per second that each rank of a ring sends while all rings of a node are active.

    Inside a node that is the rate of the device's link. Across nodes, a group with `per_node` ranks on a node has that
    share of the node's adapters, and its ring crosses them once. Switches leave it `left` of their rate.
    """
    link = cluster.node.link_gb_s * 1e9 * cluster.efficiency.link
    if size <= per_node:
        return link
    share = left * per_node / cluster.node.devices
    return min(link, cluster.network.node_gb_s * 1e9 * cluster.efficiency.network * share)


def adapter_share(op: str, size: int, per_node: int) -> float:
    """Return the part of each byte of payload that one rank's share of its node's adapters carries.

    The group spans several nodes. A ring crosses from node to node once and uses the shares of all its ranks on a node.
    In an all_to_all, every rank sends its own rows for other nodes.
    """
    return (size - per_node) / size if OPERATIONS[op].is_exchange else bus_factor(op, size) / per_node


def hop_seconds(cluster: Cluster, size: int, per_node: int) -> float:
    """Return the latency of one trip around a ring."""
    nodes = max(1, -(-size // per_node))
    inside = (size - nodes) * cluster.node.link_latency_us
    return (inside + (nodes if nodes > 1 else 0) * cluster.network.latency_us) * 1e-6


def wait_seconds(cluster: Cluster) -> float:
    """Return the extra seconds of every collective on a machine whose busy cores move the bytes themselves."""
    return cluster.node.wait_us * 1e-6


def collective_seconds(cluster: Cluster, op: str, payload: float, size: int, per_node: int, left: float = 1.0) -> float:
    """Return the seconds of one collective between computations. `payload` is in bytes as the ledger counts them.

    `left` is the share of its adapters' rate that switches leave to the group (`switches.adapter_rate_left`).
    """
    if size <= 1 or payload <= 0:
        return 0.0
    return wait_seconds(cluster) + _bare_seconds(cluster, op, payload, size, max(1, min(per_node, size)), left)


def _bare_seconds(cluster: Cluster, op: str, payload: float, size: int, per_node: int, left: float) -> float:
    """Return the seconds of a collective that follows right after another one."""
    rate = wire_rate(cluster, size, per_node, left) * cluster.ops.get(op, 1.0)
    ring, once = hop_seconds(cluster, size, per_node), payload * (size - 1) / size / rate
    facts = OPERATIONS[op]
    if facts.is_message:
        latency = cluster.network.latency_us if per_node < size else cluster.node.link_latency_us
        return START + latency * 1e-6 + payload / rate
    if facts.is_exchange:
        return START + ring / size * math.log2(size) + _exchange_seconds(cluster, payload, size, per_node, left)
    if facts.rounds == 1:
        return START + ring + once
    # An all_reduce takes the faster of a ring and a tree over nodes, which has less latency but moves more bytes.
    nodes = max(1, -(-size // per_node))
    tree = 2 * math.log2(max(2, nodes)) * cluster.network.latency_us * 1e-6 + hop_seconds(cluster, per_node, per_node)
    return START + min(2 * ring, tree + 0.1 * once) + 2 * once


def _exchange_seconds(cluster: Cluster, payload: float, size: int, per_node: int, left: float) -> float:
    """Return the seconds of an all_to_all's bytes.

    The bytes for ranks on the same node and those for other nodes travel at the same time, the latter over the rank's
    share of the node's adapters.
    """
    rate = cluster.ops.get("all_to_all", 1.0)
    inside = payload * (per_node - 1) / size / (wire_rate(cluster, per_node, per_node) * rate)
    if size <= per_node:
        return inside
    adapter = left * cluster.network.node_gb_s * 1e9 * cluster.efficiency.network / cluster.node.devices
    return max(inside, payload * adapter_share("all_to_all", size, per_node) / (adapter * rate))


@dataclass(frozen=True)
class ClusterNetwork:
    """The links of a cluster, in the form that reducers ask for (`engine.sharding.reducers.LinkCost`).

    `left` is the share of the adapters' rate that switches leave to the groups in question.
    """

    cluster: Cluster
    left: float = 1.0

    def collective(self, op: str, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of one collective of torch's backend."""
        return collective_seconds(self.cluster, op, payload, ranks, on_node, self.left)

    def links(self, ranks: int, on_node: int) -> Links:
        """Return the links of a group whose ranks call send and receive themselves."""
        node = self.cluster.node
        network = self.cluster.network
        share = self.cluster.ops.get("send", 1.0)
        return Links(
            self._link * share, self._adapters * share * min(on_node, ranks) / node.devices,
            node.link_latency_us * 1e-6, network.latency_us * 1e-6, START + wait_seconds(self.cluster),
        )  # fmt: skip

    def through_one(self, payload: float, ranks: int, on_node: int) -> float:
        """Return the seconds of a sum that one rank makes: it gathers all payloads and sends the result to all ranks.

        Everything passes through that rank's link, and traffic with other nodes through the node's adapters as well.
        """
        away = ranks - min(on_node, ranks)
        gathering = max((ranks - 1) * payload / self._link, on_node * payload / self._adapters if away else 0.0)
        sending = max((ranks - 1 - away) * payload / self._link, away * payload / self._adapters)
        latency = self.cluster.network.latency_us if away else self.cluster.node.link_latency_us
        return gathering + sending + 2 * (START + latency * 1e-6 + wait_seconds(self.cluster))

    @property
    def _link(self) -> float:
        return self.cluster.node.link_gb_s * 1e9 * self.cluster.efficiency.link

    @property
    def _adapters(self) -> float:
        return self.left * self.cluster.network.node_gb_s * 1e9 * self.cluster.efficiency.network
