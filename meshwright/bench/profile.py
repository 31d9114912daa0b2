"""Turn the measurements of `meshwright comm bench` into a cluster file for the planner. No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import yaml

from meshwright.bench.fit import Link
from meshwright.plan.cluster import Cluster, cluster_from
from meshwright.plan.stack import COMPILED

if TYPE_CHECKING:
    from meshwright.bench.rates import Rates

# Placeholders: power and price are not measured. Replace them to get energy and cost.
POWER_W, PRICE_HOUR = 10.0, 0.01
# The link of a rank without peers.
PLACEHOLDER_LINK = Link(1e-6, {"all_reduce": 1e12}, 0.0, 0.0, 0)


def cluster_fields(name: str, rates: Rates, node_size: int, inside: Link | None, across: Link | None) -> dict[str, Any]:
    """Return the contents of the cluster file.

    A class of links that no group used is assumed to be like the other one. Rates are achieved rates, so the
    efficiencies relative to them are 1. Attention and memory are relative to our stack (COMPILED), because
    the planner multiplies them by its factors.
    """
    near, far = inside or across or PLACEHOLDER_LINK, across or inside or PLACEHOLDER_LINK
    stack, peak = COMPILED, rates.peak[rates.precision]
    device: dict[str, Any] = {
        "name": rates.device, "peak": rates.peak, "memory_gib": rates.memory_gib, "memory_gb_s": rates.copy_gb_s,
        "units": rates.units, "power_w": POWER_W, "price_hour": PRICE_HOUR,
    }  # fmt: skip
    efficiency = {
        "product": 1.0, "attention": rates.attention_tflops / peak / stack.attention,
        "memory": rates.step_gb_s / rates.copy_gb_s, "link": 1.0, "network": 1.0,
        "optimizer": rates.optimizer_gb_s / rates.copy_gb_s,
    }  # fmt: skip
    # A cost that was measured as zero is omitted, which means the same.
    device |= {key: getattr(rates, key) for key in ("product_gb_s", "kernel_us") if getattr(rates, key) > 0}
    efficiency |= {"contention": rates.contention} if rates.contention > 0 else {}
    waits = {"wait_us": rates.wait_us} if rates.wait_us > 0 else {}
    return {
        "name": name, "about": f"{rates.device}, measured by meshwright comm bench", "device": device,
        "node": {
            "devices": node_size, "link_gb_s": near.rate / 1e9, "link_latency_us": near.latency * 1e6,
            "host_gib": rates.host_gib, "host_params_s": node_size * rates.optimizer_gb_s * 1e9 / 36,
        } | waits,
        # `far.rate` is one rank's share of the node's adapters, and all ranks of the node sent at once.
        "network": {"node_gb_s": far.rate * node_size / 1e9, "latency_us": far.latency * 1e6},
        "efficiency": efficiency, "ops": shares(near, far),
        "sources": sources(rates, inside, across),
    }  # fmt: skip


def shares(near: Link, far: Link) -> dict[str, float]:
    """Return each op's rate relative to the link's rate. If both classes were measured, it is their geometric mean."""
    ops = {**near.rates, **far.rates}
    known = {op: [link.rates[op] / link.rate for link in (near, far) if op in link.rates] for op in ops}
    return {op: math.exp(sum(map(math.log, ratios)) / len(ratios)) for op, ratios in known.items()}


def sources(rates: Rates, inside: Link | None, across: Link | None) -> dict[str, str]:
    """Return a note on the origin of each kind of figure in the cluster file."""

    def link_source(link: Link | None, other: str) -> str:
        if link is None:
            return f"not measured: no group used one; assumed to be like the link {other}"
        return f"measured: {link.points} points, median error {link.error:.1%}, largest {link.worst:.0%}"

    return {
        "peak": "measured: products of several shapes on all ranks at once, over the planner's share for each shape",
        "memory": "measured: a copy on all ranks at once; the host's memory divided by its ranks, or the device's",
        "link": link_source(inside, "across nodes"),
        "network": link_source(across, "inside a node"),
        "latency": "measured, with the rates",
        "host": "measured: the optimizer's update on this device",
        "price": "not measured: a placeholder, like the power",
        "efficiency": "measured: attention, the optimizer and a gradient bucket during products, each alone; memory "
        f"and kernel_us fitted to reference steps, with a median error of {rates.step_error:.1%}",
    }


def lone_cluster(rates: Rates) -> Cluster:
    """Return a cluster of one rank."""
    return cluster_from(cluster_fields("one rank", rates, 1, None, None), "the profile")


def as_yaml(fields: dict[str, Any]) -> str:
    """Return the text of the cluster file."""
    head = "# Measured by `meshwright comm bench`, for `meshwright cost CONFIG --cluster THIS-FILE --devices N`.\n"
    return head + yaml.safe_dump(fields, sort_keys=False, width=110)
