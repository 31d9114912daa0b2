"""`meshwright comm savings`: show how much of a config's step time each way to communicate less, or at a better time,
saves."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from meshwright.config.load import load_config
from meshwright.config.rules import check
from meshwright.device_kinds import AUTO
from meshwright.disk import write
from meshwright.errors import UserError, plural
from meshwright.lab.techniques import (
    Figures,
    Technique,
    differences,
    planned_figures,
    saved_share,
    techniques,
    with_links,
)
from meshwright.launch.launch import launch, warm_up
from meshwright.plan.cluster import load_cluster
from meshwright.plan.job import Job, job_of
from meshwright.plan.target import on_cluster, target_of, with_supported_precision
from meshwright.show.bars import BarChart, bars_svg, bars_text
from meshwright.show.chart import check_svg
from meshwright.show.terminal import table
from meshwright.show.units import percent, seconds, size

# The cluster whose device stands in for this machine's processors until they are measured.
CPU = "laptop"


def run(args: argparse.Namespace) -> int:
    """Predict or measure the savings of a config. The options are those of `meshwright comm` (see `comm.py`)."""
    check_svg("--svg", args.svg)
    if not args.words:
        raise UserError("comm savings needs a config: meshwright comm savings config.yaml --nproc 4")
    if args.steps < 1:
        raise UserError(f"--steps {args.steps} must be at least 1")
    if args.nproc is None:
        if not args.cluster or not args.devices:
            raise UserError("give --nproc N to measure on local ranks, or --cluster NAME and --devices N to predict")
        _predict(args)
        return 0
    if args.devices is not None:
        raise UserError("--devices is for a prediction, and --nproc measures here: give one of the two")
    if args.nproc < 2:
        raise UserError(f"--nproc {args.nproc} leaves nobody to talk to: start 2 ranks or more")
    config = load_config(args.words[0], args.words[1:])
    check(config, args.nproc)
    args.device = config.run.device if config.run.device != AUTO else args.device
    job = _job(config, args.nproc)
    args.techniques = techniques(config, job)
    warm_up()
    return launch(args.nproc, 0, measured_here, args)


def _job(config: Any, world: int) -> Job:
    """Return the job of a config on this machine, where the ranks of an emulated node stand for a cluster's node."""
    return job_of(config, world, cluster_node=config.layout.node_size or world, host=True)


def _predict(args: argparse.Namespace) -> None:
    """Print the predicted savings on a cluster."""
    target = target_of(args.words[0], args.words[1:], "")
    cluster = load_cluster(args.cluster)
    job = on_cluster(with_supported_precision(target, cluster), args.devices, cluster)
    tried = techniques(job.config, job)
    figures = [planned_figures(technique, job, cluster) for technique in tried]
    title = f"{target.name} on {args.devices} devices of {cluster.name}"
    _show(args, title, tried, None, figures)


def measured_here(args: argparse.Namespace) -> None:
    """Measure the savings as one rank; rank 0 prints them."""
    from meshwright.lab import savings
    from meshwright.launch.processes import enter, find_place, leave

    tried: list[Technique] = args.techniques
    config, place = tried[0].config, find_place()
    device, joined = enter(place, args.device, config.comm.backend, config.comm.timeout)
    job = _job(config, place.world)

    def say(text: str) -> None:
        if place.rank == 0:
            print(text, file=sys.stderr, flush=True)

    node_size = config.layout.node_size or place.world
    cluster = load_cluster(args.cluster or CPU)
    measured, making, own_s = savings.measure(tried, place.rank, place.world, device, args.steps, say, joined)
    # The prediction takes the compute rates that were measured here, so that only communication is predicted.
    cluster = with_links(savings.own_compute(job, own_s, cluster), config.comm.emulate, node_size)
    predicted = [
        planned_figures(technique, job, cluster, extra) for technique, extra in zip(tried, making, strict=True)
    ]
    if place.rank == 0:
        links = config.comm.emulate.words(node_size) if config.comm.emulate.on else "the machine's own links"
        _show(args, f"{plural(place.world, 'rank')} here, {links}", tried, measured, predicted)
    if joined:
        leave()


def _show(
    args: argparse.Namespace, title: str, tried: list[Technique], measured: list[Figures] | None,
    predicted: list[Figures],
) -> None:  # fmt: skip
    """Print a table and bars of all techniques, or the JSON document, and write the drawing."""
    names = [technique.name for technique in tried]
    main = measured or predicted
    word = "measured" if measured else "predicted"
    groups = {"measured": measured, "predicted": predicted} if measured else {"predicted": predicted}
    bars = BarChart(
        f"step time, {title}", names, {name: [1e3 * f.step_s for f in of] for name, of in groups.items() if of}, "ms"
    )
    write(args.svg, lambda: bars_svg(bars))
    if args.json:
        document = {
            "title": title,
            "techniques": [
                {"name": name} | {key: asdict(of[number]) for key, of in groups.items() if of}
                for number, name in enumerate(names)
            ],
        }
        print(json.dumps(document), flush=True)
        return
    print(f"{title}\n\n{_table(names, main, word)}")
    if measured:
        rows = [("step", "measured", "predicted", "difference", "exposed", "predicted")]
        for name, m, p, off in zip(names, measured, predicted, differences(measured, predicted), strict=True):
            exposed = (seconds(m.exposed_s), seconds(p.exposed_s))
            rows.append((name, seconds(m.step_s), seconds(p.step_s), f"{100 * off:+.0f} %", *exposed))
        print(f"\n{table(rows)}")
    print(f"\n{bars_text(bars)}", flush=True)


def _table(names: list[str], figures: list[Figures], word: str) -> str:
    """Return a table with a row for each technique. Savings are relative to the first row, the config as it is."""
    axes = sorted({axis for each in figures for axis in each.sent if axis != "world"})
    rows = [(word, *(f"{axis} sent" for axis in axes), "bytes saved", "exposed", "step", "tokens/s", "time saved")]
    base = figures[0]
    for name, f in zip(names, figures, strict=True):
        sent = (size(f.sent.get(axis, 0.0)) for axis in axes)
        saved = (percent(saved_share(base.bytes, f.bytes)), percent(saved_share(base.step_s, f.step_s)))
        times = (seconds(f.exposed_s), seconds(f.step_s), f"{f.tokens_s:,.0f}")
        rows.append((name, *sent, saved[0], *times, saved[1]))
    return table(rows)
