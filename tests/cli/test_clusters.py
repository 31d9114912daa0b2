"""`meshwright clusters`, changes to a cluster from the command line, and plans on several clusters side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.plan.cluster import adjusted, known_clusters, load_cluster, network_rate
from meshwright.plan.measured import cluster_of


def test_clusters_lists_shows_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in known_clusters())
    assert main(["clusters", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == known_clusters()
    assert main(["clusters", "l40s-48g"]) == 0
    assert "data sheet" in capsys.readouterr().out
    mine = tmp_path / "mine.yaml"
    assert main(["clusters", "l40s-48g", "--copy", str(mine)]) == 0
    assert load_cluster(str(mine)) == load_cluster("l40s-48g")
    capsys.readouterr()
    assert main(["clusters", "l40s-48g", "--copy", str(mine)]) == 2
    assert main(["clusters", "--copy", str(mine)]) == 2
    assert main(["clusters", "l40s"]) == 2
    assert "did you mean 'l40s-48g'" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "rate"), [
    ("25gbe", 3.125), ("100GbE", 12.5), ("8x400gb/s", 400.0), ("4xhdr", 100.0), ("ndr", 50.0), ("2x200gbps", 50.0),
])  # fmt: skip
def test_networks_as_people_name_them(text: str, rate: float) -> None:
    assert network_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "25", "0gbe", "-1gbe", "25gbe5", "xhdr"])
def test_other_networks_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="write the adapters of a node as 25gbe"):
        network_rate(text)


def test_nodes_of_another_size_keep_their_share_of_adapters() -> None:
    cluster = load_cluster("h100-80g-dgx")
    half = adjusted(cluster, node_devices=4)
    assert half.node.devices == 4 and half.network.node_gb_s == cluster.network.node_gb_s / 2
    assert half.node.host_gib == cluster.node.host_gib / 2 and half.name == "h100-80g-dgx with 4 devices per node"
    assert adjusted(cluster, "25gbe", 4).network.node_gb_s == 3.125
    assert adjusted(cluster) == cluster
    with pytest.raises(UserError, match="give at least 1"):
        adjusted(cluster, node_devices=0)


def test_a_slower_network_makes_a_step_slower(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cost", "gpt2-1.5b", "--cluster", "h100-80g-dgx", "--devices", "16", "train.global_batch=32", "--json"]
    seconds = []
    for more in ([], ["--network", "25gbe"], ["--node-devices", "16"]):
        assert main([*words, *more]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step_time_s"])
    # On one node the adapters are not used. (Two nodes all-reduce over a tree, so they may even be a little faster.)
    assert seconds[1] > 1.5 * max(seconds[0], seconds[2])
    assert main([*words, "--network", "quick"]) == 2


def test_a_plan_on_several_clusters_ranks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "gpt2-1.5b", "--devices", "8", "--global-batch", "32", "layout.pp=1", "recompute.mode=none"]
    words += ["--cluster", "v100-16g", "--cluster", "h100-80g-dgx", "train.micro_batch=1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["clusters"]
    assert list(found) == ["h100-80g-dgx", "v100-16g"]
    steps = [each["step_time_s"] for each in found.values()]
    assert steps == sorted(steps) and all(each["usd_per_billion_tokens"] > 0 for each in found.values())
    assert not list(tmp_path.iterdir()), "a comparison writes no plan"
    assert main([*words, "--html", "page.html"]) == 2


@pytest.mark.parametrize(("device", "cluster"), [
    ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"), ("NVIDIA A100-SXM4-80GB", "a100-80g-dgx"), ("NVIDIA H100 PCIe", None),
    ("NVIDIA GeForce RTX 4090", "rtx4090-24g"), ("NVIDIA A10", "a10-24g"), ("NVIDIA L40S", "l40s-48g"),
    ("AMD Instinct MI300X", "mi300x-192g"), ("NVIDIA GB200", "gb200-nvl72"),
])  # fmt: skip
def test_devices_are_recognised_by_torchs_names(device: str, cluster: str | None) -> None:
    found = cluster_of(device)
    assert (found.name if found else None) == cluster
