"""States the question of a plan, and the assumptions that its answer rests on. No torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import meshwright
from meshwright.errors import plural
from meshwright.plan.account import parameters_words
from meshwright.plan.cluster import Cluster
from meshwright.plan.job import Job
from meshwright.plan.target import Target
from meshwright.show.units import count, percent


@dataclass(frozen=True)
class Question:
    """The question of a plan in words, with the assumptions of its answer."""

    title: str
    facts: Mapping[str, str]
    assumptions: Mapping[str, str]
    limit_gib: float
    tokens: float | None = None  # Of the whole run.


def question_of(target: Target, base: Job, cluster: Cluster, limit_gib: float, tokens: float | None) -> Question:
    """Return the question of `meshwright plan`."""
    nodes = -(-base.world // cluster.node.devices)
    batch = "" if target.own_batch else " (the default: set --global-batch)"
    facts = {
        **model_facts(target, base),
        "global batch": f"{base.global_batch:,} sequences, {base.tokens:,} tokens{batch}",
        **({"whole run": f"{count(tokens)} tokens"} if tokens else {}),
        "devices": f"{base.world} x {cluster.device.name} on {plural(nodes, 'node')}",
        **software_facts(base, cluster),
        "memory": f"at most {limit_gib:.1f} of a device's {cluster.device.memory_gib:.1f} GiB",
        "command": command(),
    }  # fmt: skip
    title = f"{target.name} on {base.world} x {cluster.device.name}"
    return Question(title, facts, assumptions_of(base, cluster), limit_gib, tokens)


def model_facts(target: Target, base: Job) -> dict[str, str]:
    """Return the model and its sequences in words."""
    return {
        "model": f"{target.name}, {parameters_words(base)}", "sequence": f"{base.config.model.seq:,} tokens"
    }  # fmt: skip


def software_facts(base: Job, cluster: Cluster) -> dict[str, str]:
    """Return the cluster, the precision and the software in words."""
    return {
        "cluster": cluster.name, "precision": base.config.train.precision,
        "software": f"stack {base.stack.name}, meshwright {meshwright.__version__}",
    }  # fmt: skip


def command() -> str:
    """Return the command of this process."""
    return shlex.join(["meshwright", *sys.argv[1:]])


def assumptions_of(base: Job, cluster: Cluster) -> dict[str, str]:
    """Return the assumptions of a prediction about links, efficiency, prices and the run."""
    network, share = cluster.network.node_gb_s, cluster.efficiency
    found = {
        "links": f"{cluster.node.link_gb_s:g} GB/s for a device inside a node, {network:g} GB/s "
                 f"({8 * network:g} Gbit/s) for a node",
        "efficiency": f"large products reach {percent(share.product, 0)} of the peak rate, elementwise kernels "
                      f"{percent(share.memory, 0)} of the memory rate, links {percent(share.link, 0)}, the network "
                      f"{percent(share.network, 0)}",
        "price and power": f"{cluster.device.price_hour:g} USD an hour and {cluster.device.power_w:g} W for a device, "
                           "from the cluster file: set your own there",
        "whole run": "every step takes the predicted time: no failures, no saving, no validation",
    }  # fmt: skip
    if cluster.network.is_oversubscribed:
        nodes, less = cluster.network.switch_nodes, cluster.network.oversubscription
        found["switches"] = f"{nodes} nodes share a switch, which reaches the others at 1/{less:g} of their rate"
    if base.config.model.experts.count:
        found["experts"] = "every expert gets the same number of tokens (`cost --imbalance` plans others)"
    return found
