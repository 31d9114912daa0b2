"""`meshwright dryrun`: run single ranks of a cluster that isn't there, and compare them with the plan."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwright.cli.common_args import world_arguments, world_from_args
from meshwright.config.rules import batch_unit, check
from meshwright.config.sections import Config
from meshwright.device_kinds import device_names
from meshwright.errors import UserError, plural
from meshwright.outside import LARGEST
from meshwright.plan.communication import Line, Traffic, by_axis
from meshwright.plan.job import checked_job
from meshwright.plan.rank import ExpectedRank, planned_rank
from meshwright.show.terminal import table
from meshwright.show.units import seconds, size
from meshwright.spec.traffic.counts import COUNTS

if TYPE_CHECKING:
    from meshwright.device import Device
    from meshwright.dryrun.run_rank import RankRun

EXAMPLES = """example:
  meshwright dryrun mt-nlg-530b --devices 4480 --ranks 0,2240,4479
  meshwright dryrun gpt3-175b --devices 1024 --layout tp=8,pp=16 train.global_batch=1536
  meshwright dryrun config.yaml --devices 64 --ranks 63 zero.stage=3 --json
  meshwright dryrun gpt3-175b --devices 1024 --layout tp=8,pp=16 train.global_batch=1536 --ranks 512 --device cuda

Each rank's real model, buffers, optimizer and schedule run one step; the other ranks are torch's fake process group. On
`meta`, the default, tensors have no memory and nothing is computed, so any rank of any model runs on a laptop. On a
device they are real, and the time of the compute and the peak memory are measured (a rank must fit).

Parameters, bytes of states, communication and schedule must equal the plan's; if one doesn't, the command exits with 1.
Temporary memory (activations saved for backward, gathered weights and whole gradients, the peak) is planned only
approximately: plan / run is the ratio."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    world_arguments(parser)
    parser.add_argument("--ranks", metavar="R,R,...", help="which ranks to run (default: first, middle and last)")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="per rank (default: by the global batch)")
    parser.add_argument("--device", default="meta", choices=["meta", *device_names()[1:]], help="default: meta")


def run(args: argparse.Namespace) -> int:
    target, world = world_from_args(args)
    config = _step_of(target.config, world, args.micro_batches)
    ranks = _ranks(args.ranks, world)
    from meshwright.device import Device

    device = Device.choose(args.device)
    device.check_precision(config.train.precision)
    results = [_run_one(config, world, rank, device) for rank in ranks]
    equal = all(result["equal"] for result in results)
    if args.json:
        document = {"model": target.name, "world": world, "device": device.name, "equal": equal, "ranks": results}
        print(json.dumps(document))
    else:
        verdict = "The run equals the plan." if equal else "The run does not equal the plan: see `differs`."
        print("\n\n".join([*(report(result, world) for result in results), verdict]))
    return 0 if equal else 1


def _run_one(config: Config, world: int, rank: int, device: Device) -> dict[str, Any]:
    """Run one step of a rank and return its figures beside the planned ones."""
    import torch

    from meshwright.dryrun.run_rank import run_rank

    planned = planned_rank(checked_job(config, world), rank)
    if planned.most["peak"] >= LARGEST // 8:
        raise UserError(f"rank {rank} would hold {size(planned.most['peak'])}: use a smaller model")
    what = f"{planned.parameters:,} parameters, {plural(planned.micro_batches, 'micro-batch')}"
    print(f"rank {rank} of {world} ({_place(planned.coordinate)}): {what}", file=sys.stderr, flush=True)
    try:
        ran = run_rank(config, world, rank, device)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"rank {rank} does not fit on {device.name} (planned: {size(planned.most['peak'])}): "
            "choose another layout, zero.stage or recompute.mode, or run it with --device meta"
        ) from error
    took = f"built in {seconds(ran.build_s)}, run in {seconds(ran.run_s)}"
    print(f"rank {rank}: {took} on {device.name}", file=sys.stderr, flush=True)
    return compare(rank, ran, planned)


def _place(coordinate: Mapping[str, int]) -> str:
    """Return a rank's coordinate as text such as `tp 0, dp 1, pp 3`, without cp if it is 0."""
    return ", ".join(f"{axis} {at}" for axis, at in coordinate.items() if axis != "cp" or at)


def _step_of(config: Config, world: int, micro_batches: int | None) -> Config:
    """Return the config of the step to run. It is a step after the batch-size ramp; `micro_batches`, if given, sets its
    number of micro-batches."""
    train = replace(config.train, ramp=())
    if micro_batches is not None:
        if micro_batches < 1:
            raise UserError(f"--micro-batches {micro_batches} must be at least 1")
        train = replace(train, global_batch=micro_batches * batch_unit(config, world)[0])
    config = replace(config, train=train, run=replace(config.run, eval_samples=0))
    check(config, world)
    return config


def _ranks(text: str | None, world: int) -> list[int]:
    """Return the ranks that --ranks names, by default the first, the middle and the last one."""
    if text is None:
        return sorted({0, world // 2, world - 1})
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--ranks {text} must be numbers with commas between them, e.g. --ranks 0,{world - 1}")
    ranks = list(dict.fromkeys(int(word) for word in words))
    outside = [rank for rank in ranks if rank >= world]
    if outside:
        raise UserError(f"--ranks {text}: {outside[0]} is not in a world of {world}, choose 0 to {world - 1}")
    return ranks


def compare(rank: int, ran: RankRun, planned: ExpectedRank) -> dict[str, Any]:
    """Return each figure of a rank as it was run and as it was planned."""
    calls = [
        {"phase": line[0], "axis": line[1], "op": line[2]} | _pair(ran.calls.get(line), planned.calls.get(line))
        for line in sorted({*ran.calls, *planned.calls})
    ]
    parameters = _pair(ran.parameters, planned.parameters)
    states = _pairs(ran.states, planned.states)
    schedule = _pairs(ran.schedule, planned.schedule)
    comm = _pairs(_by_axis(ran.calls), _by_axis(planned.calls))
    # The most bytes held at once are planned only approximately, so they don't count here.
    exact = [parameters, *states.values(), *schedule.values(), *comm.values(), *calls]
    return {
        "rank": rank, "coordinate": planned.coordinate, "layers": planned.layers,
        "micro_batches": planned.micro_batches,
        "parameters": parameters, "bytes": states, "comm": comm, "calls": calls, "schedule": schedule,
        "most": {
            name: {"ran": value, "planned": planned.most[name], "ratio": planned.most[name] / value if value else None}
            for name, value in ran.most.items()
        },
        "updated": ran.updated, "build_s": ran.build_s, "run_s": ran.run_s, "step_s": ran.step_s,
        "equal": ran.updated and all(pair["equal"] for pair in exact),
    }  # fmt: skip


def _pair(ran: Any, planned: Any) -> dict[str, Any]:
    return {"ran": ran, "planned": planned, "equal": ran == planned}


def _pairs(ran: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _pair(ran.get(name), planned.get(name)) for name in dict.fromkeys([*ran, *planned])}


def _by_axis(calls: Mapping[tuple[str, str, str], Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the counts of calls by (phase, axis, op), summed by axis."""
    sums = by_axis({Line(*line): Traffic(**counts) for line, counts in calls.items()})
    return {axis: traffic._asdict() for axis, traffic in sums.items()}


def report(one: Mapping[str, Any], world: int) -> str:
    """Return one rank's table: each figure as run, as planned, and whether they are equal."""
    step = "" if one["step_s"] is None else f", {seconds(one['step_s'])} per step"
    work = f"{_layers(one['layers'])}, {plural(one['micro_batches'], 'micro-batch')}{step}"
    head = f"rank {one['rank']} of {world} ({_place(one['coordinate'])}): {work}"
    rows = [("one step of this rank", "as run", "as planned", "equal?"), _row("parameters", one["parameters"])]
    rows += [_row(f"bytes of {kind}", pair) for kind, pair in one["bytes"].items()]
    for axis, pair in one["comm"].items():
        for name in COUNTS:
            sides = ((pair[side] or {}).get(name) for side in ("ran", "planned"))
            rows.append(_row(f"{axis} {name.replace('_', ' ')}", _pair(*sides)))
    rows += [_row(f"schedule, {name.replace('_', ' ')}", pair) for name, pair in one["schedule"].items()]
    for name, pair in one["most"].items():
        ratio = "" if pair["ratio"] is None else f"plan / run {pair['ratio']:.2f}"
        rows.append((f"most at once, {name}", size(pair["ran"]), size(pair["planned"]), ratio))
    if not one["updated"]:
        rows.append(("the update was skipped: a gradient was not finite", "", "", "differs"))
    return f"{head}\n{table(rows)}"


def _layers(numbers: list[int]) -> str:
    """Format layer numbers as `layers 0-2, 8-10`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    runs = (f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, stops, strict=True))
    return f"layers {', '.join(runs)}" if numbers else "no layers"


def _row(name: str, pair: Mapping[str, Any]) -> tuple[str, str, str, str]:
    ran, planned = ("-" if pair[side] is None else f"{pair[side]:,}" for side in ("ran", "planned"))
    return name, ran, planned, "=" if pair["equal"] else "differs"
