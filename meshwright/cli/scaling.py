"""`meshwright scaling`: predict throughput, efficiency and communication share from few devices to many. Needs no
torch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.cli.common_args import cluster_arguments, planned_from_args, print_result
from meshwright.config.numbers import count_argument
from meshwright.disk import write
from meshwright.errors import UserError, plural
from meshwright.outside import LARGEST
from meshwright.plan.account import layout_of_cost, layout_words
from meshwright.plan.cluster import Cluster
from meshwright.plan.job import Job
from meshwright.plan.question import assumptions_of, command, model_facts, software_facts
from meshwright.plan.scaling import WAYS, ScalingPoint, device_counts, sweep
from meshwright.plan.target import Target
from meshwright.show import page_file
from meshwright.show.chart import Chart, check_svg, stack_charts, svg
from meshwright.show.progress import searching
from meshwright.show.terminal import table
from meshwright.show.units import percent

# The keys that the search of each point chooses, or that an option of this command sets.
SEARCHED = (
    "layout.", "pipeline.", "zero.stage", "zero.shard_group", "recompute.", "train.global_batch", "train.micro_batch",
)  # fmt: skip
EXAMPLES = """example:
  meshwright scaling llama3-8b --cluster h100-80g-dgx --devices 8:1024
  meshwright scaling gpt3-175b --cluster a100-80g-dgx --devices 64:4096 --mode strong --svg curve.svg
  meshwright scaling llama3-8b --cluster h100-80g-dgx --mode weak --overhead overhead.svg --efficiency efficiency.svg
  meshwright scaling llama3-8b --cluster h100-80g-dgx --html scaling.html

Weak: the batch grows with the devices, from --global-batch (default one sequence for each) on the smallest number.
Strong: it stays --global-batch (default 2048). The layouts of each point are searched, as `meshwright plan` does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cluster_arguments(parser)
    parser.add_argument("--devices", default="8:1024", metavar="A:B", help="from A to B, doubling, or a list a,b,c")
    parser.add_argument("--global-batch", type=count_argument, metavar="B", help="sequences of a step")
    parser.add_argument("--mode", choices=("weak", "strong", "both"), default="both", help="default: both")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw tokens/s over devices")
    overhead = "draw the bytes that a device sends, and the seconds that it waits for them, by axis"
    parser.add_argument("--overhead", type=Path, metavar="FILE", help=overhead)
    parser.add_argument("--efficiency", type=Path, metavar="FILE", help="draw efficiency over devices")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all drawings and tables as one page")


def run(args: argparse.Namespace) -> None:
    for option in ("svg", "overhead", "efficiency"):
        check_svg(f"--{option}", getattr(args, option))
    target, cluster, stack = planned_from_args(args, args.words, as_run=False)
    counts = device_counts(args.devices)
    searched = [word for word in args.words if word.startswith(SEARCHED)]
    if searched:
        why = "scaling searches layouts itself, and has --global-batch"
        raise UserError(f"{searched[0]} would have no effect: leave it out ({why})")
    if args.global_batch is not None and args.global_batch < 1:
        raise UserError(f"--global-batch {args.global_batch} must be at least 1")
    if (args.global_batch or 1) * max(counts) >= LARGEST:
        raise UserError(f"--global-batch {args.global_batch} is more samples than anybody has: use a smaller one")
    modes = ("weak", "strong") if args.mode == "both" else (args.mode,)
    found: dict[str, list[ScalingPoint]] = {}
    total, done = len(modes) * len(counts) * len(WAYS), itertools.count(1)
    with searching("searching layouts") as show:
        for mode in modes:
            batch = args.global_batch or (counts[0] if mode == "weak" else 2048)
            host, node = cluster.device.units == 1, cluster.node.devices
            base = Job(target.config, counts[0], stack, node, samples=batch, host=host)
            seen = partial(_show_point, lambda words: show(next(done), total, words), mode)
            found[mode] = sweep(base, cluster, counts, mode == "weak", found=seen)
    chart = Chart(f"{target.name} on {cluster.name}", "devices", "tokens/s", _lines(found), label="{:,.0f}".format)
    write(args.svg, lambda: svg(chart))
    title = f"{target.name} on {cluster.name}, {next(iter(found))} scaling"
    write(args.overhead, lambda: stack_charts(overhead_charts(title, next(iter(found.values())))))
    write(args.efficiency, lambda: svg(efficiency_chart(title, next(iter(found.values())))))
    write(args.html, lambda: page(target, base, cluster, found))
    print_result(args, {mode: [_json(p) for p in points] for mode, points in found.items()}, _text(found))


def _show_point(show: Callable[[str], None], mode: str, point: ScalingPoint) -> None:
    """Show a point as soon as it is found."""
    speed = f"{point.tokens_per_s:,.0f} tokens/s" if point.best else "not possible"
    show(f"{mode} scaling, {point.way} on {plural(point.devices, 'device')}: {speed}")


def _lines(found: dict[str, list[ScalingPoint]]) -> dict[str, list[tuple[float, float]]]:
    """Return the curves of throughput. With both modes, strong scaling has only that of hybrid layouts."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for mode, points in found.items():
        for way in WAYS:
            line = [(float(p.devices), p.tokens_per_s) for p in points if p.way == way and p.best]
            if line and (mode == "weak" or way == "hybrid" or len(found) == 1):
                lines[f"{way} ({mode})"] = line
    return lines


AXES = {"data": ("dp",), "tensor": ("tp",), "pipeline": ("pp",), "hybrid": ("dp", "tp", "pp")}


def overhead_charts(title: str, points: list[ScalingPoint]) -> list[Chart]:
    """Return two charts by way of scaling and axis: the bytes that a device sends in a step, and the seconds that
    compute waits for them."""
    sent: dict[str, list[tuple[float, float]]] = {}
    waited: dict[str, list[tuple[float, float]]] = {}
    for p in (p for p in points if p.best):
        for axis in AXES[p.way]:
            name = p.way if len(AXES[p.way]) == 1 else f"{p.way}, {axis}"
            for lines, values, unit in ((sent, p.sent_bytes, 1e9), (waited, p.exposed_seconds, 1.0)):
                if values.get(axis, 0.0) > 0:
                    lines.setdefault(name, []).append((float(p.devices), values[axis] / unit))
    devices = "{:,.0f}".format
    return [
        Chart(f"{title}: bytes that a device sends in a step", "devices", "GB", sent, devices),
        Chart("seconds of a step that are exposed communication", "devices", "seconds", waited, devices),
    ]


def efficiency_chart(title: str, points: list[ScalingPoint]) -> Chart:
    """Return a chart of efficiency over devices, with a line for each way of scaling."""
    lines = {way: [(float(p.devices), 100 * p.efficiency) for p in points if p.way == way and p.best] for way in WAYS}
    lines = {way: line for way, line in lines.items() if line}
    return Chart(f"{title}: efficiency", "devices", "%", lines, "{:,.0f}".format, linear=True)


PAGE = page_file.PageScripts(page_file.FOLDER / "scaling.js")


def page(target: Target, base: Job, cluster: Cluster, found: dict[str, list[ScalingPoint]]) -> str:
    """Return the page of all points, with charts of throughput, efficiency and communication for each mode."""
    counts = [point.devices for points in found.values() for point in points]
    batches = {mode: sorted({point.global_batch for point in points}) for mode, points in found.items()}
    facts = {
        **model_facts(target, base), "devices": f"{min(counts)} to {max(counts)} x {cluster.device.name}",
        **{f"{mode} scaling": f"global batch {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
           for mode, sizes in batches.items()},
        **software_facts(base, cluster), **assumptions_of(base, cluster), "command": command(),
    }  # fmt: skip
    modes = {mode: [_json(p) | {"words": _words(p)} for p in points] for mode, points in found.items()}
    title = f"Scaling of {target.name} on {cluster.name}"
    return page_file.page(title, {"title": title, "facts": facts, "modes": modes}, PAGE)


def _words(point: ScalingPoint) -> str:
    return layout_words(layout_of_cost(point.best.cost)) if point.best else ""


def _json(point: ScalingPoint) -> dict[str, Any]:
    fields: dict[str, Any] = {"way": point.way, "devices": point.devices, "global_batch": point.global_batch}
    if point.best is None:
        return {**fields, "tokens_per_s": None}
    return {
        **fields, "tokens_per_s": point.tokens_per_s, "efficiency": point.efficiency, "comm_share": point.comm_share,
        "bytes_by_axis": point.sent_bytes, "exposed_s_by_axis": point.exposed_seconds,
        "step_time_s": point.best.cost.step_s, "mfu": point.best.cost.mfu, "layout": layout_of_cost(point.best.cost),
    }  # fmt: skip


def _rows(mode: str, points: list[ScalingPoint]) -> list[tuple[str, ...]]:
    header = (f"{mode} scaling", "devices", "batch", "tokens/s", "efficiency", "exposed comm", "layout")
    rows: list[tuple[str, ...]] = [header]
    for p in points:
        cells = ("-", "-", "-", "can't be or doesn't fit")
        if p.best:
            figures = (f"{p.tokens_per_s:,.0f}", percent(p.efficiency), percent(p.comm_share))
            cells = (*figures, _words(p))
        rows.append((p.way, str(p.devices), str(p.global_batch), *cells))
    return rows


def _text(found: dict[str, list[ScalingPoint]]) -> str:
    return "\n\n".join(table(_rows(mode, points), left=(0, 6)) for mode, points in found.items())
