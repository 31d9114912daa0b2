"""Clusters as data: devices, nodes, links and how much of their peak rates training reaches. No torch.

A cluster is a YAML file; those that ship lie in `clusters/`. Every number there has its source beside it.
"""

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

from meshwright.config.load import read_yaml
from meshwright.errors import UserError, nearest

FOLDER = Path(__file__).parent / "clusters"
# Where the products of a precision without a rate run instead: units that hold all its numbers, at their rate. Nothing
# stands in for bf16 and fp8, which a device has or refuses, nor for fp64, than which nothing is wider.
WIDER = {"fp16": ("fp32", "fp64"), "fp32": ("fp64",)}


@dataclass(frozen=True)
class Device:
    """Peak rates of one device. `peak` is in TFLOP/s by precision, dense."""

    name: str
    peak: Mapping[str, float]
    memory_gib: float
    memory_gb_s: float
    units: int  # multiprocessors: a product's tiles are dealt out to them
    power_w: float
    price_hour: float  # US dollars, for the estimate of a run's cost only
    # Of a processor's rank, which does one thing at a time:
    product_gb_s: float = 0.0  # at which a product's matrices pass besides being multiplied; 0: behind it
    kernel_us: float = 0.0  # what a kernel takes beside its work

    def __hash__(self) -> int:
        return hash((self.name, self.memory_gib, self.memory_gb_s))

    def rate(self, precision: str) -> float:
        """FLOP/s at peak; a precision that a device lacks runs in the next wider one it has, if that can be."""
        for name in (precision, *WIDER.get(precision, ())):
            if name in self.peak:
                return self.peak[name] * 1e12
        raise UserError(
            f"{self.name} has no rate for {precision}: choose train.precision from {', '.join(self.peak)}, or add the "
            "rate to device.peak of a cluster file of your own"
        )


@dataclass(frozen=True)
class Node:
    """One machine. `link_gb_s` is what one device sends into the node's fabric, one direction."""

    devices: int
    link_gb_s: float
    link_latency_us: float
    host_gib: float
    host_params_s: float  # parameters a node's CPUs update each second, transfers included
    wait_us: float = 0.0  # a collective between computations takes so much longer than one after another


@dataclass(frozen=True)
class Network:
    """Between nodes: what one node sends, all its adapters together, one direction."""

    node_gb_s: float
    latency_us: float


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that are reached; docs/planner.md says how each was obtained."""

    product: float  # of the FLOP rate by a large product, at the clock that the power limit allows
    attention: float  # of the FLOP rate by a fused attention core, forward and backward together
    memory: float  # of the memory rate by elementwise kernels
    link: float  # of the in-node link rate by large collectives
    network: float  # of the network rate by large collectives
    fp8: float = 0.75  # of the product share when products are in fp8: scaling and casts
    optimizer: float = 0.0  # of the memory rate by the update of states that don't fit a cache; 0: as `memory`
    contention: float = 0.0  # of a hidden collective's time, lost by the compute beside it (if more than the stack's)


@dataclass(frozen=True)
class Cluster:
    name: str
    about: str
    device: Device
    node: Node
    network: Network
    efficiency: Efficiency
    sources: Mapping[str, str]
    ops: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of a link's rate, where collectives differ

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
    """A cluster that ships, by name, or one of a YAML file, by path."""
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
    if share > 2.0:  # 1 in a measured profile, whose other shares are relative to what was measured
        raise UserError(f"{path}: efficiency.product={share} must be a share of the peak: write 0.5 for half of it")
    return cluster


def cluster_from(raw: Any, where: str) -> Cluster:
    """The cluster of nested mappings, every field checked."""
    built = _build(Cluster, raw, where, "")
    assert isinstance(built, Cluster)
    return built


def _build(cls: Any, raw: Any, where: str, path: str) -> Any:
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: {path or 'a cluster'} must hold keys and values, not '{raw}'")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise UserError(f"{where} has the unknown field '{path}{key}'{nearest(str(key), fields)}: remove it")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in raw:
            if dataclasses.MISSING is not field.default or dataclasses.MISSING is not field.default_factory:
                continue
            raise UserError(f"{where} lacks the field '{path}{name}': add it (see the clusters that ship for its unit)")
        values[name] = _field(hints[name], raw[name], where, f"{path}{name}")
    return cls(**values)


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
    """`value` as an int or a float; a fraction of a whole thing is refused, not cut."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else value
    if not 0 < number <= sys.float_info.max:
        raise UserError(f"{where}: {path}={value} must be a number above zero, and a finite one")
    if hint is int and number != int(number):
        raise UserError(f"{where}: {path}={value} must be a whole number of at least 1")
    return hint(number)
