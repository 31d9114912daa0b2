"""The cost model: its formulas against the simulator, its limits, and the commands that print it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.data.blanks import BlankOptions, BlankStream
from meshwright.data.masked import DocumentChunk
from meshwright.errors import UserError
from meshwright.plan.activations import in_flight, micro_batches_to_steady_state
from meshwright.plan.cluster import FOLDER, cluster_from, known_clusters, load_cluster
from meshwright.plan.communication import Traffic, by_axis, predict_rank, predict_step
from meshwright.plan.cost import Cost, predict_cost
from meshwright.plan.efficiency import collective_seconds, tile_share, wire_rate
from meshwright.plan.flops import best_split, model_flops, unit_work
from meshwright.plan.job import Job, job_of
from meshwright.plan.memory import largest, rank_memory
from meshwright.plan.stack import CPU, EAGER, STACKS
from meshwright.plan.target import stack_for, target_of
from meshwright.spec.layout.pieces import pieces
from meshwright.spec.model.description import describe
from meshwright.spec.model.gpt import AttentionPart
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.model.part import SINGLE_RANK, Kernels
from meshwright.spec.schedule.kinds import KINDS, build, training_kinds
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.schedule.table import Op, PhaseTimes
from tests.support.waiting import HANG_S

A100, H100 = load_cluster("a100-80g-dgx"), load_cluster("h100-80g-dgx")
OWN = STACKS["compiled"]


def job(world: int = 1024, batch: int = 1536, **layout: int) -> Job:
    """Return a job that trains GPT-3 with full recomputation, by default with tp=8 and pp=16."""
    made = Job(target_of("gpt3-175b", as_run=False).config, world, OWN, cluster_node=8)
    return made.with_keys(
        layout={"tp": 8, "pp": 16} | layout, train={"global_batch": batch}, recompute={"mode": "full"},
        pipeline={"schedule": "interleaved" if layout.get("chunks", 1) > 1 else "1f1b"},
    )  # fmt: skip


def cost(of: Job, exact: bool = True) -> Cost:
    return predict_cost(of, A100, exact)


def test_parameters_and_flops_of_known_models() -> None:
    sizes = {
        "gpt3-175b": 174.6, "gpt-neox-20b": 20.6, "bloom-176b": 176.2, "glm-130b": 130.0, "mt-nlg-530b": 529.6,
        "opt-175b": 174.6, "codegeex-13b": 12.9, "qwen-72b": 72.3, "llama2-7b": 6.74, "llama2-13b": 13.0,
        "llama2-70b": 69.0, "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9,
    }  # fmt: skip
    for name, billions in sizes.items():
        model = target_of(name, as_run=False).config.model
        assert parameter_count(describe(model)) / 1e9 == pytest.approx(billions, rel=0.02), name
    model = target_of("gpt3-175b", ["model.vocab=51200"], as_run=False).config.model
    b, s, layers, h, v = 4, 2048, 96, 12288, 51200
    # The formula of the SC21 paper, without recomputation.
    by_hand = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops(model, b * s) == pytest.approx(by_hand, rel=1e-9)


def closed(kind: str, ranks: list[PhaseTimes], micro_batches: int, chunks: int = 1) -> float:
    formula = KINDS[kind].seconds
    assert formula is not None
    return formula(ranks, micro_batches, chunks)


def simulated(kind: str, ranks: list[PhaseTimes], micro_batches: int) -> float:
    """Return the makespan of a kind's table, with a rank's time divided evenly over its chunks."""
    chunks = KINDS[kind].chunks[0]

    def of(phase: int) -> Callable[[int, int], float]:
        return lambda rank, _: ranks[rank][phase] / chunks

    return simulate(build(kind, len(ranks), micro_batches, chunks), of(0), of(1), 0.0, of(2)).makespan


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(1, 24), st.floats(0.1, 3.0))
def test_closed_formula_equals_the_table_for_equal_stages(pp: int, micro_batches: int, time: float) -> None:
    full = -(-micro_batches // pp) * pp
    cases = [(kind, micro_batches, 1) for kind in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
    cases += [("interleaved", full, 2), ("zb-v", micro_batches + 2 * pp, 2)]
    assert {kind for kind, _, _ in cases} | {"v-half", "dualpipev"} == set(training_kinds())
    for kind, count, chunks in cases:
        made = simulate(build(kind, pp, count, chunks), forward=time, backward=2 * time).makespan
        assert closed(kind, [PhaseTimes(time, 2 * time, time)] * pp, count, chunks) == pytest.approx(made), kind


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb-h1", "zb-v", "dualpipev"])
@pytest.mark.parametrize("weights", [0.0, 0.5, 0.9])
def test_closed_formulas_are_near_the_tables_for_unequal_stages(kind: str, weights: float) -> None:
    for pp, count in ((2, 3), (4, 4), (4, 9), (8, 24)):
        ends = PhaseTimes(1.2, 2.5, 1.0)
        ranks = [ends, *[PhaseTimes(1.0, 2.0, weights)] * (pp - 2), ends]
        made = simulated(kind, ranks, count)
        assert closed(kind, ranks, count, KINDS[kind].chunks[0]) == pytest.approx(made, rel=0.12), (pp, count)


@pytest.mark.parametrize("weights", [0.5, 0.9, 1.0])
def test_closed_formulas_of_schedules_with_gaps_are_near_the_tables(weights: float) -> None:
    """Check ZB-H2 and V-Half with equal ranks, since their gaps differ most between unequal ones."""
    for kind, (pp, count) in product(("zb-h2", "v-half"), ((2, 4), (4, 9), (8, 24))):
        ranks = [PhaseTimes(1.0, 2.0, weights)] * pp
        found = closed(kind, ranks, count, KINDS[kind].chunks[0])
        assert found == pytest.approx(simulated(kind, ranks, count), rel=0.05), (kind, pp, count)


@pytest.mark.parametrize(
    ("pp", "chunks"), [(2, 2), (3, 4), (8, 3), (16, 6), pytest.param(35, 3, marks=pytest.mark.wide)]
)
def test_the_closed_formula_is_near_the_table_where_groups_are_not_full(pp: int, chunks: int) -> None:
    for count in {pp + 1, pp + pp // 2, 2 * pp - 1, 3 * pp + pp // 2}:
        made = simulate(build("interleaved", pp, count, chunks), 1.0, 2.0, 0.0).makespan
        assert closed("interleaved", [PhaseTimes(1.0, 2.0)] * pp, count, chunks) == pytest.approx(made, rel=0.08)


def test_the_pipeline_is_timed_by_its_own_table() -> None:
    of = job(pp=8, world=256, batch=128)
    exact, rough = cost(of), cost(of, exact=False)
    assert exact.simulated and not rough.simulated
    assert rough.step_s == pytest.approx(exact.step_s, rel=0.03)
    assert 0 < exact.bubble < 1


def test_in_flight_agrees_with_the_simulator() -> None:
    kinds = (("1f1b", 4, 1), ("zb-h1", 4, 1), ("zb-v", 4, 2), ("interleaved", 4, 2), ("interleaved", 2, 3))
    for kind, pp, chunks in kinds:
        of = job(pp=pp, chunks=chunks, world=8 * pp, batch=16).with_keys(pipeline={"schedule": kind})
        made = simulate(build(kind, pp, of.micro_batches, chunks)).peak_activations
        for micro_batches in (of.micro_batches, micro_batches_to_steady_state(of)):
            for rank in range(pp):
                places = in_flight(kind, pp, micro_batches, chunks, rank)
                ended = [flying for (op, _), found in places.items() if op is Op.FORWARD for flying in found]
                assert max(sum(activations) + sum(factors) for activations, factors in ended) == chunks * made[rank]


def test_more_of_something_costs_what_it_should() -> None:
    base = job()
    assert cost(base.with_keys(recompute={"mode": "none"})).step_s < cost(base).step_s
    assert cost(base).mfu < cost(base).hfu
    assert cost(job(batch=3072)).step_s > 1.8 * cost(base).step_s
    slow = replace(A100, network=replace(A100.network, node_gb_s=10.0))
    assert predict_cost(base, slow).step_s > cost(base).step_s
    assert predict_cost(base, H100).step_s < cost(base).step_s
    states = [largest(base.with_keys(zero={"stage": stage})).states for stage in range(4)]
    assert states == sorted(states, reverse=True) and states[3] < states[0] / 7
    modes = ("none", "selective", "full")
    kept = [largest(base.with_keys(recompute={"mode": mode})).activations for mode in modes]
    assert kept == sorted(kept, reverse=True)


def test_products_lose_where_hardware_loses() -> None:
    assert tile_share(8192, 8192, 8192, 1, 108) > 0.95
    assert tile_share(8192, 8192, 8191, 1, 108) < 0.4  # An odd depth rules out 16-byte loads.
    assert tile_share(2048, 2048, 126, 64, 108) < 0.1
    assert tile_share(64, 64, 8192, 1, 108) < 0.1  # One tile for 108 units.
    assert tile_share(2048, 2048, 64, 64, 108) < tile_share(2048, 2048, 512, 64, 108)


def test_links() -> None:
    assert wire_rate(A100, 8, 8) > 5 * wire_rate(A100, 16, 1)
    one, two = (collective_seconds(A100, "all_gather", size, 8, 8) for size in (2**30, 2**31))
    assert two / one == pytest.approx(2, rel=0.02)
    both = collective_seconds(A100, "reduce_scatter", 2**30, 8, 8) + one
    assert collective_seconds(A100, "all_reduce", 2**30, 8, 8) == pytest.approx(both, rel=0.01)
    assert collective_seconds(A100, "all_reduce", 2**30, 1, 1) == 0.0
    few, many = (collective_seconds(A100, "all_gather", 1024, ranks, 8) for ranks in (8, 1024))
    # Every hop of a ring adds its latency.
    assert many > 50 * few


def test_split_counts_the_output_layer() -> None:
    model = target_of("bloom-176b", as_run=False).config.model
    split = best_split(model, 12)
    assert sum(split) == 70 and split[-1] < split[0]
    assert best_split(target_of("mt-nlg-530b", as_run=False).config.model, 35) == ()


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
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=HANG_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # CPU seconds hardly depend on how busy the machine is. An idle one needs a third of this limit.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    assert found["step_time_s"] == pytest.approx(105, rel=0.1)  # The published time.
    assert set(found["comm"]) == {"tp", "dp", "pp", "embedding", "world"}
    assert found["memory"]["needed_gib"] < found["memory"]["device_gib"]


def test_cost_tells_what_the_ledger_will_count(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt2-124m", "layout.tp=2", "layout.pp=2", "train.global_batch=16"]
    assert main(["cost", *words, "--cluster", "laptop", "--devices", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = target_of(words[0], words[1:]).config
    counted = predict_step(config, 8)
    assert found["ledger"] == {axis: traffic._asdict() for axis, traffic in counted.items()}
    rank = predict_rank(config, 8, found["rank"]["rank"])
    assert {axis: {key: entry[key] for key in Traffic._fields} for axis, entry in found["comm"].items()} == {
        axis: traffic._asdict() for axis, traffic in by_axis(rank).items()
    }  # fmt: skip
    mine = {axis: entry["wire_bytes"] for axis, entry in found["comm"].items()}
    assert mine["pp"] * 8 == counted["pp"].wire_bytes  # A rank of two stages sends one way, to the other stage.
    assert found["rank"]["comm"] == {axis: traffic._asdict() for axis, traffic in by_axis(rank).items()}


def test_the_fullest_stage_of_a_split_decides() -> None:
    words = ["pipeline.split=[2,2,2,2,18,2,2,2]", "layout.pp=8", "train.global_batch=64"]
    assert largest(job_of(target_of("llama3-8b", words, as_run=False).config, 8, OWN)).pp_rank == 4


@pytest.mark.parametrize(("words", "eager"), [
    ([], False), (["model.dropout=0.1"], True), (["train.compile=false"], True), (["data.reset_attention=true"], False),
    (["model.dropout=0.1", "data.reset_attention=true", "recompute.mode=selective"], True),
    (["model.dropout=0.1", "data.reset_attention=true"], True),
])  # fmt: skip
def test_blocks_that_are_not_compiled_keep_what_they_keep(words: list[str], eager: bool) -> None:
    """Uncompiled blocks save more activations than compiled ones. Documents add nothing to that, with or without
    dropout.
    """
    given = [*words, "train.global_batch=8", "run.device=cuda", "train.micro_batch=1"]
    config = target_of("llama3-8b", given, as_run=False).config
    stack = stack_for(config, H100, None)
    assert stack.name == ("eager" if eager else "compiled") and stack_for(config, H100, "compiled") == OWN
    assert stack_for(config, H100, "eager") == EAGER
    assert stack_for(config, load_cluster("laptop"), None) == CPU
    plainly = replace(config, data=replace(config.data, reset_attention=False))
    mine, plain = (rank_memory(job_of(c, 8, EAGER), 0).activations for c in (config, plainly))
    assert mine <= 1.02 * plain
    assert rank_memory(job_of(config, 8), 0).activations == rank_memory(job_of(config, 8, stack), 0).activations
    assert mine > rank_memory(job_of(config, 8, OWN), 0).activations


def test_fp32_is_no_faster_than_fp32_units_are() -> None:
    """Meshwright leaves TF32 off, so its rates (half of bf16's) do not apply. GeForce cards are as fast without it."""
    for name in known_clusters():
        peak = load_cluster(name).device.peak
        assert "bf16" not in peak or peak["fp32"] < peak["bf16"] / 2 or name.startswith(("rtx", "laptop")), name


# The smallest GPT-2. Each of its layers has 13 vectors of the model's width in norms and biases.
NORMS, LAYERS, WIDTH = 2 * 12 + 1, 12, 768


@pytest.mark.parametrize(("words", "more"), [
    ([], 0), (["norm=rmsnorm"], -NORMS * WIDTH), (["bias=false"], -(9 * LAYERS + NORMS) * WIDTH),
    (["embedding_norm=true", "norm=rmsnorm"], (1 - NORMS) * WIDTH),
])  # fmt: skip
def test_parameters_by_hand(words: list[str], more: int) -> None:
    model = target_of("gpt2-124m", [f"model.{word}" for word in words], as_run=False).config.model
    plain = (50257 + 1024) * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH
    assert parameter_count(describe(model)) == plain + more


def test_the_whole_run_is_its_factors(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cost", "gpt3-175b", "train.global_batch=1536", "--cluster", "a100-80g-dgx", "--devices", "1024"]
    assert main([*words, "--layout", "tp=8,pp=16,recompute=full", "--tokens", "300e9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = found["run"]
    rate = run["device_flops_per_s"] * run["devices"] * run["parallel_efficiency"]
    assert run["days"] * 86400 == pytest.approx(run["tokens"] * run["flops_per_token"] / rate)
    assert run["days"] * 86400 == pytest.approx(run["steps"] * found["step_time_s"])
    assert 20 < run["days"] < 60  # The SC21 paper says 34 days for 1024 devices.
    assert run["energy_mwh"] == pytest.approx(run["device_hours"] * 400 / 1e6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["cost", "gpt3-175"], "no preset 'gpt3-175' (did you mean 'gpt3-175b'?)"),
        (["cost", "gpt2-355m"], "give --cluster"),
        (["cost", "gpt3-175b", "--cluster", "a100-80g-dgx"], "give --devices"),
        (["cost", "gpt3-175b", "--cluster", "laptop", "--devices", "12", "layout.tp=8"], "12 devices are not"),
        (["cost", "bloom-176b", "--layout", "tb=8"], "--layout has 'tb=8'"),
        (["cost", "bloom-176b", "--layout", "dp=8"], "follows from the number of devices"),
        (["cost", "bloom-176b", "zero.stage=7"], "zero.stage=7 is not one of 0, 1, 2, 3"),
        (["cost", "bloom-176b", "recompute.mode=some"], "recompute.mode=some is not one of"),
        (["cost", "bloom-176b", "--tokens", "many"], "--tokens many must be a number"),
        (["cost", "bloom-176b", "train.global_batch=7"], "7 can't be divided over 8 data-parallel ranks"),
        (["cost", "bloom-176b", "--stack", "fast"], "there is no stack 'fast'"),
        (["cost", "nowhere.yaml"], "there is no config file 'nowhere.yaml'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    text = capsys.readouterr().err
    assert sentence in text and text.count("\n") == 1 and "Traceback" not in text


def test_attention_counts_the_pairs_that_are_seen() -> None:
    """A window counts the pairs in the tiles that kernels compute. A diagonal tile counts half."""
    model = target_of("llama2-7b", ["model.window=1000", "model.window_pattern=[1,0]"], as_run=False).config.model
    windowed, full = (part for block in describe(model).blocks[:2] for _, _, part in block.parts
                      if isinstance(part, AttentionPart))  # fmt: skip
    assert (windowed.window, full.window) == (1000, 0)
    rows = np.arange(model.seq)
    for part in (windowed, full):
        counted = sum(piece.pairs for piece in pieces(rows, rows, window=part.window) or ())
        assert part.pairs(model.seq) == counted - (part.window or model.seq) / 2
    plain = replace(model, window=0, window_pattern=())
    left_out = 12 * model.hidden * (full.pairs(4096) - windowed.pairs(4096)) * model.layers / 2
    assert model_flops(plain, 4096, causal=True) - model_flops(model, 4096, causal=True) == pytest.approx(left_out)


def test_a_prefix_is_seen_by_all() -> None:
    """The config's prefix share is the mean over samples as they are drawn, relative to the pairs of causal
    attention.
    """
    config = target_of("glm-130b", as_run=False).config
    blanks = replace(config.data.blanks, instructions=())
    options = BlankOptions(2048, blanks.short, blanks.share, blanks.mean, blanks.least, (1, 2, 3, 4, 5))
    text = DocumentChunk(np.arange(2048 - options.added_tokens), np.zeros(0, np.int64))
    source = SimpleNamespace(sample=lambda n: text)
    stream, shares = BlankStream(source, options, 1, "train", None), []  # type: ignore[arg-type]
    for n in range(400):
        segments = stream.sample(n)["segments"]
        shares.append((segments == 0).sum() / (segments < 2).sum())
    assert blanks.source_square == pytest.approx(float(np.mean(np.square(shares))), abs=0.03)
    seen = Job(config, 768, OWN, cluster_node=8).batch
    assert seen.prefix == blanks.source_square
    core = [unit_work(describe(config.model).blocks[0], SINGLE_RANK, batch, Kernels()).attention_flops
            for batch in (seen, replace(seen, prefix=0.0))]  # fmt: skip
    assert core[0] / core[1] == pytest.approx(1.0 + seen.prefix)


def test_an_unpadded_vocabulary_costs_what_it_was_seen_to_cost() -> None:
    """The step of a 124M-parameter GPT takes about a quarter longer on an A100, instead of several times as long."""
    seconds = []
    for vocab in (50257, 50304):
        config = load_config("gpt2-124m", [f"model.vocab={vocab}"])
        seconds.append(predict_cost(Job(config, 1, OWN), A100).step_s)
    assert 1.15 < seconds[0] / seconds[1] < 1.4
