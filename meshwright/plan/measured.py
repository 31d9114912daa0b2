"""Gives a running training its figures from the planner: the model's FLOPs and the cluster of its devices. No torch."""

from __future__ import annotations

import re

from meshwright.config.sections import Config
from meshwright.plan.cluster import Cluster, known_clusters, load_cluster
from meshwright.plan.flops import model_flops
from meshwright.record.speed import Speed

HOST = "laptop"  # The cluster that represents a machine without accelerators.


def cluster_of(device: str, memory_gib: float | None = None) -> Cluster | None:
    """Return the known cluster whose devices have this name, written as torch does: `NVIDIA H100 80GB HBM3`.

    If there are several, return the one whose device memory is nearest.
    """
    words = re.split(r"[\s\-]+", device.lower())
    in_name = re.search(r"(\d+) ?GB", device)
    near = memory_gib or (float(in_name[1]) if in_name else 0.0)
    known = [c for c in map(load_cluster, known_clusters()) if c.device.name.split("-")[0].lower() in words]
    # A chip that exists as a board and as a PCIe card has two sets of rates, and torch names the card.
    cards = [c for c in known if "PCIe" in c.device.name]
    known = [c for c in known if (c in cards) == ("pcie" in words)] if len(cards) < len(known) else known
    return min(known, key=lambda cluster: abs(cluster.device.memory_gib - near), default=None)


def cluster_for(device: str, memory_gib: float | None = None) -> Cluster | None:
    """Return the cluster to plan with for such devices. One cluster represents all machines without accelerators."""
    return load_cluster(HOST) if device == "cpu" else cluster_of(device, memory_gib)


def speed_of(config: Config, device: str, memory_gib: float | None = None) -> Speed:
    """Return the figures that turn a config's steps into FLOP/s. `run.peak_tflops` overrides the device's peak rate."""
    cluster = cluster_of(device, memory_gib)
    precision = config.train.precision
    known = cluster.device.rate(precision) if cluster and precision in cluster.device.peak else None
    return Speed(model_flops(config.model, config.model.seq), 1e12 * config.run.peak_tflops or known)
