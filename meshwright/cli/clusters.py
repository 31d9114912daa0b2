"""`meshwright clusters`: list the clusters that ship with the package, show one, or copy one to change it. No torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from meshwright.disk import write
from meshwright.errors import UserError
from meshwright.plan.cluster import FOLDER, Cluster, known_clusters, load_cluster
from meshwright.show.terminal import table

EXAMPLES = """example:
  meshwright clusters
  meshwright clusters l40s-48g
  meshwright clusters h100-80g-dgx --copy mine.yaml
  meshwright plan llama3-8b --cluster mine.yaml --devices 16 --global-batch 256

Planning commands take --network 25gbe and --node-devices 4 for a change that needs no file."""

UNITS = """bf16 is in TFLOP/s (fp16 for devices without bf16), `memory` in GB/s of a device. `link` and `network` are
GB/s each way, of a device inside its node and of all adapters of a node.
next: meshwright clusters NAME shows one with the source of each figure"""
HEADS = ("cluster", "device", "bf16", "GiB", "memory", "per node", "link", "network", "USD/h")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME|FILE", help="the cluster to show (default: list all)")
    parser.add_argument("--copy", type=Path, metavar="FILE", help="write the cluster's YAML file there, to change it")


def run(args: argparse.Namespace) -> None:
    if args.name is None:
        if args.copy:
            raise UserError("--copy needs a name: write e.g. meshwright clusters h100-80g-dgx --copy mine.yaml")
        found = [load_cluster(name) for name in known_clusters()]
        rows = [HEADS, *map(_cells, found)]
        print(json.dumps([asdict(each) for each in found]) if args.json else f"{table(rows)}\n\n{UNITS}")
        return
    cluster, path = load_cluster(args.name), FOLDER / f"{args.name}.yaml"
    source = path if path.is_file() else Path(args.name)
    if args.copy:
        if args.copy.exists():
            raise UserError(f"{args.copy} exists: name another file, so that nothing is overwritten")
        write(args.copy, lambda: source.read_text(encoding="utf-8"))
        print(f"wrote {args.copy}\nnext: meshwright plan MODEL --cluster {args.copy} --devices N --global-batch B")
        return
    print(json.dumps(asdict(cluster)) if args.json else source.read_text(encoding="utf-8").rstrip())


def _cells(cluster: Cluster) -> tuple[str, ...]:
    device, node = cluster.device, cluster.node
    peak = device.peak.get("bf16", device.peak.get("fp16", 0.0))
    return (
        cluster.name, device.name, f"{peak:,.0f}" if peak >= 1 else f"{peak:g}", f"{device.memory_gib:g}",
        f"{device.memory_gb_s:,.0f}", str(node.devices), f"{node.link_gb_s:g}", f"{cluster.network.node_gb_s:g}",
        f"{device.price_hour:g}",
    )  # fmt: skip
