"""Tests of the fit of `meshwright comm bench`: it recovers known links, and its profile is a valid cluster file."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from meshwright.bench.fit import Link, Measurement, fit_links, hops
from meshwright.bench.profile import as_yaml, cluster_fields
from meshwright.bench.rates import Rates
from meshwright.bench.request import OPS, parse_sizes
from meshwright.config.yaml_text import parse_yaml
from meshwright.plan.cluster import cluster_from, load_cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.efficiency import START, adapter_share, collective_seconds
from meshwright.plan.job import Job, job_of
from meshwright.plan.stack import CPU
from meshwright.plan.target import target_of
from meshwright.spec.traffic.ledger import bus_factor

RATES = Rates(
    "cpu", "fp32", 1, {"fp32": 0.06, "bf16": 0.001}, product_gb_s=5.0, attention_tflops=0.02, copy_gb_s=10.0,
    step_gb_s=4.0, kernel_us=8.0, optimizer_gb_s=6.0, contention=0.6, wait_us=0.0, step_error=0.03,
    memory_gib=8.0, host_gib=16.0,
)  # fmt: skip
SIZES = parse_sizes("1K:64M")


def times(
    latency: float, rate: float, ranks: int, per_node: int, near: float = 0.0, noise: float = 0.0
) -> list[Measurement]:
    """Return times of all ops by the formula, with reduce_scatter at a third of the rate.

    With noise, every eighth time is also four times too long.
    """
    rng, points = random.Random(1), []
    for op in OPS:
        inside, across = hops(op, ranks, per_node)
        for n, size in enumerate(SIZES):
            own = rate / 3 if op == "reduce_scatter" else rate
            hop = inside * near + across * latency if per_node < ranks else inside * latency
            share = adapter_share(op, ranks, per_node) if per_node < ranks else bus_factor(op, ranks)
            seconds = START + hop + size * share / own
            seconds *= rng.uniform(1 - noise, 1 + noise) * (4.0 if noise and n % 8 == 3 else 1.0)
            points.append(Measurement("dp", op, ranks, per_node, size, seconds))
    return points


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_known_links_come_back_through_noise(ranks: int) -> None:
    inside, across = fit_links(times(200e-6, 1.5e9, ranks, ranks, noise=0.1))
    assert across is None and inside is not None
    assert inside.latency == pytest.approx(200e-6, rel=0.15)
    assert inside.rate == inside.rates["all_reduce"] == pytest.approx(1.5e9, rel=0.15)
    assert inside.rates["reduce_scatter"] == pytest.approx(0.5e9, rel=0.15)
    assert inside.error < 0.1 and inside.worst > 0.5 and inside.points == len(OPS) * len(SIZES)


def test_both_classes_of_links() -> None:
    near, far = times(100e-6, 2e9, 2, 2), times(900e-6, 0.2e9, 4, 2, near=100e-6)
    inside, across = fit_links(near + far)
    assert inside is not None and across is not None
    assert (inside.latency, inside.rate) == (pytest.approx(100e-6, rel=1e-3), pytest.approx(2e9, rel=1e-3))
    assert (across.latency, across.rate) == (pytest.approx(900e-6, rel=1e-3), pytest.approx(0.2e9, rel=1e-3))
    assert across.error < 1e-3
    cluster = cluster_from(cluster_fields("two", RATES, 2, inside, across), "x")
    for p in near + far:
        # The planner's steps have no broadcast.
        if p.op != "broadcast":
            seen = collective_seconds(cluster, p.op, p.payload, p.ranks, p.per_node)
            assert seen == pytest.approx(p.seconds, rel=0.12), p


@pytest.mark.parametrize("fall", [1e-9, 0.0, -1e-12])
def test_no_rate_is_above_what_was_measured(fall: float) -> None:
    """The rate is near the best measured one if the times do not grow with the size, and so do not show the rate."""
    points = [Measurement("dp", "all_reduce", 2, 2, size, 1e-3 - fall * size) for size in (1024, 2048, 4096)]
    inside, _ = fit_links(points)
    assert inside is not None and inside.latency == pytest.approx(0.5e-3, rel=0.05)
    best = max(p.bus_gb_s for p in points)
    assert 0.9 * best < inside.rate / 1e9 <= 1.1 * best * (1 + 1e-9)


def test_one_flat_op_keeps_to_its_own_measurements() -> None:
    """A broadcast whose times are pure latency gets its own best measured rate, not that of other ops or none."""
    steady = times(200e-6, 1.5e9, 2, 2)
    flat = [replace(p, seconds=250e-6) for p in steady if p.op == "broadcast" and p.payload <= 2**16]
    inside, _ = fit_links([p for p in steady if p.op != "broadcast"] + flat)
    assert inside is not None and inside.rate == pytest.approx(1.5e9, rel=0.01)
    assert inside.rates["broadcast"] <= 1.1 * 2**16 / 250e-6


def test_bus_factors() -> None:
    for n in (2, 4, 16):
        assert bus_factor("all_reduce", n) == 2 * (n - 1) / n
        assert {bus_factor(op, n) for op in ("all_gather", "reduce_scatter", "all_to_all")} == {(n - 1) / n}
        assert bus_factor("broadcast", n) == bus_factor("send", n) == 1
    point = Measurement("dp", "all_reduce", 4, 4, 4_000_000, 1e-3)
    assert point.algorithm_gb_s == pytest.approx(4.0) and point.bus_gb_s == pytest.approx(6.0)


def test_sizes() -> None:
    assert parse_sizes("1K:8KiB") == (1024, 2048, 4096, 8192)
    assert parse_sizes("4, 1M,2k") == (4, 2048, 2**20)


def test_the_profile_is_a_cluster_whose_rates_are_the_measured_ones() -> None:
    link = Link(150e-6, {"all_reduce": 1e9, "all_gather": 0.8e9, "reduce_scatter": 0.25e9}, 0.05, 0.2, 51)
    fields = cluster_fields("here", RATES, 2, link, None)
    cluster = cluster_from(parse_yaml(as_yaml(fields), "here.yaml"), "here.yaml")
    assert cluster == cluster_from(fields, "x")
    assert cluster.memory_rate == pytest.approx(4e9) and cluster.optimizer_rate == pytest.approx(6e9)
    assert cluster.device.kernel_us == 8.0 and cluster.efficiency.contention == 0.6
    once = collective_seconds(cluster, "reduce_scatter", 2**24, 2, 2)
    assert once == pytest.approx(START + 150e-6 + 2**23 / 0.25e9)
    assert collective_seconds(cluster, "all_gather", 2**24, 2, 1) == pytest.approx(START + 300e-6 + 2**23 / 0.8e9)
    assert "not measured" in cluster.sources["network"] and "51 points" in cluster.sources["link"]


def test_what_a_profile_knows_makes_steps_longer() -> None:
    """Each field that only a measured profile has adds the expected time to a step."""
    link = Link(150e-6, {"all_reduce": 1e9}, 0.05, 0.2, 51)
    cluster = cluster_from(cluster_fields("here", replace(RATES, contention=0.0, kernel_us=0.0), 2, link, None), "x")
    words = ["train.precision=fp32", "train.global_batch=2"]
    data, tensor = (
        job_of(target_of("gpt2-124m", [*words, f"layout.tp={tp}"]).config, 2, CPU, cluster_node=2, host=True)
        for tp in (1, 2)
    )

    def longer(job: Job, **parts: Any) -> float:
        return predict_cost(job, replace(cluster, **parts)).step_s - predict_cost(job, cluster).step_s

    waits = {"node": replace(cluster.node, wait_us=1000.0)}
    # Waits of 1 ms: per micro-batch four in each of 12 blocks, two at the ends and three small ones. Two once per step.
    assert longer(tensor, **waits) == pytest.approx(1e-3 * (2 * (4 * 12 + 2 + 3) + 2), rel=1e-6)
    # Two small all-reduces and 13 buckets of gradients, each partly hidden.
    assert longer(data, **waits) == pytest.approx(1e-3 * (2 + 13 * (1 - 0.928 + 0.0743 * 0.928)), rel=1e-6)
    kernels = {"device": replace(cluster.device, kernel_us=10.0)}
    assert longer(tensor, **kernels) == pytest.approx(2 * 3 * 1e-5 * (24 * 12 + 8 + 4), rel=1e-6)
    busy = {"efficiency": replace(cluster.efficiency, contention=1.0)}
    assert longer(tensor, **busy) == 0.0 and longer(data, **busy) > 0.1 * collective_seconds(
        cluster, "all_reduce", 4 * 124e6, 2, 2
    )
    slow = {"efficiency": replace(cluster.efficiency, optimizer=0.06)}
    # In fp32 an update moves 4 + 4 + 8 + 16 = 32 bytes per parameter.
    assert longer(data, **slow) == pytest.approx(9 * 124e6 * 32 / 6e9, rel=0.02)


def test_shipped_clusters_have_none_of_what_only_a_profile_knows() -> None:
    cluster = load_cluster("h100-80g-dgx")
    assert cluster.optimizer_rate == cluster.memory_rate and not cluster.ops
    assert cluster.device.kernel_us == cluster.device.product_gb_s == cluster.efficiency.contention == 0.0
    assert cluster.node.wait_us == 0.0
