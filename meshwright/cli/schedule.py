"""`meshwright schedule`: build a pipeline schedule, verify it, time it and draw it. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from meshwright.disk import write
from meshwright.errors import UserError
from meshwright.plugins import load_plugins
from meshwright.show.chart import check_svg
from meshwright.show.schedule_drawing import timeline_svg, timeline_text, title
from meshwright.show.terminal import has_colour, table, terminal_width
from meshwright.show.units import percent
from meshwright.spec.schedule.kinds import KINDS, build
from meshwright.spec.schedule.simulate import Simulation, Timed, simulate
from meshwright.spec.schedule.verify import verify

EXAMPLES = """example:
  meshwright schedule --kind 1f1b --pp 4 --micro-batches 8
  meshwright schedule --kind interleaved --pp 4 --micro-batches 8 --chunks 2 --svg timeline.svg
  meshwright schedule --kind gpipe --pp 8 --micro-batches 32 --send 0.1 --json"""

# The largest product of stages and micro-batches. A drawing of this size takes seconds.
LARGEST_DRAWN = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plugins = "Python modules that register schedules, as in run.plugins"
    parser.add_argument("--plugins", nargs="+", default=(), metavar="MODULE", help=plugins)
    parser.add_argument("--kind", default="1f1b", help=f"{', '.join(KINDS)} (default: 1f1b)")
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, required=True, help="micro-batches of a step")
    parser.add_argument("--chunks", type=int, default=1, help="stages that each rank holds (default: 1)")
    forward = "time of a rank's forward of one micro-batch (default: 1)"
    parser.add_argument("--forward", type=float, default=1.0, help=forward)
    parser.add_argument("--backward", type=float, default=2.0, help="time of its backward (default: 2)")
    parser.add_argument("--send", type=float, default=0.0, help="time of one transfer (default: 0)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing to FILE too")


def run(args: argparse.Namespace) -> None:
    load_plugins(args.plugins)
    check_svg("--svg", args.svg)
    if args.pp * args.micro_batches * args.chunks > LARGEST_DRAWN:
        raise UserError(
            f"--pp {args.pp} x --micro-batches {args.micro_batches} x --chunks {args.chunks} is too large a drawing: "
            f"keep the product within {LARGEST_DRAWN}"
        )
    built = build(args.kind, args.pp, args.micro_batches, args.chunks)
    verify(built)
    simulation = simulate(built, args.forward, args.backward, args.send)
    write(args.svg, lambda: timeline_svg(simulation))
    print(json.dumps(as_json(simulation)) if args.json else report(simulation, args))


def as_json(simulation: Simulation) -> dict[str, Any]:
    """Return the simulation as JSON: unrounded times, and each rank's actions in the order of the table."""
    return {
        "makespan": simulation.makespan, "bubble": simulation.bubble,
        "peak_activations": list(simulation.peak_activations),
        "actions": [[_action(timed) for timed in row] for row in simulation.ranks],
    }  # fmt: skip


def _action(timed: Timed) -> dict[str, Any]:
    action = timed.action
    fields = {"op": action.op.value, "micro_batch": action.micro_batch, "chunk": action.chunk}
    if action.peer is not None:
        fields["peer"] = action.peer
    return {**fields, "start": timed.start, "end": timed.end}


def report(simulation: Simulation, args: argparse.Namespace) -> str:
    """Return the drawing and the figures as text."""
    drawn = simulation.table
    rows = [("rank", "stages", "busy", "idle", "bubble", "peak activations")]
    for rank in range(drawn.pp):
        busy = simulation.busy[rank]
        idle = max(0.0, simulation.makespan - busy)
        # A mere rounding error is shown as 0.
        left = f"{idle:.6g}" if idle > 1e-9 * busy else "0"
        share = idle / simulation.makespan if simulation.makespan else 0.0
        stages = " ".join(str(drawn.stage(rank, chunk)) for chunk in range(drawn.chunks))
        peak = f"{simulation.peak_activations[rank]:.4g}"
        rows.append((str(rank), stages, f"{busy:.6g}", left, percent(share, 2), peak))
    return "\n".join([
        f"{title(drawn)}   (forward {args.forward:g}, backward {args.backward:g}, send {args.send:g})", "",
        timeline_text(simulation, terminal_width(140), has_colour(sys.stdout)), "", table(rows, left=(), indent=""), "",
        f"makespan          {simulation.makespan:.6g}",
        f"bubble            {simulation.bubble:.6f} ({percent(simulation.bubble, 2)})",
        f"peak activations  {max(simulation.peak_activations):.4g} (micro-batches of a rank's whole share)",
        "verified          complete, every transfer matched, free of deadlock",
    ])  # fmt: skip
