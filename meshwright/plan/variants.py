"""Predicts the layouts of a ranking on fewer or more devices, and on slower or faster networks. No torch.

A plan's page has sliders for both. Their cells are computed here when the page is written, without a new search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.config.rules import RULES, first_broken_rule
from meshwright.errors import UserError
from meshwright.plan.account import layout_of_cost, layout_words, whole_run
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.job import Job
from meshwright.plan.memory import needed_gib
from meshwright.plan.search import Candidate

DEVICE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
NETWORK_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
MOST_LAYOUTS = 4  # The number of divisions into axes, from the ranking, that are tried in each cell.


def slider_cells(shown: Sequence[Candidate], limit_gib: float, tokens: float | None) -> dict[str, Any]:
    """Return the values of both sliders, and for each pair the best of the ranking's layouts there.

    With more devices, the layouts get more data-parallel replicas, and the batch stays the same.
    """
    best = shown[0]
    base, cluster = best.job, best.cost.cluster
    sizes = [int(base.world * factor) for factor in DEVICE_FACTORS if base.world * factor >= 1]
    node = cluster.node.devices
    sizes = [size for size in dict.fromkeys(sizes) if size == base.world or size % min(node, size) == 0]
    networks = [replaced_network(cluster, factor) for factor in NETWORK_FACTORS]
    cells = []
    for devices in sizes:
        fitting = [job for job in _jobs(shown, devices, min(node, devices)) if needed_gib(job, cluster) <= limit_gib]
        here = devices == base.world
        # The plan's own cell has the plan's own figures, which are timed by the schedule's table.
        cells.append([
            _figures([best.cost] if here and network == cluster else
                     [predict_cost(job, network, exact=False) for job in fitting], tokens)
            for network in networks
        ])  # fmt: skip
    rates = [network.network.node_gb_s for network in networks]
    at = [sizes.index(base.world), NETWORK_FACTORS.index(1.0)]
    return {"devices": sizes, "networks": rates, "cells": cells, "at": at}


def replaced_network(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with another rate between nodes."""
    rate = cluster.network.node_gb_s * factor
    return replace(cluster, network=replace(cluster.network, node_gb_s=rate))


def _jobs(shown: Sequence[Candidate], devices: int, node: int) -> list[Job]:
    """Return the first divisions into axes of the ranking, with some ZeRO stages, that the devices and the batch
    allow. A node has `node` of these devices."""
    divisions: dict[tuple[int, ...], Job] = {}
    for job in (candidate.job for candidate in shown):
        divisions.setdefault((job.layout.tp, job.layout.pp, job.layout.cp, job.layout.ep), job)
    found = []
    for job in list(divisions.values())[:MOST_LAYOUTS]:
        for zero in dict.fromkeys((job.config.zero.stage, 1, 3)):
            sized = replace(job.with_keys(zero={"stage": zero}), world=devices, cluster_node=node)
            if _is_possible(sized):
                found.append(sized)
    return found


def _is_possible(job: Job) -> bool:
    try:
        return first_broken_rule(job.config, job.world, RULES) is None and job.layout.world == job.world
    except UserError:
        return False


def _figures(costs: Sequence[Cost], tokens: float | None) -> dict[str, Any]:
    """Return the figures of the fastest step; empty if there is none."""
    if not costs:
        return {}
    cost = min(costs, key=lambda each: each.step_s)
    figures: dict[str, Any] = {
        "layout": layout_words(layout_of_cost(cost)), "step_s": cost.step_s, "mfu": cost.mfu,
        "tokens_per_s": cost.tokens_per_s_device * cost.job.world,
    }  # fmt: skip
    run = whole_run(cost, tokens) if tokens else {}
    return figures | {key: run[key] for key in ("days", "cost_usd", "energy_mwh") if run}
