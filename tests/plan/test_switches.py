"""Switches between nodes: what they leave of the adapters' rate, and how that changes times and layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import Job
from meshwright.plan.search import search, space_of, usable_gib
from meshwright.plan.stack import own_stack
from meshwright.plan.switches import adapter_rate_left
from meshwright.plan.target import on_cluster, target_of


def cluster_with(oversubscription: float, switch_nodes: int = 2, node_gb_s: float = 50.0) -> Cluster:
    cluster = load_cluster("a100-80g-dgx")
    network = replace(
        cluster.network, switch_nodes=switch_nodes, oversubscription=oversubscription, node_gb_s=node_gb_s
    )
    return replace(cluster, network=network)


def job_with(cluster: Cluster, devices: int, *words: str) -> Job:
    return on_cluster(target_of("tinyllama-1.1b", ["train.global_batch=256", *words], as_run=False), devices, cluster)


@pytest.mark.parametrize(("op", "words", "devices", "axis", "left"), [
    # Eight nodes in a row, two on each switch: a ring crosses on every second hop.
    ("all_reduce", ("layout.tp=8",), 64, "dp", 1 / (0.5 * 8)),
    # An all_to_all sends 6 of 7 rows for other nodes to other switches.
    ("all_to_all", ("layout.tp=8",), 64, "dp", 1 / (6 / 7 * 8)),
    # Along dp only every second node takes part, so every hop crosses.
    ("all_reduce", ("layout.tp=8", "layout.pp=2", "layout.order=tp-cp-ep-pp-dp"), 64, "dp", 1 / 8),
    # Stages on the two nodes of one switch.
    ("send", ("layout.tp=8", "layout.pp=2", "layout.order=tp-cp-ep-pp-dp"), 64, "pp", 1.0),
    # Inside a node nothing crosses.
    ("all_gather", ("layout.tp=8",), 64, "tp", 1.0),
])  # fmt: skip
def test_the_rate_that_switches_leave(op: str, words: tuple[str, ...], devices: int, axis: str, left: float) -> None:
    cluster = cluster_with(8.0)
    assert adapter_rate_left(cluster, job_with(cluster, devices, *words), axis, op) == pytest.approx(left)
    free = cluster_with(1.0)
    assert adapter_rate_left(free, job_with(free, devices, *words), axis, op) == 1.0


def test_naming_the_switches_of_nodes_helps_our_own_rings() -> None:
    cluster = cluster_with(8.0, switch_nodes=4)
    words = ("layout.tp=8", "layout.node_size=8", "comm.switches=[0,1,0,1,0,1,0,1]")
    alternating = job_with(cluster, 64, *words)
    named = job_with(cluster, 64, *words, "comm.algorithm=ring")
    assert adapter_rate_left(cluster, alternating, "dp", "all_reduce") == pytest.approx(1 / 8)
    assert adapter_rate_left(cluster, named, "dp", "all_reduce") == pytest.approx(1 / (2 / 8 * 8))


def test_oversubscription_costs_time_only_where_groups_cross() -> None:
    words = ("layout.tp=8", "layout.pp=2", "zero.stage=1")
    slow, free = (cluster_with(factor) for factor in (16.0, 1.0))
    for order, crosses in (("tp-cp-ep-pp-dp", True), ("tp-cp-ep-dp-pp", False)):
        # With dp inside, both nodes of a dp group share a switch, and only sends cross.
        jobs = [job_with(each, 32, *words, f"layout.order={order}") for each in (slow, free)]
        dp = [predict_cost(job, each).axes["dp"].seconds for job, each in zip(jobs, (slow, free), strict=True)]
        assert (dp[0] > 4 * dp[1]) == crosses and (crosses or dp[0] == dp[1])


def best_layout(cluster: Cluster) -> Any:
    target = target_of("tinyllama-1.1b", ["train.global_batch=64", "train.precision=bf16"], as_run=False)
    config = replace(target.config, train=replace(target.config.train, micro_batch=1))
    base = Job(config, 32, own_stack(config, False), 8)
    fixed = {"train.micro_batch", "recompute.mode", "zero.stage", "pipeline.schedule"}
    found = search(base, cluster, usable_gib(cluster, 6.0), space_of(config, fixed))
    return found.candidates[0].cost.job.config.layout


def test_oversubscription_changes_the_chosen_layout() -> None:
    free, slow = best_layout(cluster_with(1.0, 1, 200.0)), best_layout(cluster_with(64.0, 1, 200.0))
    assert free != slow
    # Fewer bytes of gradients cross switches with more ranks along the axes inside a node.
    assert slow.tp * slow.pp > free.tp * free.pp


def test_a_file_with_oversubscription_needs_the_nodes_of_a_switch(tmp_path: Path) -> None:
    from meshwright.plan.cluster import FOLDER

    text = (FOLDER / "a100-80g-dgx.yaml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("  node_gb_s: 200", "  node_gb_s: 200\n  oversubscription: 4"), encoding="utf-8")
    with pytest.raises(UserError, match="needs network.switch_nodes"):
        load_cluster(str(path))
