"""The planner's parts agree with each other: the cost's bytes with the ledger's, its memory with the rank's, a step
with its pipeline, and where groups stand with the layout."""

from __future__ import annotations

import pytest

from meshwright.config.sections import Config
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import predict_step
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.explain import parts_of
from meshwright.plan.job import planned
from meshwright.plan.memory import largest
from meshwright.plan.stack import STACKS
from meshwright.plan.states import rank_memory
from meshwright.plan.whatif import step_of
from meshwright.plan.workload import Parallel, Workload, ranks_per_node, senders_across, workload_of

A100, H100 = (load_cluster(name) for name in ("a100-80g-dgx", "h100-80g-dgx"))
OWN = STACKS["compiled"]


def config(name: str, *words: str) -> Config:
    return planned(name, words, as_run=False).config


def cost(name: str, world: int, *words: str) -> Cost:
    return predict_cost(workload_of(config(name, *words), world, 8), H100, OWN)


@pytest.mark.parametrize("group", ["dp", "node"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_bytes_over_dp_are_the_ledgers(name: str, stage: int, group: str) -> None:
    """Tied and untied, eight micro-batches."""
    world = 16
    words = [f"zero.stage={stage}", f"zero.shard_group={group}", "train.global_batch=128", "layout.node_size=8"]
    ledger = predict_step(config(name, *words), world)
    counted = sum(t.wire_bytes for axis, t in ledger.items() if axis.startswith("dp")) / world
    assert cost(name, world, *words).axes["dp"].wire_bytes == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dividing_on_nodes_spares_the_network(stage: int) -> None:
    """What goes over the slow links goes once a step, so with many micro-batches it is quicker from stage 2 on."""
    words = [f"zero.stage={stage}", "train.global_batch=1024", "recompute.mode=full"]
    wide, near = (
        predict_cost(workload_of(config("llama3-8b", *words, f"zero.shard_group={group}"), 64, 8), A100, OWN)
        for group in ("dp", "node")
    )
    assert (near.axes["dp"].seconds < wide.axes["dp"].seconds) == (stage > 1)


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
@pytest.mark.parametrize("words", [["recompute.mode=full"], ["recompute.mode=full", "zero.stage=3"]])
def test_memory_is_near_that_of_the_rank(words: list[str], micro_batch: int) -> None:
    """However large the vocabulary: the loss holds the logits of a chunk. (A compiler keeps less than blocks as they
    are, by up to a quarter of the whole here.)"""
    words = [*words, f"train.micro_batch={micro_batch}", "train.global_batch=64"]
    c = config("llama3-8b", *words)
    _, rank = rank_memory(c, 8, 0)
    assert largest(workload_of(c, 8, 8), OWN).peak == pytest.approx(rank.peak, rel=0.25)


def test_memory_of_a_measured_step() -> None:
    """28 layers of 3072 with a vocabulary of 128256, micro-batch 8, full recomputation: 69.8 GiB on an H200."""
    c = config(
        "llama3-8b", "model.layers=28", "model.hidden=3072", "model.heads=24", "model.ffn=8192", "model.seq=4096",
        "train.micro_batch=8", "train.global_batch=8", "recompute.mode=full",
    )  # fmt: skip
    assert largest(workload_of(c, 1, 8), OWN).peak / 2**30 == pytest.approx(69.84, rel=0.05)


def placed(world: int, tp: int, pp: int = 1, order: str = "tp-cp-ep-dp-pp", chunks: int = 1) -> Workload:
    return Workload(config("gpt3-175b").model, Parallel(world, tp=tp, pp=pp, order=order, chunks=chunks), 1, world)


def test_a_group_that_crosses_a_node_anywhere_crosses() -> None:
    assert ranks_per_node(placed(64, 8), "tp") == 8
    assert ranks_per_node(placed(64, 4), "dp") == 2
    assert ranks_per_node(placed(72, 6), "tp") == 3  # the first group stands on one node, the second on two
    layout = placed(72, 6).layout
    spread = max(len({rank // 8 for rank in group}) for group in layout.groups("tp"))
    assert spread == 2


def test_sends_cross_where_any_stage_is_elsewhere() -> None:
    inner = "tp-pp-cp-ep-dp"
    assert senders_across(placed(64, 8, 4)) == 8  # every rank's next stage is on another node
    assert senders_across(placed(64, 2, 4, inner)) == 0  # a whole pipeline on a node
    assert senders_across(placed(64, 4, 8, inner)) == 4  # two stages on a node: the second's ranks send away
    assert senders_across(placed(72, 4, 6, inner)) == 4
    assert senders_across(placed(24, 3, 8, inner)) > 0  # stages that don't divide a node
    w = placed(64, 4, 8, inner)
    inside, across = (predict_cost(x, H100, OWN).axes["pp"].seconds for x in (placed(64, 2, 4, inner), w))
    assert across > inside


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for words in (["layout.pp=16"], ["layout.pp=4", "layout.tp=4"], ["zero.stage=3"], ["layout.tp=8"]):
        found = cost("llama3-8b", 16, "train.global_batch=256", *words)
        assert sum(parts_of(found).values()) == pytest.approx(found.step_s, rel=0.01), words


def test_the_busiest_stage_may_be_the_one_with_the_output_layer() -> None:
    found = cost("llama3-8b", 16, "train.global_batch=256", "layout.pp=16")
    last = found.stages[-1]
    assert found.compute_s == pytest.approx(256 * (last.forward + last.backward), rel=0.05)


def test_a_simulated_step_is_not_shorter_than_its_pipeline() -> None:
    """Though the table is larger than those that `cost` simulates."""
    words = ["layout.tp=8", "layout.pp=16", "layout.chunks=7", "pipeline.schedule=interleaved", "recompute.mode=full"]
    w = workload_of(config("llama3-405b", *words, "train.global_batch=1024"), 1024, 8)
    step = step_of(w, H100, OWN)
    assert step.seconds > step.timeline.makespan
    assert step.cost.bubble == pytest.approx(step.timeline.bubble, rel=1e-6)


def test_a_rank_needs_at_least_what_lasts_and_what_flies() -> None:
    """On the first stage it is the embedding, the last to be reduced, that is the largest."""
    words = ["layout.pp=8", "zero.stage=3", "recompute.mode=full", "train.global_batch=64", "model.seq=512"]
    _, rank = rank_memory(config("llama3-8b", *words), 64, 0)
    assert rank.peak >= rank.states + rank.buffers
