"""Clusters as data: devices, nodes, links, and the shares of their peak rates that training reaches. No torch.

A cluster is a YAML file. Those that ship with the package are in `clusters/`, where every number has its source.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.config.yaml_text import read_yaml
from meshwright.errors import UserError, nearest

FOLDER = Path(__file__).parent / "clusters"
# The wider precisions in which products run on a device that has no rate for theirs. bf16 and fp8 have no replacement,
# since a device without them refuses them. fp64 is the widest.
WIDER_PRECISION = {"fp16": ("fp32", "fp64"), "fp32": ("fp64",)}


@dataclass(frozen=True)
class DeviceSpec:
    """The peak rates of one device. `peak` holds dense TFLOP/s by precision."""

    name: str
    peak: Mapping[str, float]
    memory_gib: float
    memory_gb_s: float
    units: int  # Multiprocessors, over which a product's tiles are distributed; 1 stands for a CPU core.
    power_w: float
    price_hour: float  # US dollars, used only to estimate the cost of a run.
    # A CPU rank reads and computes in turn. The rate at which it reads a product's matrices; 0: both overlap.
    product_gb_s: float = 0.0
    kernel_us: float = 0.0  # Overhead per kernel.

    def __hash__(self) -> int:
        return hash((self.name, self.memory_gib, self.memory_gb_s))

    def rate(self, precision: str) -> float:
        """Return the peak FLOP/s. A precision that the device lacks runs in the next wider one that it has."""
        for name in (precision, *WIDER_PRECISION.get(precision, ())):
            if name in self.peak:
                return self.peak[name] * 1e12
        raise UserError(
            f"{self.name} has no rate for {precision}: choose train.precision from {', '.join(self.peak)}, or add the "
            "rate to device.peak of a cluster file of your own"
        )


@dataclass(frozen=True)
class Machine:
    """One machine. `link_gb_s` is the rate at which one device sends into the node's fabric, in one direction."""

    devices: int
    link_gb_s: float
    link_latency_us: float
    host_gib: float
    host_params_s: float  # Parameters that a node's CPUs update per second, transfers included.
    wait_us: float = 0.0  # Extra time of a collective between computations, compared with one right after another.
    cores: int = 0  # CPU cores, for the job files of `meshwright submit`; 0: not known.


@dataclass(frozen=True)
class Network:
    """The network between nodes. `node_gb_s` is the rate of all adapters of a node together, in one direction.

    Nodes are numbered by switch: the first `switch_nodes` share one, the next ones another. Each switch reaches the
    others at the rate of its nodes' adapters divided by `oversubscription`. See plan/switches.py.
    """

    node_gb_s: float
    latency_us: float
    switch_nodes: int = 0  # 0: all nodes are on one switch, or switches slow nothing down.
    oversubscription: float = 1.0

    @property
    def is_oversubscribed(self) -> bool:
        return self.switch_nodes > 0 and self.oversubscription > 1.0


@dataclass(frozen=True)
class Efficiency:
    """The shares of the peak rates that training reaches. docs/planner.md says how each was obtained."""

    product: float  # Of the FLOP rate: large products, at the clock that the power limit allows.
    attention: float  # Of the FLOP rate: a fused attention core, forward and backward together.
    memory: float  # Of the memory rate: elementwise kernels.
    link: float  # Of the link rate inside a node: large collectives.
    network: float  # Of the network rate: large collectives.
    fp8: float = 0.75  # Of the product share: products in fp8, which also need scaling and casts.
    optimizer: float = 0.0  # Of the memory rate: updates of states too large for a cache; 0: like `memory`.
    contention: float = 0.0  # The share of a hidden collective's time that compute loses, if above the stack's.


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes, with the source of each of its figures."""

    name: str
    about: str
    device: DeviceSpec
    node: Machine
    network: Network
    efficiency: Efficiency
    sources: Mapping[str, str]
    ops: Mapping[str, float] = dataclasses.field(default_factory=dict)  # The share of a link's rate by collective.

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.node, self.network, self.efficiency))

    @property
    def memory_rate(self) -> float:
        """The bytes per second that elementwise kernels move."""
        return self.device.memory_gb_s * 1e9 * self.efficiency.memory

    @property
    def optimizer_rate(self) -> float:
        """The bytes per second that the optimizer's update moves."""
        return self.device.memory_gb_s * 1e9 * (self.efficiency.optimizer or self.efficiency.memory)


def known_clusters() -> list[str]:
    """Return the names of the clusters that ship with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@lru_cache(maxsize=64)
def load_cluster(name: str) -> Cluster:
    """Load a cluster that ships with the package, by its name, or one from a YAML file, by its path."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml", ".json") and not path.is_file():
            known = known_clusters()
            raise UserError(
                f"there is no cluster '{name}'{nearest(name, known)}: the clusters are {', '.join(known)}, "
                "or give the path of a cluster's YAML file"
            )
        if not path.is_file():
            raise UserError(f"there is no cluster file '{name}': give the path of a YAML file")
    cluster = cluster_from(read_yaml(path), str(path))
    if cluster.network.oversubscription > 1.0 and not cluster.network.switch_nodes:
        raise UserError(f"{path}: network.oversubscription needs network.switch_nodes, the nodes that share a switch")
    share = cluster.efficiency.product
    # A measured profile has a product share of 1, and its other shares are relative to the measured rates.
    if share > 2.0:
        raise UserError(f"{path}: efficiency.product={share} must be a share of the peak: write 0.5 for half of it")
    return cluster


def adjusted(cluster: Cluster, network: str | None = None, node_devices: int | None = None) -> Cluster:
    """Return the cluster with another network or other nodes, under a name that says so.

    `network` names a node's adapters, such as `25gbe` or `8x400gb/s`. Nodes of another size have adapters, memory and
    CPUs in proportion, unless `network` sets the adapters.
    """
    name = cluster.name
    if node_devices is not None:
        if node_devices < 1:
            raise UserError(f"--node-devices {node_devices} is not a number of devices: give at least 1")
        node, share = cluster.node, node_devices / cluster.node.devices
        node = dataclasses.replace(
            node, devices=node_devices, host_gib=node.host_gib * share, host_params_s=node.host_params_s * share,
            cores=round(node.cores * share),
        )  # fmt: skip
        rate = cluster.network.node_gb_s * share
        cluster = dataclasses.replace(cluster, node=node, network=dataclasses.replace(cluster.network, node_gb_s=rate))
        name += f" with {node_devices} devices per node"
    if network is not None:
        rate = network_rate(network)
        cluster = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, node_gb_s=rate))
        name += f" with {network}"
    return dataclasses.replace(cluster, name=name)


# The speeds of InfiniBand's generations, in Gb/s per adapter.
GENERATIONS = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
_RATE = re.compile(r"(?:(\d+)x)?(?:(\d+(?:\.\d+)?)(gbe|gbit/s|gbps|gb/s)|([a-z]+))")


def network_rate(text: str) -> float:
    """Return the GB/s that a network's usual name means: `25gbe`, `8x400gbps`, `4xhdr`. All of them count bits."""
    match = _RATE.fullmatch(text.strip().lower())
    bits = 0.0
    if match:
        bits = int(match[1] or 1) * (float(match[2]) if match[2] else GENERATIONS.get(match[4], 0))
    if not bits:
        raise UserError(
            f"--network {text} is not a network: write the adapters of a node as 25gbe, 8x400gb/s (gigabits) or 4xhdr "
            f"(of {', '.join(GENERATIONS)})"
        )
    return bits / 8


def cluster_from(raw: Any, where: str) -> Cluster:
    """Build a cluster from nested mappings and check every field."""
    cluster: Cluster = _build(Cluster, raw, where, "")
    return cluster


def _build(cls: Any, raw: Any, where: str, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: {path or 'a cluster'} must hold keys and values, not '{raw}'")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise UserError(f"{where} has the unknown field '{path}{key}'{nearest(str(key), fields)}: remove it")
    for name, field in fields.items():
        if name not in raw and field.default is dataclasses.MISSING is field.default_factory:
            raise UserError(f"{where} lacks the field '{path}{name}': add it (see the clusters that ship for its unit)")
    return cls(**{name: _field(hints[name], raw[name], where, f"{path}{name}") for name in fields if name in raw})


def _field(hint: Any, value: Any, where: str, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, f"{path}.")
    if hint is str:
        return str(value)
    if hint in (int, float):
        return _number(hint, value, where, path)
    if not isinstance(value, Mapping) or not value:
        raise UserError(f"{where}: {path} must hold keys and values, not '{value}'")
    if typing.get_args(hint)[1] is float:
        return {str(key): _field(float, item, where, f"{path}.{key}") for key, item in value.items()}
    return {str(key): str(item) for key, item in value.items()}


def _number(hint: Any, value: Any, where: str, path: str) -> Any:
    """Return `value` as an int or a float. A fraction where an integer is needed is refused, not truncated."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else value
    if not 0 < number <= sys.float_info.max:
        raise UserError(f"{where}: {path}={value} must be a number above zero, and a finite one")
    if hint is int and number != int(number):
        raise UserError(f"{where}: {path}={value} must be a whole number of at least 1")
    return hint(number)
