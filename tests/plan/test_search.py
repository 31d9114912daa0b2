"""The search, the report and the commands around them: plan, memory, simulate, scaling."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.config.memory import RecomputeConfig
from meshwright.plan.cluster import load_cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import Job, job_of
from meshwright.plan.memory import needed_gib, rank_memory
from meshwright.plan.rank import MEMORY_KINDS
from meshwright.plan.search import RECOMPUTE, SearchSpace, search, shapes
from meshwright.plan.stack import STACKS
from meshwright.plan.target import target_of
from meshwright.plan.whatif import parse_change, step_of, step_spans
from meshwright.show.chart import Chart, svg
from meshwright.spec.schedule.trace import trace_json
from tests.support.page_data import page_data

H100, OWN = load_cluster("h100-80g-dgx"), STACKS["compiled"]


def job(devices: int, batch: int) -> Job:
    config = target_of("llama2-7b", [f"train.global_batch={batch}"], as_run=False).config
    return Job(config, devices, OWN, cluster_node=8)


def test_nothing_better_is_missed() -> None:
    """The best candidate equals the best of all combinations, timed one by one without the search's shortcuts."""
    base = job(8, 8)
    found = search(base, H100)
    best = min(
        predict_cost(tried, H100).step_s
        for shape in shapes(base, SearchSpace())
        for zero in (range(4) if shape.layout.dp > 1 else (0,))
        for mode in RECOMPUTE
        if needed_gib(tried := shape.with_keys(zero={"stage": zero}, recompute={"mode": mode}), H100)
        <= H100.device.memory_gib
    )
    assert found.candidates[0].cost.step_s == pytest.approx(best)
    assert all(candidate.memory_gib <= H100.device.memory_gib for candidate in found.candidates)
    assert all(a.cost.step_s <= b.cost.step_s for a, b in pairwise(found.candidates))


def test_every_shape_is_a_layout() -> None:
    seen = set()
    for shape in shapes(job(48, 96), SearchSpace()):
        c, layout = shape.config, shape.layout
        assert (layout.tp, layout.pp, layout.cp) == (c.layout.tp, c.layout.pp, c.layout.cp)
        assert layout.tp * layout.pp * layout.cp * layout.dp == 48 and 96 % (layout.dp * c.train.micro_batch) == 0
        assert c.model.heads % layout.tp == 0 and layout.world == 48
        seen.add((layout.tp, layout.pp))
    assert {(1, 1), (2, 3), (8, 6), (4, 12)} <= seen


@pytest.mark.wide
def test_plan_writes_a_config_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    words = ["plan", "llama2-13b", "--cluster", "h100-80g-dgx", "--devices", "32", "--global-batch", "128"]
    assert main([*words, "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"layout", "step_time_s", "tokens_per_s_per_device", "mfu", "memory_gib", "bubble", "comm_s"}
    assert keys <= set(found["best"]) and found["best"] == found["candidates"][0]
    raw = yaml.safe_load(out.read_text(encoding="utf-8"))
    assert raw["layout"]["tp"] == found["best"]["layout"]["tp"]
    trainable = {key: value for key, value in raw.items() if key not in ("zero", "recompute")}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(trainable), encoding="utf-8")
    assert load_config(path).model.layers == 40
    assert main(["cost", str(out), "--cluster", "h100-80g-dgx", "--devices", "32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(found["best"]["step_time_s"])


@pytest.mark.wide
def test_a_long_sequence_finds_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight devices share the sequence. On two devices blocks are recomputed from host memory, and MLPs run in
    pieces.
    """
    words = ["plan", "llama3-8b", "--seq", "131072", "--cluster", "h100-80g-dgx", "--json", "--top", "1"]
    assert main([*words, "--devices", "8", "--global-batch", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["layout"]["cp"] > 1
    out = str(tmp_path / "plan.yaml")
    assert main([*words, "--devices", "2", "--global-batch", "2", "--out", out]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert (best["layout"]["recompute"], best["layout"]["offload"], best["layout"]["pieces"]) == ("full", True, 8)
    rows = 131072 // best["layout"]["tp"]
    assert best["rank"]["memory"]["offloaded"] == 31 * rows * 4096 * 2  # The last block's input stays.
    assert load_config(out).recompute == RecomputeConfig("full", True, 8)


@pytest.mark.wide
def test_the_largest_search_is_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.process_time()
    words = ["plan", "mt-nlg-530b", "--cluster", "a100-80g-dgx", "--devices", "3360", "--global-batch", "1920"]
    assert main([*words, "--json", "--out", str(tmp_path / "x.yaml")]) == 0
    assert time.process_time() - started < 10
    found = json.loads(capsys.readouterr().out)
    assert found["published"]["layout"]["pp"] == 35
    assert found["best"]["step_time_s"] <= found["published"]["step_time_s"]


@pytest.mark.wide
def test_what_fits_nowhere_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3-70b", "--cluster", "a100-40g-dgx", "--devices", "8", "--global-batch", "16", "--json"]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert "fits nowhere" in text and "the nearest layout (tp=8" in text and "GiB too much" in text
    assert re.search(r"or \d+ of these devices", text)
    assert main(["plan", "llama2-7b", "--cluster", "a100-40g-dgx", "--devices", "37", "--global-batch", "16"]) == 2
    assert "no layout divides 37 devices" in capsys.readouterr().err
    assert main(["plan", "llama2-7b", "--cluster", "a100-40g-dgx", "--devices", "0", "--global-batch", "16"]) == 2
    assert "give --devices" in capsys.readouterr().err


def zero_paper(stage: int, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    shape = ["model.layers=36", "model.hidden=4096", "model.heads=32", "model.vocab=51200", "model.ffn=16384"]
    precision = ["train.precision=fp16", "train.grad_dtype=fp16", "train.global_batch=64", f"zero.stage={stage}"]
    assert main(["memory", "gpt3-175b", *shape, *precision, "--world", "64", "--json"]) == 0
    found: dict[str, int] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("stage", "gb"), [(0, 119.5), (1, 31.3), (2, 16.6), (3, 1.87)])
def test_the_zero_papers_example(stage: int, gb: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = zero_paper(stage, capsys)
    states = sum(found[kind] for kind in ("parameters", "gradients", "master", "optimizer"))
    assert states / 1e9 == pytest.approx(gb, rel=0.01)
    assert all(isinstance(found[kind], int) for kind in MEMORY_KINDS)
    assert found["peak"] >= states and found["rank"] == 0


def test_memory_of_a_given_rank(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "gpt3-175b", "layout.tp=8", "layout.pp=16", "train.global_batch=1536"]
    words += ["--world", "1024", "--json"]
    found = []
    for rank in ("0", "512", "1023"):
        assert main([*words, "--rank", rank]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["parameters"] > found[1]["parameters"] < found[2]["parameters"]
    assert main(words) == 0
    largest = json.loads(capsys.readouterr().out)
    assert largest["peak"] == max(largest["peak"], *(entry["peak"] for entry in found))


def test_what_if() -> None:
    cluster, config = load_cluster("a100-80g-dgx"), target_of("bloom-176b").config
    bloom = job_of(config, 384, STACKS["unfused-deepspeed"], cluster_node=8)
    plain = step_of(bloom, cluster)
    assert plain.seconds == pytest.approx(predict_cost(bloom, cluster).step_s)
    slow = step_of(bloom, cluster, [parse_change("slow-rank=3:0.5")])
    assert slow.seconds > 1.5 * plain.seconds
    for text in ("slow-link=0.25", "slow-network=0.25"):
        assert step_of(bloom, cluster, [parse_change(text)]).seconds > plain.seconds
    fewer = step_of(bloom, cluster, [parse_change("fewer-nodes=6")])
    assert fewer.cost.job.world == 336 and fewer.tokens_per_s < plain.tokens_per_s


def test_a_trace_has_perfettos_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, drawing = tmp_path / "step.json", tmp_path / "step.svg"
    assert main(["simulate", "bloom-176b", "--trace", str(path), "--svg", str(drawing), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["steps"][0]
    document = json.loads(path.read_text(encoding="utf-8"))
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(event) and event["ph"] in ("X", "M")
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    assert {event["pid"] for event in complete} == set(range(12))
    computes = [event for event in complete if event["cat"] == "compute"]
    assert len(computes) == 2 * 12 * 128
    last = max(event["ts"] + event["dur"] for event in computes)
    assert last == pytest.approx(1e6 * printed["makespan_s"])
    for rank in range(12):  # A rank computes one thing at a time.
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in computes if e["pid"] == rank)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(mine))
    assert drawing.read_text(encoding="utf-8").startswith("<svg")


def test_the_makespan_is_the_closed_formulas_where_there_is_one() -> None:
    config = target_of("gpt3-175b", ["layout.tp=8", "layout.pp=8", "train.global_batch=32"], as_run=False).config
    made = step_of(job_of(config, 64, STACKS["fused-overlap"], cluster_node=8), load_cluster("a100-80g-dgx"))
    assert json.loads(trace_json(step_spans(made)))["traceEvents"]
    f, b, _ = (max(x) for x in zip(*made.cost.chunk_times[3], strict=True))
    assert made.timeline.makespan >= (32 + 8 - 1) * (f + b) * 0.999


BAD = ["slow-rank=0.5", "slow-rank=99:0.5", "slow-link=0", "slow-link=x", "fewer-nodes=1.5", "hot"]


@pytest.mark.parametrize("text", BAD)
def test_bad_changes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "bloom-176b", "--what-if", text]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.wide
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "curve.svg"
    words = ["scaling", "llama2-7b", "--cluster", "h100-80g-dgx", "--devices", "8:16", "--json"]
    page = tmp_path / "scaling.html"
    assert main([*words, "--svg", str(drawing), "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    shown = page_data(page)
    assert {mode: len(points) for mode, points in shown["modes"].items()} == {"weak": 8, "strong": 8}
    assert shown["modes"]["weak"][0]["tokens_per_s"] == found["weak"][0]["tokens_per_s"]
    assert (
        shown["facts"]["command"].startswith("meshwright") and shown["facts"]["weak scaling"] == "global batch 8 to 16"
    )
    assert set(found) == {"weak", "strong"}
    for points in found.values():
        best = {p["devices"]: p["tokens_per_s"] for p in points if p["way"] == "hybrid"}
        assert best[8] < best[16]
        for p in points:
            if p["tokens_per_s"] is not None:
                assert p["tokens_per_s"] <= best[p["devices"]] * 1.0001 and 0 <= p["comm_share"] < 1
    assert drawing.read_text(encoding="utf-8").startswith("<svg")
    assert main([*words, "--svg", str(tmp_path / "curve.png")]) == 2
    assert "charts are written as SVG, so name it" in capsys.readouterr().err
    assert main(["scaling", "llama2-7b", "--cluster", "h100-80g-dgx", "--devices", "64:8"]) == 2
    assert main(["scaling", "llama2-7b", "--cluster", "h100-80g-dgx", "layout.tp=8"]) == 2
    assert "is no range" in capsys.readouterr().err


def test_charts_of_little() -> None:
    chart = Chart("one point", "x", "y", {"a": [(8.0, 3.0)]})
    assert "<circle" in svg(chart)
    words = re.findall(r">([^<>]+)</text>", svg(Chart("t", "x", "y", {"a": [(1024.0, 900.0), (16384.0, 4e6)]})))
    assert words == ["t", "x", "y", "1.02k", "16.4k", "1k", "3k", "10k", "30k", "100k", "300k", "1M", "3M", "a"]
    words = re.findall(r">([^<>]+)</text>", svg(Chart("t", "x", "y", {"a": [(30.0, 6.5), (300.0, 4.5)]})))
    assert words == ["t", "x", "y", "30", "300", "5", "6", "a"], "a range without powers of ten has marks"


@pytest.mark.parametrize(
    "words", [[], pytest.param(["zero.offload.optimizer=cpu", "optimizer.state_dtype=bf16"], marks=pytest.mark.wide)]
)
@pytest.mark.wide
def test_the_config_that_plan_writes_is_what_it_meant(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds even if the given config had another layout, and for keys that no layout has."""
    asked, out = tmp_path / "asked.yaml", tmp_path / "best.yaml"
    asked.write_text(
        "model: {preset: llama3-8b, seq: 4096}\ndata: {prefixes: [a, b]}\nlayout: {tp: 4, pp: 2}\n"
        "recompute: {mode: full}\nzero: {stage: 3}\ntrain: {precision: bf16, clip: 0.5}\n"
    )
    where = ["--cluster", "h100-80g-dgx", "--devices", "64"]
    assert main(["plan", str(asked), *words, *where, "--global-batch", "64", "--out", str(out), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["layout"]["recompute"] == "none", "so that something must not be carried over"
    assert main(["cost", str(out), *where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["step_time_s"]) == (best["layout"], best["step_time_s"])
    assert found["memory"]["needed_gib"] == best["memory_gib"]
    config = load_config(str(out))
    assert (config.model.seq, config.train.clip, config.data.prefixes) == (4096, 0.5, ("a", "b"))


def test_states_divided_on_nodes_are_those_of_the_ranks_there() -> None:
    """This also holds if stages, rather than copies, are next to each other on a node."""
    words = ["layout.pp=2", "zero.stage=1", "zero.shard_group=node", "train.global_batch=64"]
    for order, shards in (("tp-cp-ep-dp-pp", 8), ("tp-pp-cp-ep-dp", 4)):
        target = target_of("llama3-8b", [*words, f"layout.order={order}", "layout.node_size=8"], as_run=False)
        divided = job_of(target.config, 32)
        memory = rank_memory(divided, 0)
        assert divided.sharding_over() == (1, shards, 16 // shards)
        assert memory.optimizer == 4 * memory.parameters // shards  # Two moments of 4 bytes for weights of 2.
