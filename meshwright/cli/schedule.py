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
  meshwright schedule --kind zb-v --pp 4 --micro-batches 8 --forward 1 --input-grad 1 --weight-grad 1
  meshwright schedule --kind gpipe --pp 8 --micro-batches 32 --send 0.1 --json"""

# The largest product of stages and micro-batches. A drawing of this size takes seconds.
LARGEST_DRAWN = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plugins = "Python modules that register schedules, as in run.plugins"
    parser.add_argument("--plugins", nargs="+", default=(), metavar="MODULE", help=plugins)
    parser.add_argument("--kind", default="1f1b", help=f"{', '.join(KINDS)} (default: 1f1b)")
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, required=True, help="micro-batches of a step")
    parser.add_argument("--chunks", type=int, help="stages that each rank holds (default: the fewest of the kind)")
    forward = "time of a rank's forward of one micro-batch (default: 1)"
    parser.add_argument("--forward", type=float, default=1.0, help=forward)
    parser.add_argument("--backward", type=float, default=2.0, help="time of its backward (default: 2)")
    split = "time of the backward's part for the"
    parser.add_argument("--input-grad", type=float, help=f"{split} input's gradient, in place of --backward")
    parser.add_argument("--weight-grad", type=float, help=f"{split} weights' gradients, given with --input-grad")
    parser.add_argument("--send", type=float, default=0.0, help="time of one transfer (default: 0)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the drawing to FILE too")


def run(args: argparse.Namespace) -> None:
    load_plugins(args.plugins)
    check_svg("--svg", args.svg)
    known = KINDS[args.kind].chunks if args.kind in KINDS else ()
    chunks = args.chunks if args.chunks is not None else min(known, default=1)
    if args.pp * args.micro_batches * chunks > LARGEST_DRAWN:
        raise UserError(
            f"--pp {args.pp} x --micro-batches {args.micro_batches} x --chunks {chunks} is too large a drawing: "
            f"keep the product within {LARGEST_DRAWN}"
        )
    if (args.input_grad is None) != (args.weight_grad is None):
        raise UserError("--input-grad and --weight-grad are the two parts of a backward: give both, or --backward")
    if args.input_grad is not None:
        args.backward = args.input_grad + args.weight_grad
    built = build(args.kind, args.pp, args.micro_batches, chunks)
    verify(built)
    simulation = simulate(built, args.forward, args.backward, args.send, args.weight_grad)
    write(args.svg, lambda: timeline_svg(simulation))
    print(json.dumps(as_json(simulation)) if args.json else report(simulation, args))


def as_json(simulation: Simulation) -> dict[str, Any]:
    """Return the simulation as JSON: unrounded times, and each rank's actions in the order of the table."""
    return {
        "makespan": simulation.makespan, "bubble": simulation.bubble, "active": list(simulation.active),
        "peak_activations": list(simulation.peak_activations),
        "actions": [[_action(timed) for timed in row] for row in simulation.ranks],
    }  # fmt: skip


def _action(timed: Timed) -> dict[str, Any]:
    action = timed.action
    fields = {"op": action.op.value, "micro_batch": action.micro_batch, "chunk": action.chunk}
    if action.peer is not None:
        fields["peer"] = action.peer
    return {**fields, "start": timed.start, "end": timed.end}


def _without_rounding_error(idle: float, busy: float) -> float:
    """Return the idle time, or 0 if it is a mere rounding error."""
    return idle if idle > 1e-9 * busy else 0.0


def report(simulation: Simulation, args: argparse.Namespace) -> str:
    """Return the drawing and the figures as text."""
    drawn = simulation.table
    rows = [("rank", "stages", "busy", "idle", "bubble", "peak activations")]
    for rank in range(drawn.pp):
        busy = simulation.busy[rank]
        idle = max(0.0, simulation.makespan - busy)
        left = f"{_without_rounding_error(idle, busy):.6g}"
        share = idle / simulation.makespan if simulation.makespan else 0.0
        stages = " ".join(str(drawn.stage(rank, chunk)) for chunk in range(drawn.chunks))
        peak = f"{simulation.peak_activations[rank]:.4g}"
        rows.append((str(rank), stages, f"{busy:.6g}", left, percent(share, 2), peak))
    longest = max(simulation.active)
    waiting = _without_rounding_error(longest - max(simulation.busy), longest)
    backward = f"backward {args.backward:g}"
    if args.weight_grad is not None:
        backward = f"input gradient {args.input_grad:g}, weight gradient {args.weight_grad:g}"
    return "\n".join([
        f"{title(drawn)}   (forward {args.forward:g}, {backward}, send {args.send:g})", "",
        timeline_text(simulation, terminal_width(140), has_colour(sys.stdout)), "", table(rows, left=(), indent=""), "",
        f"makespan          {simulation.makespan:.6g}",
        f"bubble            {simulation.bubble:.6f} ({percent(simulation.bubble, 2)})",
        f"longest rank      {longest:.6g} from its first compute to its last, {waiting:.6g} idle",
        f"peak activations  {max(simulation.peak_activations):.4g} (micro-batches of a rank's whole share)",
        "verified          complete, every transfer matched, free of deadlock",
    ])  # fmt: skip
