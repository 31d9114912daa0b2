"""`meshwright replay`: compute a past step again and check that it gives the recorded numbers. No torch until ranks
start."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.config.load import set_key, to_mapping
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.engine.datasets import datasets_of
from meshwright.errors import UserError, notice, plural
from meshwright.launch.launch import place_in_launcher, start, warm_up
from meshwright.launch.processes import find_place
from meshwright.outside import read_json
from meshwright.record.checkpoint_format import checkpoint_folder, list_checkpoints
from meshwright.record.run_folder import own_config, read_run
from meshwright.record.run_notes import read_events
from meshwright.record.speed import BEGINS
from meshwright.watch.read import is_number, read_small

EXAMPLES = """example:
  meshwright replay runs/mine --step 1200
  meshwright replay runs/mine --step 1200 --nproc 2 layout.tp=2 layout.pp=1 run.device=cpu
  meshwright replay runs/mine --step 1200 data.prefixes=data/text    (if the data are elsewhere now)

On the layout of the run the loss and the grad norm must equal the recorded ones bit for bit; on another layout, or on a
GPU, whose kernels may add in another order, up to the rounding of the run's precision. Exit code 0 if so, 1 if not."""

QUANTITIES = ("loss", "grad_norm")
# The sections of a config that change no number of a step.
OMITTED_SECTIONS = ("run", "checkpoint")
# By precision, the relative difference that another order of additions explains after some tens of steps. COARSE is
# for all precisions below fp32.
ROUNDING = {"fp64": 1e-9, "fp32": 1e-4}
COARSE = 2e-2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run (its run.dir), which is only read")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change, e.g. layout.tp=2")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to compute again")
    parser.add_argument("--nproc", type=int, help="local ranks to start (default: as many as the run had)")
    other = "the relative difference to allow where bits can't be equal (default: by the run's precision)"
    parser.add_argument("--tolerance", type=float, metavar="X", help=other)


def run(args: argparse.Namespace) -> int:
    if place_in_launcher(args.nproc):
        raise UserError("replay starts its own ranks: leave out torchrun or srun")
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc {args.nproc} must be at least 1")
    record = read_run(args.run)
    lines = {line["step"]: line for line in record.steps}
    if args.step not in lines:
        there = f"it has steps {min(lines)} to {max(lines)}" if lines else "it has none"
        raise UserError(f"{args.run} has no record of step {args.step}: {there}")
    notes = read_small(record.path / "run.json")
    ranks = args.nproc or record.world or 1
    if ranks > 1:
        warm_up()
    with tempfile.TemporaryDirectory(prefix="meshwright-replay-") as scratch:
        args.scratch = scratch
        config = config_of(args, record.config)
        check(config, ranks, TRAINING_RULES)
        # Missing data are reported here, before ranks start.
        datasets_of(config)
        args.checkpoint, args.source, step = begin_of(record.config, record.path, notes, args.step)
        where = f"the checkpoint of step {step}" if args.checkpoint else "the beginning"
        notice(f"replays step {args.step} of {args.run} from {where} on {plural(ranks, 'rank')}")
        if code := start(ranks, replay_rank, args):
            return code
        replayed = read_json(Path(scratch) / "replayed.json")
    same = same_layout(record.config, config, lines[args.step], ranks, record.path, notes, replayed)
    rounding = args.tolerance if args.tolerance is not None else ROUNDING.get(config.train.precision, COARSE)
    verdict = judge(lines, replayed["steps"], 0.0 if same else rounding)
    verdict |= {"run": args.run, "from": step, "ranks": ranks, "exact": same}
    print(json.dumps(verdict) if args.json else "\n".join(page(verdict)))
    return int(not verdict["reproduced"])


def config_of(args: argparse.Namespace, recorded: Config) -> Config:
    """Return the run's config with the given keys changed. It writes to a scratch folder, so that the run's own folder
    is only read."""
    raw: dict[str, Any] = to_mapping(recorded)
    for word in args.overrides:
        set_key(raw, word)
    config = own_config(raw)
    return replace(
        config, run=replace(config.run, dir=f"{args.scratch}/run"), checkpoint=replace(config.checkpoint, dir="")
    )


def begin_of(config: Config, path: Path, notes: Mapping[str, Any], step: int) -> tuple[str | None, str | None, int]:
    """Return (checkpoint, source, step): the newest checkpoint before `step` and the step that it was saved after.

    Without one, the replay begins where the run did: checkpoint is None, the step is 0, and source is the checkpoint
    that gave the run its first weights, if there was one."""
    folder = checkpoint_folder(replace(config, run=replace(config.run, dir=str(path))))
    earlier = [(at, where) for at, where in list_checkpoints(folder) if at < step]
    if earlier:
        return str(earlier[-1][1]), None, earlier[-1][0]
    source = notes.get("from")
    return None, source if isinstance(source, str) else None, 0


def replay_rank(args: argparse.Namespace) -> None:
    """Replay the step as one rank; rank 0 writes the replayed numbers to a file."""
    import torch

    from meshwright.device import Device
    from meshwright.run.replay import replay

    record = read_run(args.run)
    config = config_of(args, record.config)
    lines = {line["step"]: line for line in record.steps}
    steps = replay(config, args.step, Path(args.checkpoint) if args.checkpoint else None, args.source, lines)
    if find_place().rank == 0:
        device = Device.choose(config.run.device, 0)
        rows = [{"step": r.step, **{name: getattr(r, name) for name in QUANTITIES}} for r in steps]
        document = {"device": device.name, "cpu": device.module is None, "torch": str(torch.__version__), "steps": rows}
        (Path(args.scratch) / "replayed.json").write_text(json.dumps(document), encoding="utf-8")


def same_layout(
    recorded: Config, config: Config, line: Mapping[str, Any], ranks: int, path: Path, notes: Mapping[str, Any],
    replayed: Mapping[str, Any],
) -> bool:  # fmt: skip
    """Return whether every number must equal the recorded one bit for bit: with the same config, ranks, device and
    version of torch, and on a CPU, which always adds in the same order."""
    ours, theirs = ({k: v for k, v in to_mapping(c).items() if k not in OMITTED_SECTIONS} for c in (config, recorded))
    when = line.get("time")
    begins = [e for e in read_events(path) if e.get("kind") in BEGINS]
    # An elastic run changes its world: the one that counts is that of the last start before the step.
    worlds = [e.get("world") for e in begins if is_number(when) and e["time"] <= when]
    same_device = (replayed["device"], replayed["torch"]) == (notes.get("device"), notes.get("torch"))
    same_ranks = ranks == notes.get("world") == (worlds or [ranks])[-1]
    return ours == theirs and same_ranks and same_device and replayed["cpu"]


def judge(lines: Mapping[int, Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], most: float) -> dict[str, Any]:
    """Return a verdict: whether the last step gives the recorded numbers, and the first of all steps that does not.
    `most` is the largest relative difference that is allowed."""
    rows = []
    for step in steps:
        old = lines.get(step["step"], {})
        rows.append({"step": step["step"], **{name: _comparison(old.get(name), step[name]) for name in QUANTITIES}})
    differing = [row["step"] for row in rows if any(row[name]["difference"] > most for name in QUANTITIES)]
    last = rows[-1]
    return {
        "step": last["step"], "reproduced": last["step"] not in differing, "allowed": most,
        "first_different": differing[0] if differing else None, **{name: last[name] for name in QUANTITIES},
    }  # fmt: skip


def _comparison(recorded: Any, replayed: float) -> dict[str, Any]:
    """Return both numbers and their relative difference. Numbers that are not finite are recorded as null and count as
    equal to each other."""
    old = float(recorded) if is_number(recorded) else math.nan
    if not math.isfinite(old) or not math.isfinite(replayed):
        difference = 0.0 if math.isfinite(old) == math.isfinite(replayed) else math.inf
    else:
        difference = abs(old - replayed) / max(abs(old), abs(replayed)) if old != replayed else 0.0
    plain = [value if math.isfinite(value) else None for value in (old, replayed)]
    return {"recorded": plain[0], "replayed": plain[1], "difference": difference}


def page(found: Mapping[str, Any]) -> list[str]:
    """Return a verdict of `judge` as lines of text."""
    how = "bit for bit" if found["exact"] else f"to a relative difference of {found['allowed']:g}"
    lines = [f"step {found['step']} is {'' if found['reproduced'] else 'NOT '}reproduced {how}"]
    for name in QUANTITIES:
        it = found[name]
        lines.append(f"  {name:<10} recorded {it['recorded']!r}, replayed {it['replayed']!r} ({it['difference']:.2g})")
    if found["first_different"] not in (None, found["step"]):
        lines.append(f"  the first step that differs, of those since step {found['from']}: {found['first_different']}")
    return lines
