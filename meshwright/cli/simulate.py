"""`meshwright simulate`: simulate one step on every pipeline rank, also with slow parts, and draw or trace it. No
torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshwright.cli.common_args import print_result, say_next_of, step_arguments, step_from_args
from meshwright.disk import write
from meshwright.plan.whatif import SimulatedStep, parse_change, step_of, step_spans
from meshwright.show.chart import check_svg
from meshwright.show.schedule_drawing import timeline_svg
from meshwright.show.terminal import table
from meshwright.show.units import percent, seconds
from meshwright.spec.schedule.trace import trace_json

EXAMPLES = """example:
  meshwright simulate bloom-176b --svg step.svg --trace step.json
  meshwright simulate config.yaml --cluster h100-80g-dgx --devices 64 --what-if slow-rank=3:0.7
  meshwright simulate gpt3-175b --cluster a100-80g-dgx --devices 1024 --layout tp=8,pp=16,recompute=full \\
      train.global_batch=1536 --what-if slow-network=0.5 --what-if fewer-nodes=1

Open a trace at https://ui.perfetto.dev. Each --what-if is tried by itself, and then all of them together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    step_arguments(parser)
    changes = "slow-link=0.5, slow-network=0.5, slow-rank=RANK:0.7, fewer-nodes=1 or imbalance=1.3 (of experts)"
    parser.add_argument("--what-if", action="append", default=[], metavar="CHANGE", help=changes)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")


def run(args: argparse.Namespace) -> None:
    check_svg("--svg", args.svg)
    target, job, cluster = step_from_args(args)
    changes = [parse_change(text) for text in args.what_if]
    plain = step_of(job, cluster)
    tried = [(str(change), step_of(job, cluster, [change])) for change in changes]
    if len(changes) > 1:
        tried.append(("all together", step_of(job, cluster, changes)))
    # The drawing and the trace are of all changes together, or of the only one.
    shown = tried[-1][1] if tried else plain
    write(args.svg, lambda: timeline_svg(shown.timeline))
    write(args.trace, lambda: trace_json(step_spans(shown), target.name))
    steps = [("as it is", plain), *tried]
    print_result(args, {"steps": [{"what": name, **_json(step)} for name, step in steps]}, _text(steps), job)
    say_next_of(args, "cost", "plan", devices=job.world, cluster=cluster.name, batch=job.global_batch)


def _json(step: SimulatedStep) -> dict[str, Any]:
    return {
        "step_time_s": step.seconds, "makespan_s": step.timeline.makespan, "bubble": step.timeline.bubble,
        "busy_s": list(step.timeline.busy), "tokens_per_s": step.tokens_per_s,
        "devices": step.cost.job.world, "global_batch": step.cost.job.global_batch,
    }  # fmt: skip


def _text(steps: list[tuple[str, SimulatedStep]]) -> str:
    rows = [("", "step", "pipeline", "bubble", "tokens/s", "against")]
    first = steps[0][1]
    for name, step in steps:
        against = "" if step is first else f"{100 * (step.tokens_per_s / first.tokens_per_s - 1):+.1f} %"
        times = (seconds(step.seconds), seconds(step.timeline.makespan), percent(step.timeline.bubble))
        rows.append((name, *times, f"{step.tokens_per_s:,.0f}", against))
    return table(rows)
