"""Tests of `meshwright comm bench` on Gloo ranks: its JSON, its profile for the planner, its drawing, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.bench.comm import count_calls
from meshwright.bench.fit import fit_links
from meshwright.bench.links import measure_links
from meshwright.bench.request import OPS, MeasurementRequest
from meshwright.cli.main import main
from meshwright.comm.mesh import Mesh
from meshwright.device import Device
from meshwright.plan.cluster import load_cluster
from meshwright.spec.layout import Layout
from tests.support.ranks import run_ranks
from tests.support.waiting import HANG_S

CONFIG = """
model: {layers: 2, hidden: 64, heads: 2, vocab: 512, seq: 64}
train: {global_batch: 4}
"""


def command(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    quick = ("comm", "bench", "--device", "cpu", "--seconds", "0.002")
    return subprocess.run(
        [sys.executable, *launcher, "-m", "meshwright", *quick, *words],
        capture_output=True, text=True, timeout=HANG_S, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def document(*words: str) -> dict[str, Any]:
    done = command("--json", *words)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.wide
def test_two_ranks_all_ops_and_a_profile_that_the_planner_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "here.yaml", tmp_path / "curves.svg"
    result = document("--nproc", "2", "--sizes", "1K:64K", "--out", str(out), "--svg", str(drawn))
    assert {p["op"] for p in result["points"]} == set(OPS) and len(result["points"]) == 7 * len(OPS)
    for p in result["points"]:
        assert p["axis"] == "dp" and p["ranks"] == 2 and p["link"] == "in_node" and p["seconds"] > 0
        assert p["algorithm_gb_s"] == pytest.approx(p["payload"] / p["seconds"] / 1e9)
        assert p["bus_gb_s"] == pytest.approx(p["algorithm_gb_s"] * p["bus_factor"])
    for op, counts in result["ledger"]["dp"].items():
        assert counts["calls"] >= 7 * 5 and 0 < counts["wire_bytes"] <= counts["payload_bytes"], op
    assert set(result["ledger"]["dp"]) == set(OPS)
    link = result["links"]["in_node"]
    assert link["latency_us"] > 0 and link["points"] == 42 and result["links"]["across_nodes"] is None
    assert result["rates"]["peak"]["fp32"] > 0 and 0 <= result["rates"]["contention"] <= 1
    cluster = load_cluster(str(out))
    assert cluster.name == "here" and cluster.node.devices == 2
    assert cluster.node.link_gb_s == pytest.approx(link["gb_s"])
    assert drawn.read_text().startswith("<svg") and "dp all-to-all" in drawn.read_text()
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["cost", str(tmp_path / "config.yaml"), "--cluster", str(out), "--devices", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > 0


def links_of_two_nodes(rank: int, world: int) -> Any:
    """Measure the links of one rank as the command does, but not the device's rates. Groups of dp are in a node.

    Return the points and the ledger's counts. Groups of pp span both nodes.
    """
    request = MeasurementRequest(
        Layout(world, pp=2, node_size=2), ("dp", "pp"), ("all_reduce", "send"), (1024, 4096), 0.002
    )
    mesh = Mesh(request.layout, rank)
    points = measure_links(mesh, Device("cpu"), request.axes, request.ops, request.sizes, 0.002, lambda text: None)
    return points, count_calls(mesh, request.axes)


def test_four_ranks_on_two_nodes_have_both_classes_of_links() -> None:
    by_rank = run_ranks(4, links_of_two_nodes)
    points, ledger = by_rank[0]
    assert all(other[0] == points for other in by_rank), "all ranks return the time of the slowest"
    assert {(p.axis, p.across, p.ranks, p.per_node) for p in points} == {("dp", False, 2, 2), ("pp", True, 2, 1)}
    inside, across = fit_links(points)
    assert inside is not None and across is not None and inside.points == across.points == 4
    assert set(ledger) == {"dp", "pp"} and set(ledger["pp"]) == {"all_reduce", "send"}
    calls = ledger["pp"]["send"]["calls"]
    assert calls >= 2 * 5 and 1024 * calls / 2 < ledger["pp"]["send"]["payload_bytes"] < 4096 * calls


@pytest.mark.wide
def test_as_ranks_of_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = command("--sizes", "1K:4K", "--ops", "all_gather", "--out", str(tmp_path / "a.yaml"), launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks, 2 per node, gloo, cpu") == 1 and "all_gather" in done.stdout
    assert load_cluster(str(tmp_path / "a.yaml")).node.devices == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--ops all_reduc", "unknown op 'all_reduc' (did you mean 'all_reduce'?)"),
        ("--ops ,", "--ops is empty"),
        ("--sizes 1K", "--sizes 1K is not two sizes"),
        ("--sizes 64M:1K", "--sizes 64M:1K is not two sizes"),
        ("--sizes a:b", "write e.g. 1K:64M"),
        ("--sizes 1K:4096G", "too much for"),
        ("--nproc 1", "--nproc 1 leaves nobody to talk to"),
        ("--nproc 3 --tp 2", "world=3 is not divisible by tp*cp*pp=2*1*1=2"),
        ("--nproc 4 --tp 4 --axis dp", "--axis dp has one rank"),
        ("--nproc 4 --axis tpp", "unknown axis 'tpp' (did you mean 'tp'?)"),
        ("--nproc 4 --node-size 3", "--node-size 3 does not divide 4 ranks"),
        ("--nproc 2 --seconds 0", "--seconds 0.0 must be above 0"),
        ("--nproc 2 --out nowhere/a.yaml", "can't be written: name a file in a folder that exists"),
        ("--nproc 2 --svg .", "--svg . can't be written"),
        ("--nproc 2 --backend mpi", "invalid choice: 'mpi'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_before_ranks_start(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comm", "bench", "--device", "cpu", *words.split()]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["comm", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "meshwright comm bench --nproc 2 --out here.yaml" in text and "2(n-1)/n for all_reduce" in text
