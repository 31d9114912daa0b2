"""Clusters as data: devices, nodes, links and how much of their peak rates training reaches. No torch. A cluster is a
YAML file; those that ship with the package are in `clusters/`, where every number has its source beside it."""

from __future__ import annotations

import dataclasses
import math
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
# The wider precision in which products run on a device that has no rate for their own. bf16 and fp8 have no
# replacement, since a device without them refuses them; nor has fp64, the widest.
WIDER_PRECISION = {"fp16": ("fp32", "fp64"), "fp32": ("fp64",)}


@dataclass(frozen=True)
class DeviceSpec:
    """The peak rates of one device. `peak` holds dense TFLOP/s by precision."""

    name: str
    peak: Mapping[str, float]
    memory_gib: float
    memory_gb_s: float
    units: int  # multiprocessors, among which a product's tiles are divided; 1: a CPU core
    power_w: float
    price_hour: float  # US dollars, used only to estimate the cost of a run
    # For a CPU rank, which does one thing at a time:
    product_gb_s: float = 0.0  # rate of reading a product's matrices, in addition to its FLOPs; 0: overlapped
    kernel_us: float = 0.0  # overhead per kernel

    def __hash__(self) -> int:
        return hash((self.name, self.memory_gib, self.memory_gb_s))

    def rate(self, precision: str) -> float:
        """Returns the peak FLOP/s; a precision that the device lacks runs in the next wider one that it has."""
        for name in (precision, *WIDER_PRECISION.get(precision, ())):
            if name in self.peak:
                return self.peak[name] * 1e12
        raise UserError(
            f"{self.name} has no rate for {precision}: choose train.precision from {', '.join(self.peak)}, or add the "
            "rate to device.peak of a cluster file of your own"
        )


@dataclass(frozen=True)
class Node:
    """One machine. `link_gb_s` is what one device sends into the node's fabric, in one direction."""

    devices: int
    link_gb_s: float
    link_latency_us: float
    host_gib: float
    host_params_s: float  # parameters that a node's CPUs update per second, transfers included
    wait_us: float = 0.0  # how much longer a collective takes between computations than back to back
    cores: int = 0  # of its processors, for the job files of `meshwright submit`; 0: not known


@dataclass(frozen=True)
class Network:
    """The network between nodes: what one node sends with all its adapters together, in one direction."""

    node_gb_s: float
    latency_us: float


@dataclass(frozen=True)
class Efficiency:
    """The shares of the peak rates that are reached; docs/planner.md says how each was obtained."""

    product: float  # large products, of the FLOP rate, at the clock that the power limit allows
    attention: float  # a fused attention core, of the FLOP rate, forward and backward together
    memory: float  # elementwise kernels, of the memory rate
    link: float  # large collectives, of the in-node link rate
    network: float  # large collectives, of the network rate
    fp8: float = 0.75  # products in fp8, of the product share: scaling and casts
    optimizer: float = 0.0  # updates of states too large for a cache, of the memory rate; 0: like `memory`
    contention: float = 0.0  # share of a hidden collective's time that compute loses (if above the stack's)


@dataclass(frozen=True)
class Cluster:
    name: str
    about: str
    device: DeviceSpec
    node: Node
    network: Network
    efficiency: Efficiency
    sources: Mapping[str, str]
    ops: Mapping[str, float] = dataclasses.field(default_factory=dict)  # share of a link's rate by collective

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.node, self.network, self.efficiency))

    @property
    def memory_rate(self) -> float:
        return self.device.memory_gb_s * 1e9 * self.efficiency.memory

    @property
    def optimizer_rate(self) -> float:
        return self.device.memory_gb_s * 1e9 * (self.efficiency.optimizer or self.efficiency.memory)


def known_clusters() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@lru_cache(maxsize=64)
def load_cluster(name: str) -> Cluster:
    """Loads a cluster that ships with the package, by name, or one from a YAML file, by path."""
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
    share = cluster.efficiency.product
    if share > 2.0:  # a measured profile has 1, and other shares relative to what was measured
        raise UserError(f"{path}: efficiency.product={share} must be a share of the peak: write 0.5 for half of it")
    return cluster


def cluster_from(raw: Any, where: str) -> Cluster:
    """Builds a cluster from nested mappings and checks every field."""
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
    """Returns `value` as an int or a float; a fraction where an integer is needed is refused, not truncated."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else value
    if not 0 < number <= sys.float_info.max:
        raise UserError(f"{where}: {path}={value} must be a number above zero, and a finite one")
    if hint is int and number != int(number):
        raise UserError(f"{where}: {path}={value} must be a whole number of at least 1")
    return hint(number)
