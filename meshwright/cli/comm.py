"""`meshwright comm bench` measures every collective on the groups of a layout and writes a profile of the machine for
the planner. `meshwright comm savings` shows what each way to communicate less saves (see `cli/savings.py`)."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from meshwright.bench.profile import as_yaml
from meshwright.bench.request import OPS, MeasurementRequest, host_bytes, parse_axes, parse_ops, parse_sizes
from meshwright.cli import savings
from meshwright.cli.layout import add_axes
from meshwright.config.numbers import count_argument
from meshwright.device_kinds import backend_names, device_names
from meshwright.disk import write
from meshwright.errors import UserError, plural
from meshwright.launch.launch import launch, local_devices, place_in_launcher, run_as_rank, warm_up
from meshwright.show.chart import Chart, check_svg, svg
from meshwright.show.terminal import table
from meshwright.show.units import percent, seconds, size
from meshwright.spec.layout.layout import Layout

EXAMPLES = """example:
  meshwright comm bench --nproc 2 --out here.yaml --svg curves.svg
  meshwright cost config.yaml --cluster here.yaml --devices 2        (the profile is a cluster of the planner)
  meshwright comm bench --nproc 4 --tp 2 --pp 2 --node-size 2 --ops all_reduce,send --sizes 4K:16M
  torchrun --nproc_per_node 8 -m meshwright comm bench --tp 8 --out node.yaml
  meshwright comm savings config.yaml --cluster h100-80g-dgx --devices 64                  (predicted)
  meshwright comm savings config.yaml --nproc 4 comm.emulate.link_gb_s=0.1 --svg saved.svg (measured, and predicted)
  srun -N 2 --ntasks-per-node 8 meshwright comm bench --tp 8 --out two-nodes.yaml

algorithm is payload / time. bus is what a link carries: algorithm x 2(n-1)/n for all_reduce, x (n-1)/n for all_gather,
reduce_scatter and all_to_all, x 1 for broadcast and send, on a group of n ranks. All groups of an axis run at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["bench", "savings"], help="links and ranks of a layout; or a config's savings")
    parser.add_argument("words", nargs="*", metavar="CONFIG key=value", help="savings: a config, and its keys")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="savings: predict for this cluster")
    parser.add_argument("--devices", type=int, metavar="N", help="savings: predict for this many devices")
    timed = "savings: timed steps of each technique (default 7)"
    parser.add_argument("--steps", type=count_argument, default=7, help=timed)
    parser.add_argument("--nproc", type=int, metavar="N", help="local ranks to start (default: the GPUs, or 2)")
    add_axes(parser)
    parser.add_argument("--axis", metavar="AXIS,...", help="axes to measure (default: all of more than one rank)")
    parser.add_argument("--ops", default=",".join(OPS), metavar="OP,...", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument("--sizes", default="1K:64M", metavar="A:B", help="payloads, doubling, or a list (1K:64M)")
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long to time each point (default 0.1)")
    parser.add_argument("--device", default="auto", choices=device_names(), help="default: auto")
    parser.add_argument("--backend", default="auto", choices=backend_names(), help="default: auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profile, a cluster for the planner")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw bus bandwidth over size")


def run(args: argparse.Namespace) -> int:
    if args.what == "savings":
        return savings.run(args)
    if args.words or args.cluster or args.devices:
        raise UserError("comm bench takes no config, cluster or devices: leave them out, or call comm savings")
    if place := place_in_launcher(args.nproc):
        return run_as_rank(place, lambda at: prepare(args, at.world, at.local_world), bench, args, stops=False)
    if args.nproc is not None and args.nproc < 2:
        raise UserError(f"--nproc {args.nproc} leaves nobody to talk to: start 2 ranks or more")
    ranks = args.nproc or local_devices(args.device, least=2)
    prepare(args, ranks, ranks)
    warm_up()
    from meshwright.device import check_machine

    check_machine(args.device, args.backend, "fp32", ranks)
    return launch(ranks, 0, bench, args)


def prepare(args: argparse.Namespace, world: int, local_world: int) -> None:
    """Store the request to measure in `args`, or raise the error that says why it can't be measured."""
    check_svg("--svg", args.svg)
    for name in ("out", "svg"):
        path = getattr(args, name)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UserError(f"--{name} {path} can't be written: name a file in a folder that exists")
        if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UserError(f"--{name} {path} can't be written: choose a place where you may write")
    ops, sizes = parse_ops(args.ops), parse_sizes(args.sizes)
    if not 0 < args.seconds <= 60:
        raise UserError(f"--seconds {args.seconds} must be above 0 and at most 60")
    node_size = args.node_size if args.node_size is not None else local_world
    layout = Layout(world, args.tp, args.pp, args.cp, args.ep, args.order, node_size, etp=args.etp)
    if world % node_size:
        raise UserError(f"--node-size {node_size} does not divide {world} ranks: nodes must be alike")
    # All ranks of the node share its memory.
    memory = host_bytes() // local_world
    if sizes[-1] > memory // 8:
        fix = "lower the upper end"
        raise UserError(f"--sizes goes up to {size(sizes[-1])}, too much for {size(memory)} per rank: {fix}")
    axes = parse_axes(layout, args.axis)
    name = args.out.stem if args.out else "measured"
    args.request = MeasurementRequest(layout, axes, ops, sizes, args.seconds, name, args.device, args.backend)


def bench(args: argparse.Namespace) -> None:
    """Run the whole bench as one rank. All ranks measure; rank 0 writes the files and prints the report."""
    from meshwright.bench.comm import join_world, measure

    with join_world(args.request) as (mesh, device, place):
        results = measure(args.request, mesh, device, place.local_world)
    if place.rank:
        return
    write(args.out, lambda: as_yaml(results["cluster"]))
    write(args.svg, lambda: svg(chart(results)))
    print(json.dumps(results | {"profile": args.out and str(args.out)}) if args.json else report(results), flush=True)


def chart(found: dict[str, Any]) -> Chart:
    """Return a chart of bus bandwidth over payload, with one line for each axis and collective."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for p in found["points"]:
        name = f"{p['axis']} {p['op']}".replace("_", "-")
        lines.setdefault(name, []).append((float(p["payload"]), p["bus_gb_s"]))
    title = f"{plural(found['world'], 'rank')}, {found['backend']}, {found['device']}"
    return Chart(title, "payload", "bus GB/s", lines, label=size)


def report(found: dict[str, Any]) -> str:
    """Return the measured points, the fitted links and the rates of one rank as tables of text."""
    rates, cluster = found["rates"], found["cluster"]
    blocks = [f"{plural(found['world'], 'rank')}, {found['node_size']} per node, {found['backend']}, {found['device']}"]
    points = [("axis", "op", "ranks", "payload", "time", "algorithm GB/s", "bus GB/s", "factor")]
    for p in found["points"]:
        gb_s = (f"{p[key]:.3g}" for key in ("algorithm_gb_s", "bus_gb_s"))
        took = (size(p["payload"]), seconds(p["seconds"]))
        points.append((p["axis"], p["op"], str(p["ranks"]), *took, *gb_s, f"{p['bus_factor']:g}"))
    blocks.append(table(points, left=(0, 1)))
    rows = [("links", "latency", "GB/s", "median error", "worst", "points")]
    for name, link in found["links"].items():
        if link:
            errors = (percent(link[key]) for key in ("error", "worst_error"))
            latency = seconds(link["latency_us"] * 1e-6)
            rows.append((name.replace("_", " "), latency, f"{link['gb_s']:.3g}", *errors, str(link["points"])))
            for op, rate in link["gb_s_by_op"].items():
                rows.append((f"  {op}", "", f"{rate:.3g}", "", "", ""))
    blocks.append(table(rows))
    peaks = ", ".join(f"{name} {1e3 * rate:.3g}" for name, rate in rates["peak"].items())
    blocks.append(table([
        ("one rank, while all work", ""), ("products, GFLOP/s", peaks),
        ("products' matrices pass at, GB/s", f"{rates['product_gb_s']:.3g}"),
        ("attention, GFLOP/s", f"{1e3 * rates['attention_tflops']:.3g}"), ("copy, GB/s", f"{rates['copy_gb_s']:.3g}"),
        ("elementwise work of a step, GB/s", f"{rates['step_gb_s']:.3g}"),
        ("optimizer, GB/s", f"{rates['optimizer_gb_s']:.3g}"),
        ("beside its work a kernel takes", f"{rates['kernel_us']:.3g} us"),
        ("a collective between computations takes longer by", f"{rates['wait_us']:.3g} us"),
        ("of a hidden reduction, compute loses", percent(rates["contention"], 0)),
        ("reference steps, median error", percent(rates["step_error"])),
    ]))  # fmt: skip
    blocks.append(f"cluster '{cluster['name']}': --out FILE saves it for meshwright cost, plan and simulate")
    return "\n\n".join(blocks)
