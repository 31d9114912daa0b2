"""Lists the techniques that communicate less, or at a better time, and predicts the time that each saves. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.config.comm import (
    REDUCE_KINDS,
    AlgorithmConfig,
    CommConfig,
    EmulateConfig,
    GatherConfig,
    OverlapConfig,
    ReduceConfig,
)
from meshwright.config.rules import PLANNING_RULES, first_broken_rule
from meshwright.config.sections import Config
from meshwright.engine.sharding.reducers import ReducerPlan
from meshwright.lab.reducers import GatherToOne
from meshwright.plan.cluster import Cluster, Network
from meshwright.plan.communication import all_ranks, by_axis, round_calls
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import Job
from meshwright.plan.memory import buffer_sizes
from meshwright.spec.layout import exchange_parts
from meshwright.spec.layout.layout import neighbours_on_node
from meshwright.spec.layout.params import DATA_AXES

ONE_BUCKET = 2.0**20  # MiB. A naive sum puts all gradients into one bucket.
BASE = "as configured"
FIRST = 0.5  # The share of the time of making and reading messages that passes before the first can be waited for.
LOCAL_STEPS = (4, 16)  # The steps of replicas between synchronisations.
OWN_ALGORITHMS = ("ring", "tree", "halving_doubling", "hierarchical")


@dataclass(frozen=True)
class Technique:
    """One technique: its name, its config, and a reducer if no config key selects it."""

    name: str
    config: Config
    reducer: ReducerPlan | None = None


@dataclass(frozen=True)
class Figures:
    """The figures of a step with one technique."""

    sent: dict[str, float]  # The mean bytes that a rank sends, by axis.
    exposed_s: float  # The seconds that compute waits for communication.
    step_s: float
    tokens_s: float  # Tokens per second of all ranks.

    @property
    def bytes(self) -> float:
        """The mean bytes that a rank sends over all axes."""
        return sum(self.sent.values())


def techniques(config: Config, job: Job) -> list[Technique]:
    """Return the config as it is, followed by every technique that can be applied to it, each alone."""
    c, summed = config.comm, job.layout.size(DATA_AXES)
    # Every technique is applied alone, without the compression and the algorithms that the config asks for.
    plain = replace(c, reduce=ReduceConfig(), algorithm=AlgorithmConfig())
    possible = [Technique(BASE, config)]

    def add(name: str, comm: CommConfig, **sections: object) -> None:
        other = replace(config, comm=comm, **sections)  # type: ignore[arg-type]
        if other != config and first_broken_rule(other, job.world, PLANNING_RULES) is None:
            possible.append(Technique(name, other))

    off = OverlapConfig(False, False, False, False)
    add("overlap off", replace(plain, overlap=off))
    if job.layout.tp > 1:
        # The default size of a chunk is made for accelerators.
        least = 0.0 if job.host else c.overlap.piece_gflop
        add("overlap of tp too", replace(plain, overlap=replace(c.overlap, tensor=True, piece_gflop=least)))
    if summed > 1:
        naive = replace(plain, bucket_mib=ONE_BUCKET)
        possible.append(Technique("gather to one", replace(config, comm=naive), GatherToOne()))
        ranks = job.layout.group(DATA_AXES, 0)
        on_node = neighbours_on_node(ranks, job.node_size)
        for kind in (*OWN_ALGORITHMS, *(["auto"] if c.known_links.link_gb_s else [])):
            if kind != "hierarchical" or 1 < on_node < len(ranks):
                add(f"own {kind}", replace(plain, algorithm=AlgorithmConfig(dp=kind)))  # type: ignore[arg-type]
    if exchange_parts(job.layout):
        add("experts by node", replace(plain, algorithm=AlgorithmConfig(ep="hierarchical")))
    if job.node_size < job.world and sum(job.layout.size(axis) > 1 for axis in ("tp", "cp", "dp", "pp")) > 1:
        order = "-".join(reversed(config.layout.order.split("-")))
        add("groups across nodes", plain, layout=replace(config.layout, order=order))
    if summed > 1:
        for kind in ("fp8", "int8"):
            add(f"gather {kind}", replace(plain, gather=GatherConfig(kind=kind)))  # type: ignore[arg-type]
        if job.node_size < job.world:
            add("copy in the node", replace(plain, gather=replace(c.gather, node_copy=True)))
        for kind, facts in REDUCE_KINDS.items():
            if facts.compresses:
                add(f"reduce {kind}", replace(plain, reduce=ReduceConfig(kind=kind)))
    if job.layout.dp > 1 and job.layout.replicas == 1:
        # One fragment is synchronised in every step, so that all steps are alike.
        for steps in LOCAL_STEPS:
            local = replace(config.train.local, steps=steps, fragments=steps)
            layout = replace(config.layout, replicas=job.layout.dp)
            add(f"{steps} local steps", plain, layout=layout, train=replace(config.train, local=local))
    return possible


def planned_figures(technique: Technique, job: Job, cluster: Cluster, making_s: float = 0.0) -> Figures:
    """Return the planner's figures for a technique.

    `making_s` is the seconds of making compressed messages, which the planner does not know. While the first messages
    of a bucket are made, those of earlier buckets are in flight. So this work hides a part of the exposed seconds, for
    all buckets but one.
    """
    job = replace(job, config=technique.config, reducer=technique.reducer)
    cost = predict_cost(job, cluster)
    exposed = sum(axis.exposed_seconds for axis in cost.axes.values())
    ranks = range(job.layout.pp)
    buckets = max(sum(len(one.buckets) for one in buffer_sizes(job, rank) if one.mixed) for rank in ranks)
    sums = sum(cost.axes[axis].exposed_seconds for axis in ("dp", "edp") if axis in cost.axes)
    hidden = min(FIRST * making_s, sums) * (1 - 1 / buckets) if buckets else 0.0
    step = cost.step_s + making_s - hidden
    return Figures(sent_by_axis(job), exposed - hidden, step, job.tokens / step)


def sent_by_axis(job: Job) -> dict[str, float]:
    """Return the bytes that a rank sends in a step by axis, as the mean over ranks and, with replicas, over steps."""
    sent = {axis: traffic.wire_bytes / job.world for axis, traffic in by_axis(all_ranks(job)).items()}
    if job.layout.replicas > 1:
        for pp_rank in range(job.layout.pp):
            for call in round_calls(job, pp_rank):
                mean = call.traffic.wire_bytes / job.layout.pp / job.config.train.local.steps
                sent[call.axis] = sent.get(call.axis, 0.0) + mean
    return sent


def with_links(cluster: Cluster, links: EmulateConfig, node_size: int) -> Cluster:
    """Return the cluster with the links that `comm.emulate` emulates."""
    if not links.on:
        return cluster
    link = links.link_gb_s or cluster.node.link_gb_s
    latency = links.latency_us or 0.001
    network = Network(links.network_gb_s or link * node_size, latency)
    node = replace(cluster.node, devices=node_size, link_gb_s=link, link_latency_us=latency)
    efficiency = replace(cluster.efficiency, link=1.0, network=1.0)
    return replace(cluster, node=node, network=network, efficiency=efficiency, ops={}, name=f"{cluster.name}, emulated")


def calibrate(cluster: Cluster, planned_s: float, measured_s: float) -> Cluster:
    """Return the cluster with its devices' rates scaled such that a planned step takes as long as the measured one."""
    factor = planned_s / measured_s
    device = cluster.device
    peak = {name: rate * factor for name, rate in device.peak.items()}
    scaled = replace(
        device, peak=peak, memory_gb_s=device.memory_gb_s * factor, product_gb_s=device.product_gb_s * factor,
        kernel_us=device.kernel_us / factor,
    )  # fmt: skip
    return replace(cluster, device=scaled, name=f"{cluster.name} x {factor:.3g}")


def saved_share(base: float, value: float) -> float:
    """Return the share of `base` that `value` saves."""
    return 1.0 - value / base if base else 0.0


def differences(measured: Sequence[Figures], predicted: Sequence[Figures]) -> list[float]:
    """Return the relative error of each predicted step time against the measured one."""
    return [p.step_s / m.step_s - 1.0 for m, p in zip(measured, predicted, strict=True)]
