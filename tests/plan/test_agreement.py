"""The planner's parts agree with each other: the bytes that are priced with the ledger, a step with its pipeline
schedule, and the nodes that groups span with the layout.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.bench.models import bench_config, job_of_bench
from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.plan import efficiency
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import predict_step
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.explain import parts_of
from meshwright.plan.job import Job, job_of, ranks_per_node, senders_across
from meshwright.plan.memory import largest, rank_memory
from meshwright.plan.stack import STACKS
from meshwright.plan.target import target_of
from meshwright.plan.whatif import step_of

A100, H100 = (load_cluster(name) for name in ("a100-80g-dgx", "h100-80g-dgx"))
OWN = STACKS["compiled"]


def config(name: str, *words: str) -> Config:
    return target_of(name, words, as_run=False).config


def job(name: str, world: int, *words: str) -> Job:
    return job_of(config(name, *words), world, OWN, cluster_node=8)


def cost(name: str, world: int, *words: str) -> Cost:
    return predict_cost(job(name, world, *words), H100)


# Every byte takes a nanosecond over any link, and nothing else takes time. So seconds count bytes.
FLAT = replace(
    H100, name="flat", node=replace(H100.node, link_gb_s=1.0, link_latency_us=0.0),
    network=replace(H100.network, node_gb_s=1e6, latency_us=0.0), efficiency=replace(H100.efficiency, link=1.0),
)  # fmt: skip


def priced_bytes(of: Job, axis: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the bytes per rank that account for an axis's time."""
    monkeypatch.setattr(efficiency, "START", 0.0)
    return predict_cost(of, FLAT).axes[axis].seconds * 1e9


@pytest.mark.parametrize("group", ["dp", "node"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_bytes_over_dp_are_the_ledgers(name: str, stage: int, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for tied and untied embeddings, with eight micro-batches. The priced bytes exclude the padding of
    buckets.
    """
    world = 16
    words = [f"zero.stage={stage}", f"zero.shard_group={group}", "train.global_batch=128", "layout.node_size=8"]
    ledger = predict_step(config(name, *words), world)
    counted = sum(t.wire_bytes for axis, t in ledger.items() if axis.startswith("dp"))
    traffic = cost(name, world, *words).traffic
    assert world * sum(t.wire_bytes for axis, t in traffic.items() if axis.startswith("dp")) == counted
    assert priced_bytes(job(name, world, *words), "dp", monkeypatch) == pytest.approx(counted / world, rel=0.01)


@pytest.mark.parametrize("mode", ["none", "full", "every:2", "every:4"])
def test_the_bytes_of_sharded_weights_are_the_ledgers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are recomputed together gather their weights once more, except for the last group of blocks."""
    words = ["zero.stage=3", f"recompute.mode={mode}", "train.global_batch=64"]
    counted = predict_step(config("llama3-8b", *words), 8)["dp"].wire_bytes
    assert cost("llama3-8b", 8, *words).traffic["dp"].wire_bytes * 8 == counted
    assert priced_bytes(job("llama3-8b", 8, *words), "dp", monkeypatch) == pytest.approx(counted / 8, rel=0.002)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dividing_on_nodes_spares_the_network(stage: int) -> None:
    """Traffic over the network then happens once per step, so with many micro-batches sharding within nodes is faster
    from stage 2 on.
    """
    words = [f"zero.stage={stage}", "train.global_batch=1024", "recompute.mode=full"]
    wide, near = (
        predict_cost(job("llama3-8b", 64, *words, f"zero.shard_group={group}"), A100) for group in ("dp", "node")
    )
    assert (near.axes["dp"].seconds < wide.axes["dp"].seconds) == (stage > 1)


@pytest.mark.parametrize(
    ("model", "gib"),
    [("3b", 69.40), ("mixtral-8x7b-2l", 49.71), ("qwen3-30b-a3b-6l", 65.54), ("olmoe-7b-6l", 42.02)],
)
def test_memory_of_a_measured_step(model: str, gib: float) -> None:
    """`meshwright bench step` measured these peaks on an H200: seq 4096, micro-batch 4, bf16, no recomputation."""
    assert largest(job_of_bench(bench_config(model))).peak / 2**30 == pytest.approx(gib, rel=0.025)


@pytest.mark.parametrize(("preset", "gib"), [("bert-large", 16.3), ("t5-large", 19.97)])
def test_memory_of_a_measured_encoder(preset: str, gib: float) -> None:
    """benchmarks/gpu_encoders.py measured these peaks on an H200: 32 samples, seq 512, bf16."""
    train = {"precision": "bf16", "micro_batch": 32, "global_batch": 32}
    given = config_from({"model": {"preset": preset, "dropout": 0.0}, "train": train, "data": {"prefixes": ["made"]}})
    assert largest(job_of(given, 1, OWN)).peak / 2**30 == pytest.approx(gib, rel=0.025)


def placed(world: int, tp: int, pp: int = 1, order: str = "tp-cp-ep-dp-pp") -> Job:
    words = [f"layout.tp={tp}", f"layout.pp={pp}", f"layout.order={order}", f"train.global_batch={world}"]
    return Job(config("gpt3-175b", *words), world, OWN, cluster_node=8)


def test_a_group_that_crosses_a_node_anywhere_crosses() -> None:
    assert ranks_per_node(placed(64, 8).layout, "tp") == 8
    assert ranks_per_node(placed(64, 4).layout, "dp") == 2
    assert ranks_per_node(placed(72, 6).layout, "tp") == 3  # The first group is on one node, the second spans two.
    layout = placed(72, 6).layout
    spread = max(len({rank // 8 for rank in group}) for group in layout.groups("tp"))
    assert spread == 2


def test_sends_cross_where_any_stage_is_elsewhere() -> None:
    inner = "tp-pp-cp-ep-dp"

    def senders(of: Job) -> int:
        return senders_across(of.layout, around=False)

    assert senders(placed(64, 8, 4)) == 8  # Every rank's next stage is on another node.
    assert senders(placed(64, 2, 4, inner)) == 0  # A whole pipeline fits on a node.
    # A node holds two stages: the ranks of the second one send to another node.
    assert senders(placed(64, 4, 8, inner)) == 4
    assert senders(placed(72, 4, 6, inner)) == 4
    assert senders(placed(24, 3, 8, inner)) > 0  # The stages do not divide a node evenly.
    inside, across = (predict_cost(x, H100).axes["pp"] for x in (placed(64, 2, 4, inner), placed(64, 4, 8, inner)))
    assert across.seconds > inside.seconds


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for words in (["layout.pp=16"], ["layout.pp=4", "layout.tp=4"], ["zero.stage=3"], ["layout.tp=8"]):
        found = cost("llama3-8b", 16, "train.global_batch=256", *words)
        assert sum(parts_of(found).values()) == pytest.approx(found.step_s, rel=0.01), words


def test_the_busiest_stage_may_be_the_one_with_the_output_layer() -> None:
    found = cost("llama3-8b", 16, "train.global_batch=256", "layout.pp=16")
    last = found.stages[-1]
    assert found.compute_s == pytest.approx(256 * (last.forward + last.backward), rel=0.05)


def test_a_simulated_step_is_not_shorter_than_its_pipeline() -> None:
    """This holds although the schedule table is larger than the ones that `cost` simulates."""
    words = ["layout.tp=8", "layout.pp=16", "layout.chunks=7", "pipeline.schedule=interleaved", "recompute.mode=full"]
    step = step_of(job("llama3-405b", 1024, *words, "train.global_batch=1024"), H100)
    assert step.seconds > step.timeline.makespan
    assert step.cost.bubble == pytest.approx(step.timeline.bubble, rel=1e-6)


def test_a_rank_needs_at_least_what_lasts_and_what_flies() -> None:
    """Its peak is at least the persistent states plus the buffers in flight. On the first stage the embedding, which is
    reduced last, is the largest of these buffers.
    """
    words = ["layout.pp=8", "zero.stage=3", "recompute.mode=full", "train.global_batch=64", "model.seq=512"]
    rank = rank_memory(job("llama3-8b", 64, *words), 0)
    assert rank.peak >= rank.states + rank.buffers
