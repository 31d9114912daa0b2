"""What the planner knows about a run that is trained: its model's FLOPs, and which of the known clusters its devices
are of. No torch."""

from __future__ import annotations

import re

from meshwright.config.sections import Config
from meshwright.plan.cluster import Cluster, known_clusters, load_cluster
from meshwright.plan.flops import model_flops
from meshwright.record.speed import Speed

HOST = "laptop"  # the cluster that stands for a machine without accelerators


def cluster_of(device: str, memory_gib: float | None = None) -> Cluster | None:
    """The known cluster whose devices have this name, as torch gives it: `NVIDIA H100 80GB HBM3`. Of several, the one
    whose memory is nearest."""
    words = re.split(r"[\s\-]+", device.lower())
    if "pcie" in words:  # these have other rates than the boards that the clusters are made of
        return None
    said = re.search(r"(\d+) ?GB", device)
    near = memory_gib or (float(said[1]) if said else 0.0)
    known = [c for c in map(load_cluster, known_clusters()) if c.device.name.split("-")[0].lower() in words]
    return min(known, key=lambda cluster: abs(cluster.device.memory_gib - near), default=None)


def cluster_for(device: str, memory_gib: float | None = None) -> Cluster | None:
    """The cluster that a plan for such devices takes: a machine without accelerators has one that stands for it."""
    return load_cluster(HOST) if device == "cpu" else cluster_of(device, memory_gib)


def speed_of(config: Config, device: str, memory_gib: float | None = None) -> Speed:
    """How this config's steps become FLOP/s. `run.peak_tflops` counts before what is known of the device."""
    cluster, precision = cluster_of(device, memory_gib), config.train.precision
    known = cluster.device.rate(precision) if cluster and precision in cluster.device.peak else None
    return Speed(model_flops(config.model, config.model.seq), 1e12 * config.run.peak_tflops or known)
