"""The memory, traffic and time of each ZeRO stage on two CPU ranks: the table of docs/zero.md.

The stages take turns, round by round, in the same processes on the same samples. Times are relative to those of stage 0
in the same round. Bytes are those of the ranks' tensors and of the ledger.

    python benchmarks/zero_stages.py
    python benchmarks/zero_stages.py --micro-batches 4
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish, with_ranks  # noqa: E402

from meshwright.config.load import config_from  # noqa: E402
from meshwright.device import Device  # noqa: E402
from meshwright.dryrun.run_rank import state_bytes  # noqa: E402
from meshwright.dryrun.stand_ins import RandomTokens  # noqa: E402
from meshwright.engine.context import build_context  # noqa: E402
from meshwright.engine.providers import forward_step, model_provider  # noqa: E402
from meshwright.engine.step import Trainer  # noqa: E402
from meshwright.launch.processes import enter, find_place, leave  # noqa: E402
from meshwright.run.pretrain import build_modules  # noqa: E402

RANKS, STAGES = 2, (0, 1, 2, 3)


def make_trainer(stage: int, args: argparse.Namespace, rank: int) -> Trainer:
    config = config_from({
        "zero": {"stage": stage},
        "model": {
            "layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64, "seq": 256, "vocab": 8192,
            "norm": "rmsnorm", "mlp": "swiglu",
            "position": "rope", "bias": False, "tied_embeddings": False,
        },
        "train": {"global_batch": 2 * RANKS * args.micro_batches, "micro_batch": 2, "steps": 10**6},
        "lr": {"schedule": "constant"}, "data": {"prefixes": ["none"]}, "run": {"device": "cpu"},
    })  # fmt: skip
    ctx = build_context(config, rank, RANKS, Device("cpu"))
    data = RandomTokens(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rounds, micro_batches = args.rounds, args.micro_batches
    place = find_place()
    enter(place, "cpu", "gloo", 600.0)
    torch.set_num_threads(1)
    trainers = {stage: make_trainer(stage, args, place.rank) for stage in STAGES}
    results = {stage: [trainer.step() for _ in range(2)] for stage, trainer in trainers.items()}
    seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
    for number in range(rounds):
        for stage in STAGES if number % 2 == 0 else reversed(STAGES):
            begin = time.perf_counter()
            results[stage].append(trainers[stage].step())
            seconds[stage].append(time.perf_counter() - begin)
        if place.rank == 0:
            print(f"  round {number + 1}/{rounds}", end="\r", file=sys.stderr, flush=True)
    leave()
    assert len({tuple(round(r.loss, 4) for r in results[stage]) for stage in STAGES}) == 1, "the stages' losses differ"
    return [
        {
            "stage": stage, "micro_batches": micro_batches, "bytes": state_bytes(trainers[stage]),
            "wire_bytes": results[stage][-1].comm["dp"]["wire_bytes"] // RANKS,
            "time": statistics.median(a / b for a, b in zip(seconds[stage], seconds[0], strict=True)),
        }
        for stage in STAGES
    ]  # fmt: skip


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse(rounds=1, layers=1, hidden=64)
    found = with_ranks(RANKS, measure, args)
    print("| stage | weights | gradients | masters and moments | on a rank's wire, a step | time of a step |")
    print("|---|---|---|---|---|---|")
    for one in found:
        held, wire = one["bytes"], f"{one['wire_bytes'] / 2**20:.1f} MiB"
        sizes = (held["parameters"], held["gradients"], held["master"] + held["optimizer"])
        cells = [*(f"{size / 2**20:.1f} MiB" for size in sizes), wire, f"{one['time']:.2f}"]
        print(f"| {one['stage']} | {' | '.join(cells)} |")
    finish(args, found)


if __name__ == "__main__":
    main()
