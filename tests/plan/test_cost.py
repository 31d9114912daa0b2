"""The cost model: its formulas against the simulator, its limits, and the commands that print it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli.main import main
from meshwright.config.presets import PRESETS, RUNS
from meshwright.errors import UserError
from meshwright.models.description import GPTDescription, Stage
from meshwright.pipeline.schedules import build
from meshwright.pipeline.simulate import simulate
from meshwright.plan.cluster import FOLDER, cluster_from, known_clusters, load_cluster
from meshwright.plan.communication import predict_step
from meshwright.plan.cost import Cost, closed_seconds, predict_cost
from meshwright.plan.efficiency import collective_seconds, tile_share, wire_rate
from meshwright.plan.flops import model_flops, total_params
from meshwright.plan.job import planned, stack_asked
from meshwright.plan.memory import in_flight, largest, memory_of
from meshwright.plan.stack import EAGER, STACKS
from meshwright.plan.states import rank_memory
from meshwright.plan.workload import Parallel, Workload, best_split

A100, H100 = load_cluster("a100-80g-dgx"), load_cluster("h100-80g-dgx")
OWN = STACKS["compiled"]


def workload(name: str = "gpt3-175b", batch: int = 1536, micro: int = 1, **parallel: object) -> Workload:
    model = planned(name, as_run=False).config.model
    fields = {"world": 1024, "tp": 8, "pp": 16} | parallel
    return Workload(model, Parallel(**fields), micro, batch, recompute="full")  # type: ignore[arg-type]


def cost(w: Workload, exact: bool = True) -> Cost:
    return predict_cost(w, A100, OWN, exact)


def test_parameters_and_flops_of_known_models() -> None:
    sizes = {
        "gpt3-175b": 174.6, "gpt-neox-20b": 20.6, "bloom-176b": 176.2, "glm-130b": 130.0, "mt-nlg-530b": 529.6,
        "opt-175b": 174.6, "codegeex-13b": 12.9, "qwen-72b": 72.3, "llama2-7b": 6.74, "llama2-13b": 13.0,
        "llama2-70b": 69.0, "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9,
    }  # fmt: skip
    for name, billions in sizes.items():
        model = planned(name, as_run=False).config.model
        assert total_params(model) / 1e9 == pytest.approx(billions, rel=0.02), name
    model = planned("gpt3-175b", ["model.vocab=51200"], as_run=False).config.model
    b, s, layers, h, v = 4, 2048, 96, 12288, 51200
    by_hand = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))  # SC21's, nothing recomputed
    assert model_flops(model, b * s) == pytest.approx(by_hand, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 24), st.floats(0.1, 3.0))
def test_closed_formula_equals_the_table_for_equal_stages(pp: int, micro_batches: int, time: float) -> None:
    made = simulate(build("1f1b", pp, micro_batches), forward=time, backward=2 * time).makespan
    assert closed_seconds([3 * time] * pp, micro_batches, 1) == pytest.approx(made)
    full = -(-micro_batches // pp) * pp
    chunked = simulate(build("interleaved", pp, full, 2), forward=time, backward=2 * time).makespan
    assert closed_seconds([3 * time] * pp, full, 2) == pytest.approx(chunked)


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (3, 4), (8, 3), (16, 6), (35, 3)])
def test_the_closed_formula_is_near_the_table_where_groups_are_not_full(pp: int, chunks: int) -> None:
    for count in {pp + 1, pp + pp // 2, 2 * pp - 1, 3 * pp + pp // 2}:
        made = simulate(build("interleaved", pp, count, chunks), 1.0, 2.0, 0.0).makespan
        assert closed_seconds([3.0] * pp, count, chunks) == pytest.approx(made, rel=0.08)


def test_the_pipeline_is_timed_by_its_own_table() -> None:
    w = workload(pp=8, world=256, batch=128)
    exact, rough = cost(w), cost(w, exact=False)
    assert exact.simulated and not rough.simulated
    assert rough.step_s == pytest.approx(exact.step_s, rel=0.03)
    assert 0 < exact.bubble < 1


def test_in_flight_agrees_with_the_simulator() -> None:
    for pp, chunks in ((4, 1), (4, 2), (2, 3)):
        w = workload(pp=pp, chunks=chunks, world=8 * pp, batch=16, schedule="interleaved" if chunks > 1 else "1f1b")
        made = simulate(build(w.parallel.schedule, pp, w.micro_batches, chunks)).peak_activations
        assert [in_flight(w, rank) for rank in range(pp)] == pytest.approx(list(made))


def test_more_of_something_costs_what_it_should() -> None:
    base = workload()
    assert cost(replace(base, recompute="none")).step_s < cost(base).step_s
    assert cost(base).mfu < cost(base).hfu
    assert cost(workload(batch=3072)).step_s > 1.8 * cost(base).step_s
    slow = replace(A100, network=replace(A100.network, node_gb_s=10.0))
    assert predict_cost(base, slow, OWN).step_s > cost(base).step_s
    assert predict_cost(base, H100, OWN).step_s < cost(base).step_s
    states = [largest(base.with_parallel(zero=stage), OWN).states for stage in range(4)]
    assert states == sorted(states, reverse=True) and states[3] < states[0] / 7
    kept = [largest(replace(base, recompute=mode), OWN).activations for mode in ("none", "core", "full")]
    assert kept == sorted(kept, reverse=True)


def test_products_lose_where_hardware_loses() -> None:
    assert tile_share(8192, 8192, 8192, 1, 108) > 0.95
    assert tile_share(8192, 8192, 8191, 1, 108) < 0.2  # no 16-byte loads
    assert tile_share(64, 64, 8192, 1, 108) < 0.1  # one tile for 108 units
    assert tile_share(2048, 2048, 64, 64, 108) < tile_share(2048, 2048, 512, 64, 108)


def test_links() -> None:
    assert wire_rate(A100, 8, 8) > 5 * wire_rate(A100, 16, 1)
    one, two = (collective_seconds(A100, "all_gather", size, 8, 8) for size in (2**30, 2**31))
    assert two / one == pytest.approx(2, rel=0.02)
    both = collective_seconds(A100, "reduce_scatter", 2**30, 8, 8) + one
    assert collective_seconds(A100, "all_reduce", 2**30, 8, 8) == pytest.approx(both, rel=0.01)
    assert collective_seconds(A100, "all_reduce", 2**30, 1, 1) == 0.0
    few, many = (collective_seconds(A100, "all_gather", 1024, ranks, 8) for ranks in (8, 1024))
    assert many > 50 * few  # every hop of a ring takes its time


def test_split_counts_the_output_layer() -> None:
    model = planned("bloom-176b", as_run=False).config.model
    split = best_split(model, 12)
    assert sum(split) == 70 and split[-1] < split[0]
    assert best_split(planned("mt-nlg-530b", as_run=False).config.model, 35) == ()


@pytest.mark.parametrize("name", known_clusters())
def test_shipped_clusters_are_complete(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert {"peak", "memory", "link", "network", "efficiency"} <= set(cluster.sources)


def test_a_cluster_file_with_a_mistake(tmp_path: Path) -> None:
    raw = yaml.safe_load((FOLDER / "h100-80g-dgx.yaml").read_text(encoding="utf-8"))
    assert cluster_from(raw, "x").device.name == "H100-SXM-80GB"
    lacking = {**raw, "device": {k: v for k, v in raw["device"].items() if k != "memory_gib"}}
    with pytest.raises(UserError, match="lacks the field 'device.memory_gib'"):
        cluster_from(lacking, "mine.yaml")
    with pytest.raises(UserError, match="unknown field 'node.device'.*did you mean"):
        cluster_from({**raw, "node": {**raw["node"], "device": 4}}, "mine.yaml")
    with pytest.raises(UserError, match=r"network.latency_us=-1 must be a number above zero"):
        cluster_from({**raw, "network": {**raw["network"], "latency_us": -1}}, "mine.yaml")
    with pytest.raises(UserError, match="did you mean 'h100-80g-dgx'"):
        load_cluster("h100-80g-dg")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    assert load_cluster(str(path)).node == cluster_from(raw, "x").node


def test_cost_as_a_command_is_quick_and_needs_no_torch() -> None:
    source = (
        "import sys\nfrom meshwright.cli.main import main\n"
        "code = main(['cost', 'bloom-176b', '--json'])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    best = float("inf")
    for _ in range(3):  # the machine may be busy with others
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
        best = min(best, time.perf_counter() - started)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert best < 1.0
    assert found["step_time_s"] == pytest.approx(105, rel=0.1)  # as published
    assert set(found["comm"]) == {"tp", "dp", "pp", "embedding"}
    assert found["memory"]["needed_gib"] < found["memory"]["device_gib"]


def test_cost_tells_what_the_ledger_will_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt2-124m", "layout.tp=2", "layout.pp=2", "train.global_batch=16"]
    assert main(["cost", *words, "--cluster", "laptop", "--devices", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = predict_step(planned(words[0], words[1:]).config, 8)
    assert found["ledger"] == {axis: traffic._asdict() for axis, traffic in counted.items()}
    # The model's own bytes for a rank of a stage are those of the ledger, up to padding and small sums.
    mine = {axis: entry["wire_bytes"] for axis, entry in found["comm"].items()}
    assert mine["pp"] * 8 / 2 == pytest.approx(counted["pp"].wire_bytes, rel=0.01)  # a rank of two sends each way
    assert mine["tp"] * 8 == pytest.approx(counted["tp"].wire_bytes, rel=0.25)  # the ends' shares are not counted


@pytest.mark.parametrize("mode", ["none", "full", "every:2", "every:4"])
def test_the_wire_of_sharded_weights_is_the_ledgers(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cost", "llama3-8b", "--cluster", "h100-80g-dgx", "--devices", "8", "--layout", f"zero=3,recompute={mode}"]
    assert main([*words, "train.global_batch=64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comm"]["dp"]["wire_bytes"] == pytest.approx(found["ledger"]["dp"]["wire_bytes"] / 8, rel=0.002)


def test_the_fullest_stage_of_a_split_decides() -> None:
    words = ["pipeline.split=[2,2,2,2,18,2,2,2]", "layout.pp=8", "train.global_batch=64"]
    job = planned("llama3-8b", words, as_run=False)
    assert largest(job.workload(8, 8), OWN).pp_rank == 4


@pytest.mark.parametrize(("words", "eager"), [
    ([], False), (["model.dropout=0.1"], True), (["train.compile=false"], True), (["data.reset_attention=true"], False),
    (["model.dropout=0.1", "data.reset_attention=true", "recompute.mode=selective"], True),
])  # fmt: skip
def test_blocks_that_are_not_compiled_keep_what_they_keep(words: list[str], eager: bool) -> None:
    """Against the formulas of `meshwright memory`, which know each tensor and count uncompiled blocks."""
    given = [*words, "train.global_batch=8", "run.device=cuda", "train.micro_batch=1"]
    config = planned("llama3-8b", given, as_run=False).config
    stack = stack_asked(config, H100, None)
    assert stack.name == ("eager" if eager else "compiled") and stack_asked(config, H100, "compiled") == OWN
    assert stack_asked(config, H100, "eager") == EAGER
    assert stack_asked(config, load_cluster("laptop"), None) == OWN
    w, exact = rank_memory(config, 8, 0)
    mine, plain = (memory_of(x, EAGER, 0).activations for x in (w, replace(w, documents=False)))
    assert mine == pytest.approx(exact.activations, rel=0.02)
    assert (mine > 1.02 * plain) == (config.data.reset_attention and config.recompute.mode == "none")


def test_fp32_is_no_faster_than_fp32_units_are() -> None:
    """We leave TF32 off, so its rates are not ours."""
    for name in known_clusters():
        peak = load_cluster(name).device.peak
        assert "bf16" not in peak or peak["fp32"] < peak["bf16"] / 10 or name == "laptop"


@pytest.mark.parametrize("words", [[], ["norm=rmsnorm"], ["bias=false"], ["embedding_norm=true", "norm=rmsnorm"]])
def test_parameters_are_those_of_the_description(words: list[str]) -> None:
    model = planned("gpt2-124m", [f"model.{word}" for word in words], as_run=False).config.model
    described = sum(record.numel for record in GPTDescription(model).stage(Stage(0, 1, range(model.layers))).values())
    assert total_params(model) == described


def test_the_whole_run_is_its_factors(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cost", "gpt3-175b", "train.global_batch=1536", "--cluster", "a100-80g-dgx", "--devices", "1024"]
    assert main([*words, "--layout", "tp=8,pp=16,recompute=full", "--tokens", "300e9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["run"]
    rate = run["device_flops_per_s"] * run["devices"] * run["parallel_efficiency"]
    assert run["days"] * 86400 == pytest.approx(run["tokens"] * run["flops_per_token"] / rate)
    assert run["days"] * 86400 == pytest.approx(run["steps"] * found["step_time_s"])
    assert 20 < run["days"] < 60  # SC21 says 34 for 1024 devices
    assert run["energy_mwh"] == pytest.approx(run["device_hours"] * 400 / 1e6)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_known_runs_fit_and_are_close(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in PRESETS
    assert main(["cost", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["needed_gib"] <= found["memory"]["device_gib"]
    published = RUNS[name]["tflops"]
    if published:
        peak = load_cluster(RUNS[name]["cluster"]).device.rate("bf16") / 1e12
        assert found["hfu"] * peak == pytest.approx(published, rel=0.25)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cost", "gpt3-175"], "no preset 'gpt3-175' (did you mean 'gpt3-175b'?)"),
        (["cost", "gpt3-175b"], "give --cluster"),
        (["cost", "gpt3-175b", "--cluster", "a100-80g-dgx"], "give --devices"),
        (["cost", "gpt3-175b", "--cluster", "laptop", "--devices", "12", "layout.tp=8"], "12 devices are not"),
        (["cost", "bloom-176b", "--layout", "tb=8"], "--layout has 'tb=8'"),
        (["cost", "bloom-176b", "--layout", "dp=8"], "follows from the number of devices"),
        (["cost", "bloom-176b", "zero.stage=7"], "zero.stage=7 is not one of 0, 1, 2, 3"),
        (["cost", "bloom-176b", "recompute.mode=some"], "recompute.mode=some is not one of"),
        (["cost", "bloom-176b", "--tokens", "many"], "--tokens many must be a number"),
        (["cost", "bloom-176b", "train.global_batch=7"], "not a multiple of dp x micro_batch"),
        (["cost", "bloom-176b", "--stack", "fast"], "there is no stack 'fast'"),
        (["cost", "nowhere.yaml"], "there is no config file 'nowhere.yaml'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    text = capsys.readouterr().err
    assert sentence in text and text.count("\n") == 1 and "Traceback" not in text
