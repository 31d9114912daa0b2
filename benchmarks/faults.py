"""The cost of the checks of `faults` at their defaults, as a share of a step, and their reports about a healthy run.

All times are processor times, so that other programs on the machine count little. `bad_steps` is the time inside the
checks of bad steps, over that of a step without them. One trainer takes steps with and without them in turns:
`by_difference` has the quartiles of the ratios of neighbouring steps, which a busy machine blurs. The comparison of
replicas is timed alone, over all weights and states, and divided by the number of steps between two comparisons. The
search for slow ranks is timed for `--ranks` of them, on the one rank that does it. `total` is the sum of the three. The
exit code is 1 if it is 1 % or more, or if anything is reported about the healthy run.

    python benchmarks/faults.py                      # overheads, on one CPU core
    python benchmarks/faults.py --healthy 2000       # reports about a run of 2000 steps on two ranks
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from common import BenchParser, finish

import meshwright.engine.marks as marks_module
from meshwright.config.faults import FaultsConfig
from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens
from meshwright.engine.context import build_context
from meshwright.engine.marks import unit_places
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.result import StepResult
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.faults.bad_steps import BadSteps
from meshwright.faults.corruption import checksum
from meshwright.faults.slow_ranks import SlowRanks
from meshwright.nn.unit import MARK
from meshwright.record.rank_figures import RankFigures
from meshwright.record.run_notes import KINDS, FaultNotes, read_events
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout import Layout

SIZES = {"layers": 4, "hidden": 256, "seq": 256, "batch": 4, "micro-batch": 2, "steps": 16, "ranks": 1024}
MOST = 0.01  # as a share of a step


def trainer_of(args: argparse.Namespace) -> Trainer:
    model = {"layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64, "vocab": 8192, "seq": args.seq}
    config = config_from({
        "model": model, "data": {"prefixes": ["none"]}, "run": {"device": "cpu"},
        "train": {"global_batch": args.batch, "micro_batch": args.micro_batch, "steps": 10**6},
    })  # fmt: skip
    ctx = build_context(config, 0, 1, Device("cpu"), trains=True)
    data = RandomTokens(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data, None)


def overheads(args: argparse.Namespace) -> dict[str, Any]:
    trainer = trainer_of(args)
    guard = BadSteps(trainer, None, cast(Any, None), FaultNotes("", 3, False))
    marks, noted = trainer.marks, trainer.data_parallel.reduces
    units = [(place.unit, getattr(place.unit, MARK)) for place in unit_places(trainer.ctx, trainer.modules)]

    def switch(on: bool) -> None:
        trainer.gate.active, trainer.marks = on, marks if on else None
        trainer.data_parallel.reduces = noted if on else []
        for unit, mark in units:
            setattr(unit, MARK, mark if on else None)

    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*given)
            finally:
                spent[0] += time.thread_time() - begin

        return measured

    marks_module._norm = timed(marks_module._norm)
    trainer.gate.pass_on, guard.settle = timed(trainer.gate.pass_on), timed(guard.settle)  # type: ignore[method-assign]
    times: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * args.steps + 4):
        checked = step % 4 in (1, 2)  # on and off in turns, each equally often first
        switch(checked)
        spent[0] = 0.0 if step == 4 else spent[0]
        begin = time.process_time()
        result = trainer.step()
        if checked:
            guard.settle(result, trainer.step)
        times[checked] += [time.process_time() - begin] if step > 3 else []
    plain = statistics.median(times[False])
    ratios = [on / off - 1 for on, off in zip(times[True], times[False], strict=True)]  # neighbours in time
    tensors = [x for state in trainer.optimizer.tensors() for values in state.tensors for x in tensors_of(values)]
    begin = time.process_time()
    for x in tensors:
        checksum(x)
    check = time.process_time() - begin
    every, watch = trainer.ctx.config.faults.check_every, slow_ranks_s(args.ranks)
    bad_steps = spent[0] / len(times[True])
    shares = {"bad_steps": bad_steps / plain, "checksums": check / every / plain, "slow_ranks": watch / plain}
    return {
        "parameters": sum(p.numel() for p in trainer.modules[0].parameters()), "step_s": plain, **shares,
        "total": sum(shares.values()), "by_difference": statistics.quantiles(ratios), "checksums_s": check,
        "check_every": every, "slow_ranks_s": watch, "ranks": args.ranks,
    }  # fmt: skip


def slow_ranks_s(ranks: int) -> float:
    """Return the seconds per step that the comparison of all ranks' figures takes."""
    hook = SlowRanks(Layout(ranks), FaultsConfig(), FaultNotes("", 3, True))
    figures, spent = RankFigures([1.0] * ranks, [], [0.1] * ranks, []), []
    for step in range(1, 41):
        result = StepResult(step, 1.0, 1.0, 0.0, None, False, 1, 1, step_time_s=1.0, ranks=figures)
        begin = time.thread_time()
        hook.after(result, False)
        spent.append(time.thread_time() - begin)
    return statistics.median(spent[20:])


def healthy(args: argparse.Namespace) -> dict[str, Any]:
    """Count the reports about a run in which nothing is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"train.steps={args.healthy}", "run.tensorboard=false", "faults.check_every=20", "checkpoint.every=0"]
        command = [sys.executable, "-m", "meshwright", "train", args.recipe, "--tiny", "--nproc", "2", *words, "--json"]
        begin = time.monotonic()
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=dict(os.environ))
        run = next(Path(folder).glob("runs/*-tiny"))
        noted = [event for event in read_events(run) if event.get("kind") in KINDS]
        steps = len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {"steps": steps, "seconds": time.monotonic() - begin, "noted": noted}


def main() -> int:
    parser = BenchParser(__doc__)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--healthy", type=int, metavar="STEPS", default=0)
    parser.add_argument("--recipe", default="gpt2-124m")
    args = parser.parse(layers=1, hidden=64, seq=16, batch=2, micro_batch=1, steps=4, ranks=8)
    torch.set_num_threads(1)
    found = healthy(args) if args.healthy else overheads(args)
    finish(args, found, rows=[found])
    if args.quick:
        return 0  # anything is a large share of such a short step
    return int(bool(found["noted"]) if args.healthy else found["total"] >= MOST)


if __name__ == "__main__":
    sys.exit(main())
