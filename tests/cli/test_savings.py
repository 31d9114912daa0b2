"""Tests of `meshwright comm savings`: measured and predicted figures in one table, and times computed by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config.comm import EmulateConfig, LinkConfig
from meshwright.config.load import config_from
from meshwright.engine.sharding.compression.sparse import TopKCodec
from meshwright.lab.pick import algorithm_seconds, fastest, links_of
from meshwright.lab.savings import TechniqueRun, making_work
from meshwright.lab.techniques import planned_figures, techniques, with_links
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.efficiency import ClusterNetwork
from meshwright.plan.job import job_of
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

CONFIG = """
model: {layers: 2, hidden: 64, heads: 4, vocab: 128, seq: 32}
data: {prefixes: [made]}
train: {micro_batch: 1, global_batch: 4, precision: fp32}
comm: {emulate: {link_gb_s: 0.002}}
run: {device: cpu}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "c.yaml").write_text(CONFIG)
    return str(tmp_path / "c.yaml")


@pytest.mark.wide
def test_measured_beside_predicted(config: str, tmp_path: Path) -> None:
    words = ["comm", "savings", config, "--nproc", "2", "--steps", "3", "--json", "--svg", str(tmp_path / "s.svg")]
    run = subprocess.run([sys.executable, "-m", "meshwright", *words], capture_output=True, text=True, check=True)
    result = json.loads(run.stdout)
    assert "emulated links: 0.002 GB/s" in result["title"]
    rows = {row["name"]: row for row in result["techniques"]}
    assert {"as configured", "overlap off", "gather to one", "own ring", "reduce int8", "4 local steps"} <= rows.keys()
    for name, row in rows.items():
        if name not in ("gather to one", "4 local steps", "16 local steps"):
            assert row["measured"]["sent"] == pytest.approx(row["predicted"]["sent"]), name
    base, small = rows["as configured"], rows["reduce topk"]
    assert base["measured"]["step_s"] == pytest.approx(base["predicted"]["step_s"], rel=0.4)
    assert small["measured"]["step_s"] < 0.8 * base["measured"]["step_s"]
    drawn = (tmp_path / "s.svg").read_text()
    assert "reduce int8" in drawn and "emulated" in drawn


def test_predicted_for_a_cluster(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["comm", "savings", "llama3-8b", "train.global_batch=64", "zero.stage=1"]
    assert main([*words, "--cluster", "h100-80g-dgx", "--devices", "16"]) == 0
    out = capsys.readouterr().out
    assert "own hierarchical" in out and "reduce powersgd" in out and "time saved" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "needs a config"),
        (["CONFIG"], "give --nproc N to measure"),
        (["CONFIG", "--nproc", "1"], "leaves nobody to talk to"),
        (["CONFIG", "--nproc", "2", "--devices", "4"], "give one of the two"),
        (["CONFIG", "--nproc", "2", "comm.emulate.network_gb_s=1"], "give layout.node_size"),
        (["CONFIG", "--nproc", "2", "comm.emulate.link_gb_s=-1"], "link_gb_s"),
    ],
)
def test_mistakes(words: list[str], sentence: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "savings", *(config if word == "CONFIG" else word for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def seconds(cluster: Cluster, kind: str, size: int, on_node: int, **sum_: Any) -> float:
    links = ClusterNetwork(cluster).links(size, on_node)
    return algorithm_seconds(links, kind, size=size, on_node=on_node, **sum_)


def test_seconds_of_algorithms_by_hand() -> None:
    """An all-reduce of 80 MB on two nodes of four ranks sends a known share through a node's network adapters.

    This share is 2 x 7/8 for a ring and 2 x 1/2 for the hierarchical algorithm.
    """
    links = EmulateConfig(link_gb_s=1e3, network_gb_s=1.0, latency_us=1e-3)
    cluster = with_links(load_cluster("laptop"), links, 4)
    at = {"op": "all_reduce", "payload": 80e6, "size": 8, "on_node": 4}
    assert seconds(cluster, "ring", **at) == pytest.approx(2 * 7 / 8 * 80e-3, rel=0.01)
    assert seconds(cluster, "hierarchical", **at) == pytest.approx(80e-3, rel=0.01)
    assert ClusterNetwork(cluster).through_one(80e6, 8, 4) == pytest.approx(8 * 80e-3, rel=0.01)
    inside = replace(cluster, node=replace(cluster.node, devices=8, link_gb_s=1.0))
    assert ClusterNetwork(inside).through_one(80e6, 8, 8) == pytest.approx(14 * 80e-3, rel=0.01)
    slow = replace(cluster.node, link_latency_us=1e3)
    late = replace(cluster, node=slow, network=replace(cluster.network, latency_us=1e3))
    at = {"op": "all_reduce", "payload": 1e3, "size": 8, "on_node": 8}
    tree, ring = seconds(late, "tree", **at), seconds(late, "ring", **at)
    assert ring == pytest.approx(14 / 6 * tree, rel=0.01)
    figures = LinkConfig(link_gb_s=1e3, network_gb_s=1.0, latency_us=1.0)
    chosen = {size: fastest(links_of(figures, 4, 4), "all_reduce", size, 8, 4) for size in (1e2, 80e6)}
    assert chosen == {1e2: "tree", 80e6: "hierarchical"}
    assert fastest(links_of(figures, 8, 8), "all_reduce", 80e6, 8, 8) == "torch", "a lower latency is not worth it"


def test_what_auto_takes_from_torch_is_hidden_as_before() -> None:
    """The `auto` algorithm hides as much communication as torch if it chooses torch.

    Inside a node torch's ring is not slower than ours, and it starts during backward. With a high latency our tree is
    faster, but it starts after backward and hides nothing.
    """
    sections = {"model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32}, "run": {"device": "cpu"},
                "data": {"prefixes": ["made"]}}  # fmt: skip
    costs = {}
    for kind in ("torch", "auto"):
        for late in (1e-3, 1e4):
            links = {"link_gb_s": 1.0, "latency_us": late}
            config = config_from(sections | {"comm": {"algorithm": kind, "links": links}, "train": {"global_batch": 6}})
            cluster = with_links(load_cluster("laptop"), EmulateConfig(**links), 6)
            costs[kind, late] = predict_cost(job_of(config, 6), cluster).axes["dp"]
    assert costs["auto", 1e-3].hidden == costs["torch", 1e-3].hidden > 0
    assert costs["auto", 1e4].hidden == 0 and costs["auto", 1e4].seconds < costs["torch", 1e4].seconds


@pytest.mark.parametrize(("ep", "offered"), [(16, True), (8, False)])
def test_experts_by_node_are_a_technique_where_ep_spans_nodes(ep: int, offered: bool) -> None:
    """The exchange by node sends known shares of the plain all-to-all's bytes between nodes and inside a node.

    The all-to-all of 16 ranks sends 15/16 of the tokens. Between two nodes 8/16 are sent, inside a node another 14/16.
    """
    sections = {
        "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "experts": {"count": 16, "ffn": 32}},
        "data": {"prefixes": ["made"]}, "layout": {"ep": ep}, "train": {"global_batch": 16},
    }  # fmt: skip
    job = job_of(config_from(sections), 16, cluster_node=8)
    by_name = {technique.name: technique for technique in techniques(job.config, job)}
    assert ("experts by node" in by_name) == offered
    if offered:
        cluster = load_cluster("h100-80g-dgx")
        plain, own = (planned_figures(by_name[name], job, cluster) for name in ("as configured", "experts by node"))
        assert own.sent["ep.across"] == pytest.approx(8 / 15 * plain.sent["ep"], rel=0.01)
        assert own.sent["ep.node"] == pytest.approx(14 / 15 * plain.sent["ep"], rel=0.01) and own.step_s > plain.step_s


def without_a_processor(rank: int, world: int) -> tuple[float, float]:
    """Encode compressed messages with 0.2 s of sleep each, as if other processes had the processor.

    Return the measured processor time of making the messages, and the time that the prediction assumes for it.
    """
    trainer = make_trainer(small_config(comm={"reduce": {"kind": "topk"}}), rank, world)
    encode = TopKCodec.encode

    def waits(self: TopKCodec, *given: object) -> object:
        time.sleep(0.2)
        return encode(self, *given)  # type: ignore[arg-type]

    TopKCodec.encode = waits  # type: ignore[assignment,method-assign]
    own, turn = TechniqueRun(trainer), TechniqueRun(trainer)
    own.times, own.work, turn.making = [0.6], [0.2], [0.01]
    return making_work(trainer), turn.making_seconds(own)


@pytest.mark.wide
def test_messages_are_priced_by_work_and_by_how_long_work_takes() -> None:
    for work, priced in run_ranks(2, without_a_processor):
        assert 0 < work < 0.2 and priced == pytest.approx(0.03)
