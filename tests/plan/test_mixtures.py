"""The planner of mixtures of experts: sizes, FLOPs, the price of exchanges, imbalance, and the search of ep and etp."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config.load import config_from
from meshwright.config.rules import first_broken_rule
from meshwright.config.sections import Config
from meshwright.plan.cluster import load_cluster
from meshwright.plan.communication import by_axis, by_line, stage_calls
from meshwright.plan.cost import predict_cost
from meshwright.plan.efficiency import collective_seconds
from meshwright.plan.flops import model_flops
from meshwright.plan.held import packing_of
from meshwright.plan.job import Job, job_of, ranks_per_node
from meshwright.plan.memory import needed_gib, rank_memory
from meshwright.plan.search import RECOMPUTE, SearchSpace, search, shapes
from meshwright.plan.stack import STACKS
from meshwright.plan.whatif import parse_change, step_of, with_imbalance
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import describe
from meshwright.spec.model.graph import active_parameters, parameter_count

H100, OWN = load_cluster("h100-80g-dgx"), STACKS["compiled"]
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False}
MIXTRAL = LLAMA | {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "seq": 4096,
    "experts": {"count": 8, "top_k": 2},
}  # fmt: skip
QWEN3_30B = LLAMA | {
    "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144, "vocab": 151936,
    "seq": 4096, "qk_norm": True, "experts": {"count": 128, "top_k": 8, "ffn": 768},
}  # fmt: skip
OLMOE = LLAMA | {
    "layers": 16, "hidden": 2048, "heads": 16, "ffn": 1024, "vocab": 50304, "seq": 4096,
    "experts": {"count": 64, "top_k": 8},
}  # fmt: skip
DEEPSEEK_V3 = LLAMA | {
    "layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "vocab": 129280, "seq": 4096,
    "latent": {"q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
    "experts": {
        "count": 256, "top_k": 8, "ffn": 2048, "shared": 1, "first_dense": 3, "router": "sigmoid", "groups": 8,
        "groups_used": 4, "scale": 2.5, "bias_balance": 0.001, "aux_loss": 0.0001,
    },
}  # fmt: skip


def config(model: dict[str, Any], layout: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    train = {"precision": "bf16", "global_batch": 256, "micro_batch": 1} | sections.pop("train", {})
    return config_from(
        {"model": model, "data": {"prefixes": ["tokens"]}, "layout": layout or {}, "train": train, **sections}
    )


def job(model: dict[str, Any], devices: int, layout: dict[str, Any], **sections: dict[str, Any]) -> Job:
    return job_of(config(model, layout, **sections), devices, OWN, cluster_node=8)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [(MIXTRAL, 46.7, 12.9), (QWEN3_30B, 30.5, 3.3), (OLMOE, 6.9, 1.3), (DEEPSEEK_V3, 671.0, 37.6)],
    ids=["mixtral", "qwen3", "olmoe", "deepseek-v3"],
)  # fmt: skip
def test_parameters_as_their_authors_count_them(model: dict[str, Any], total: float, active: float) -> None:
    described = describe(config(model).model)
    assert parameter_count(described) / 1e9 == pytest.approx(total, rel=0.005)
    assert active_parameters(described) / 1e9 == pytest.approx(active, rel=0.02)


def test_flops_are_those_of_the_active_parameters() -> None:
    """Each weight that a token meets takes two FLOPs, three times. The embedding's table is not multiplied."""
    model = config(MIXTRAL).model
    described = describe(model)
    weights = active_parameters(described) - 32000 * 4096 - (2 * 32 + 1) * 4096  # Without the table and the norms.
    attention = 32 * 4 * 4096 * 4096  # Scores and mix over all tokens take 4 s h per layer.
    assert model_flops(model, 1.0) == pytest.approx(6 * weights + 3 * attention, rel=1e-9)
    limited = config(MIXTRAL | {"experts": {"count": 8, "top_k": 2, "capacity": 1.5}}).model
    assert model_flops(limited, 1.0) == model_flops(model, 1.0), "empty places are no work of the model's"
    dense = config(MIXTRAL | {"experts": {"count": 0}, "ffn": 2 * 14336}).model
    assert model_flops(dense, 1.0) == pytest.approx(model_flops(model, 1.0), rel=1e-4)


def test_as_many_ranks_on_a_node_as_counted() -> None:
    for world, tp, pp, ep, etp in ((32, 2, 2, 8, 1), (32, 4, 1, 16, 2), (64, 1, 4, 16, 1), (48, 2, 3, 4, 1)):
        for node in (4, 6, 8):
            layout = Layout(world, tp=tp, pp=pp, ep=ep, etp=etp, node_size=node)
            for axis in ("ep", "etp", "edp", "tp", "dp"):
                groups = layout.groups(axis)
                nodes = max(len({rank // node for rank in group}) for group in groups)
                assert ranks_per_node(layout, axis) == max(1, len(groups[0]) // nodes), (layout, axis)


def test_exchanges_take_the_links_between_their_ranks() -> None:
    """Each rank inside a node sends 7/8 of its rows over its own link. Of 16 ranks on two nodes, half of the rows go
    through the rank's own adapter, which takes longer than the 7/16 over its link.
    """
    payload = 64 * 2**20
    near, far = (collective_seconds(H100, "all_to_all", payload, size, 8) for size in (8, 16))
    link, adapter = 450e9 * 0.78, 400e9 / 8 * 0.8
    assert near == pytest.approx(payload * 7 / 8 / link, rel=0.15)
    assert far == pytest.approx(payload * 8 / 16 / adapter, rel=0.05)
    times = {}
    for ep, order in ((8, "tp-cp-ep-dp-pp"), (16, "tp-cp-ep-dp-pp"), (8, "tp-cp-dp-ep-pp")):
        made = job(MIXTRAL | {"experts": {"count": 16, "top_k": 2}}, 64, {"ep": ep, "etp": 1, "order": order})
        cost = predict_cost(made, H100)
        times[ep, order[6:8]] = cost.axes["ep"].seconds
        calls = [call for call in stage_calls(made, 0) if call.axis == "ep"]
        per_node = ranks_per_node(made.layout, "ep")
        priced = sum(call.times * collective_seconds(H100, call.op, call.payload, ep, per_node) for call in calls)
        assert cost.axes["ep"].seconds == pytest.approx(priced)
    assert times[8, "ep"] < times[16, "ep"] / 2 < times[8, "dp"], "one rank on each node has all its rows go outside"


def test_experts_are_summed_over_their_own_ranks() -> None:
    """Each expert has 8 copies with ep=8 in 64 ranks, so an eighth of the gradients is summed over 8 ranks."""
    for zero in range(4):
        cost = predict_cost(job(MIXTRAL, 64, {"ep": 8, "etp": 1}, zero={"stage": zero}), H100)
        assert cost.axes["edp"].seconds > 0 and cost.axes["dp"].seconds > 0
        alone = predict_cost(job(MIXTRAL, 8, {"ep": 8, "etp": 1}, zero={"stage": zero}), H100)
        assert "edp" not in alone.axes and "dp" in alone.axes
        shared = predict_cost(job(MIXTRAL, 64, {"ep": 1, "etp": 1}, zero={"stage": zero}), H100)
        assert "edp" not in shared.axes and shared.axes["dp"].seconds > cost.axes["dp"].seconds
    made = predict_cost(job(MIXTRAL, 64, {"ep": 8, "etp": 1}), H100)
    experts = 32 * 3 * 4096 * 14336
    buckets = [size for one in packing_of(made.job, 0).buffers if one.data_axes == "edp" for size in one.buckets]
    assert sum(buckets) == experts and len(buckets) > 32
    each = [collective_seconds(H100, "all_reduce", 4 * size, 8, 1) for size in buckets]
    assert made.axes["edp"].seconds == pytest.approx(sum(each))


def test_routers_sums_take_as_long_in_either_order() -> None:
    """The sums go over tp and cp together, and this product axis has another name if cp comes first."""
    found = []
    for order, name in (("tp-cp-ep-dp-pp", "tp-cp"), ("cp-tp-ep-dp-pp", "cp-tp")):
        made, without = (
            job(MIXTRAL | {"experts": MIXTRAL["experts"] | {"aux_loss": loss}}, 8, {"tp": 2, "cp": 2, "order": order})
            for loss in (0.01, 0.0)
        )
        assert name in by_axis(by_line(stage_calls(made, 0))) and name not in by_axis(by_line(stage_calls(without, 0)))
        costs = [predict_cost(each, H100).axes["tp"].seconds for each in (made, without)]
        found.append(costs[0] - costs[1])
    assert found[0] > 0 and found[1] == pytest.approx(found[0])


def test_the_busiest_rank_takes_longer() -> None:
    even = job(MIXTRAL, 64, {"ep": 8, "etp": 1})
    uneven = with_imbalance(even, 1.5)
    plain, busy = predict_cost(even, H100), predict_cost(uneven, H100)
    assert busy.axes["ep"].seconds == pytest.approx(1.5 * plain.axes["ep"].seconds, rel=0.1)
    assert 1.2 < busy.compute_s / plain.compute_s < 1.5, "experts are most of the compute, but not all"
    assert rank_memory(uneven, 0).activations > 1.2 * rank_memory(even, 0).activations
    assert busy.traffic == plain.traffic and busy.mfu < plain.mfu, "bytes are those of balanced experts"
    changed = step_of(even, H100, [parse_change("imbalance=1.5")])
    assert changed.seconds == pytest.approx(busy.step_s) and "1.5 x the mean rows" in str(parse_change("imbalance=1.5"))
    steps = [predict_cost(with_imbalance(even, factor), H100).step_s for factor in (1.0, 1.1, 2.0, 8.0)]
    assert all(a < b for a, b in pairwise(steps))


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    path = tmp_path / "mixture.yaml"
    path.write_text(json.dumps({
        "model": MIXTRAL, "data": {"prefixes": ["tokens"]}, "train": {"precision": "bf16", "global_batch": 256},
    }))  # fmt: skip
    return str(path)


WHERE = ["--cluster", "h100-80g-dgx", "--devices", "64"]


def test_commands_say_how_experts_are_divided(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [mixture, *WHERE, "--layout", "tp=2,ep=4,etp=1,sp=true"]
    assert main(["cost", *words, "--imbalance", "1.3"]) == 0
    text = capsys.readouterr().out
    assert "46.7B parameters (a token uses 12.9B)" in text
    assert "8 experts, 2 for a token; ep 4, etp 1: 2 on a rank (16 copies)" in text
    assert "Bytes over ep are those of balanced experts" in text and "1.3 times the mean rows" in text
    assert main(["cost", *words, "--imbalance", "1.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["experts"] == {"count": 8, "top_k": 2, "ep": 4, "etp": 1, "edp": 16, "per_rank": 2}
    assert found["imbalance"] == 1.3 and found["layout"]["ep"] == 4 and found["layout"]["etp"] == 1
    assert (found["parameters"], found["active_parameters"]) == (46702792704, 12879925248)
    assert main(["simulate", *words, "--what-if", "imbalance=1.3"]) == 0
    text = capsys.readouterr().out
    assert "ep 4, etp 1: 2 on a rank" in text and "the busiest rank's experts have 1.3 x the mean rows" in text
    keys = ["layout.tp=2", "layout.ep=4", "layout.etp=1", "layout.sequence_parallel=true"]
    assert main(["memory", mixture, "--world", "64", *keys]) == 0
    assert "8 experts, 2 for a token; ep 4, etp 1: 2 on a rank" in capsys.readouterr().out
    assert main(["cost", mixture, *WHERE, "--layout", "ep=8,etp=1", "model.experts.capacity=1.25"]) == 0
    assert "The capacity fixes the bytes over ep." in capsys.readouterr().out
    assert main(["cost", "llama3-8b", *WHERE, "train.global_batch=64", "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)
    assert "experts" not in dense and dense["parameters"] == dense["active_parameters"] and "ep" not in dense["layout"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--layout", "ep=8", "--imbalance", "0.5"], "at least 1, e.g. 1.3"),
        (["--layout", "ep=8", "--imbalance", "nan"], "at least 1, e.g. 1.3"),
        (["--layout", "ep=8", "--imbalance", "9"], "more than ep=8"),
        (["--imbalance", "1.3"], "every rank computes its own rows with layout.ep=1: leave it out"),
        (["--layout", "ep=8", "--imbalance", "1.3", "model.experts.capacity=1"], "the capacity fixes the rows"),
        (["--layout", "ep=8", "--imbalance", "1.3", "model.experts.count=0"], "the model has none"),
    ],
)
def test_an_imbalance_that_says_nothing_is_refused(
    words: list[str], sentence: str, mixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cost", mixture, *WHERE, *words]) == 2
    text = capsys.readouterr().err
    assert sentence in text and text.count("\n") == 1


SMALL = LLAMA | {
    "layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000, "seq": 4096,
    "experts": {"count": 16, "top_k": 4, "ffn": 4096},
}  # fmt: skip


def small(devices: int = 16) -> Job:
    return Job(config(SMALL, train={"global_batch": 32}), devices, OWN, cluster_node=8)


@pytest.mark.wide
def test_hardly_anything_better_is_missed() -> None:
    """The best candidate is compared with every combination, including those that divide experts less without being
    much faster.
    """
    base, space = small(), SearchSpace(micro_batch=(1, 2), chunks=(1,), zero=(1, 3))
    found = search(base, H100, space=space)
    best = min(
        predict_cost(tried, H100).step_s
        for shape in shapes(base, space)
        if not first_broken_rule(shape.config, base.world)
        for zero in (1, 3)
        for mode in RECOMPUTE
        if needed_gib(tried := shape.with_keys(zero={"stage": zero}, recompute={"mode": mode}), H100)
        <= H100.device.memory_gib
    )
    assert best <= found.candidates[0].cost.step_s <= 1.02 * best
    cuts = {(shape.layout.ep, shape.layout.etp) for shape in shapes(base, space)}
    assert {(1, 1), (2, 1), (8, 1), (16, 1), (1, 2), (4, 4)} <= cuts
    assert all(16 % ep == 0 and ep & (ep - 1) == 0 for ep, _ in cuts)


def test_what_is_given_stays(mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "best.yaml"
    words = ["plan", mixture, *WHERE, "--global-batch", "256", "--out", str(out)]
    assert main([*words, "layout.ep=2", "layout.etp=1", "layout.tp=2", "--json", "--top", "96"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    assert {(one["layout"]["tp"], one["layout"]["ep"], one["layout"]["etp"]) for one in found} == {(2, 2, 1)}
    assert main(["cost", str(out), *WHERE, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["layout"], cost["step_time_s"]) == (found[0]["layout"], found[0]["step_time_s"])
    assert main([*words, "layout.pp=1", "layout.tp=1"]) == 0
    text = capsys.readouterr().out
    assert "46.7B parameters (a token uses 12.9B)" in text and "Experts are whole; " in text
    assert "Of other ways that fit, ep=" in text or "No other way fits with all else the same: ep=" in text
    assert main(["plan", mixture, *WHERE, "--global-batch", "256", "layout.ep=3"]) == 2
    assert "no layout with layout.ep=3" in capsys.readouterr().err


def test_scaling_divides_experts(mixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", mixture, "model.layers=8", "--cluster", "h100-80g-dgx", "--devices", "16"]
    assert main([*words, "--mode", "weak", "--global-batch", "64"]) == 0
    assert "ep 8, etp 1" in capsys.readouterr().out


@pytest.mark.wide
def test_the_search_of_a_large_mixture_is_quick() -> None:
    base = Job(config(DEEPSEEK_V3, train={"global_batch": 8192}), 2048, OWN, cluster_node=8)
    started = time.process_time()
    found = search(base, H100)
    assert time.process_time() - started < 20
    best = found.candidates[0].job
    assert best.layout.ep >= 8 and first_broken_rule(best.config, 2048) is None


def test_traffic_is_that_of_the_parts() -> None:
    """One block sends its rows there and back, in both directions, with their weights, and the number of rows for each
    rank.
    """
    made = job(MIXTRAL, 8, {"ep": 8, "etp": 1}, train={"global_batch": 8})
    rows, blocks = 2 * 4096, 32
    found = by_axis(by_line(stage_calls(made, 0)))["ep"]
    assert found.calls == 7 * blocks
    assert found.payload_bytes == blocks * (4 * rows * 4096 * 2 + 2 * rows * 4 + 8 * 8)
    assert found.wire_bytes == found.payload_bytes * 7 // 8
    again = replace(made, config=replace(made.config, recompute=replace(made.config.recompute, mode="full")))
    found = by_axis(by_line(stage_calls(again, 0)))["ep"]
    assert found.calls == 10 * blocks, "the rows of each expert are not counted again"
