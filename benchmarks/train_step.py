"""Tokens/s of our training step against plain PyTorch, side by side in one run.

One process is compared with a plain loop of the same model, two data-parallel ranks with torch's DDP, ZeRO stage 3 with
torch's fully_shard, and stages 1 and 2 with DeepSpeed's if that is installed. The two sides take turns, round by round,
in the same processes on the same samples, so that noise affects both equally. A ratio above 1 means ours is faster.

    python benchmarks/train_step.py                # all
    python benchmarks/train_step.py --against ddp  # two ranks against torch's DDP only
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish, with_ranks  # noqa: E402
from plain_gpt import DeepSpeedLoop, PlainLoop  # noqa: E402

from meshwright.config.load import config_from  # noqa: E402
from meshwright.config.sections import Config  # noqa: E402
from meshwright.device import Device  # noqa: E402
from meshwright.dryrun.stand_ins import RandomTokens  # noqa: E402
from meshwright.engine.batches import sample_ids  # noqa: E402
from meshwright.engine.context import build_context  # noqa: E402
from meshwright.engine.providers import forward_step, model_provider  # noqa: E402
from meshwright.engine.step import Trainer  # noqa: E402
from meshwright.launch.processes import enter, find_place, leave  # noqa: E402
from meshwright.run.pretrain import build_modules  # noqa: E402


@dataclass(frozen=True)
class Peer:
    name: str
    ranks: int
    stage: int = 0


PEERS = {
    "plain": Peer("a plain loop", 1),
    "ddp": Peer("torch DDP", 2),
    "deepspeed1": Peer("DeepSpeed ZeRO-1", 2, 1),
    "deepspeed2": Peer("DeepSpeed ZeRO-2", 2, 2),
    "fsdp": Peer("torch fully_shard", 2, 3),
}


def config_for(peer: Peer, args: argparse.Namespace) -> Config:
    ranks = peer.ranks
    return config_from({
        "zero": {"stage": peer.stage},
        "model": {
            "layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64, "seq": 256, "vocab": 8192,
            "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False,
        },
        "train": {"global_batch": args.micro_batch * ranks, "micro_batch": args.micro_batch, "steps": 10**6},
        "lr": {"schedule": "constant"}, "data": {"prefixes": ["none"]}, "run": {"device": "cpu"},
    })  # fmt: skip


def sides(config: Config, peer: str, rank: int, world: int) -> dict[str, Callable[[], float]]:
    """Return one step of each side, on the same samples."""
    data = RandomTokens(config.model.vocab, config.model.seq)
    ctx = build_context(config, rank, world, Device("cpu"))
    trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, data)
    plain: PlainLoop | DeepSpeedLoop
    if peer.startswith("deepspeed"):
        plain = DeepSpeedLoop(config.model, PEERS[peer].stage, config.train.micro_batch)
    else:
        plain = PlainLoop(config.model, wrap=peer.removeprefix("plain"))
    state = {"consumed": 0}

    def plain_step() -> float:
        ids = sample_ids(state["consumed"], 0, config.train.micro_batch, rank, world)
        samples = [data.sample(n) for n in ids]
        state["consumed"] += config.train.global_batch
        batch = [torch.from_numpy(np.stack([s[key] for s in samples])) for key in ("tokens", "labels")]
        return plain.step([(batch[0], batch[1])])

    return {"meshwright": lambda: trainer.step().loss, "plain": plain_step}


def measure(args: argparse.Namespace, peer: str) -> dict[str, Any]:
    """Run alternating rounds, and return the median ratio of tokens/s and its spread."""
    place = find_place()
    enter(place, "cpu", "gloo", 600.0)
    torch.set_num_threads(args.threads)  # after `enter`, which sets them to a rank's share of the cores
    config = config_for(PEERS[peer], args)
    steps = sides(config, peer, place.rank, place.world)
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds):
        order = list(steps) if number % 2 == 0 else list(reversed(steps))
        for name in order:
            begin = time.perf_counter()
            for _ in range(args.steps):
                steps[name]()
            seconds[name].append((time.perf_counter() - begin) / args.steps)
        if place.rank == 0:
            print(f"  round {number + 1}/{args.rounds}", end="\r", file=sys.stderr, flush=True)
    leave()
    ratios = sorted(p / o for p, o in zip(seconds["plain"], seconds["meshwright"], strict=True))
    quarter = statistics.quantiles(ratios, n=4)
    return {
        "ranks": PEERS[peer].ranks, "zero_stage": PEERS[peer].stage, "against": PEERS[peer].name, "rounds": args.rounds,
        "ratio": statistics.median(ratios), "ratio_q1": quarter[0], "ratio_q3": quarter[2],
        "ratio_min": ratios[0], "ratio_max": ratios[-1],
    }  # fmt: skip


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--against", choices=list(PEERS), nargs="*", default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and side")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse(rounds=2, steps=1, layers=1, hidden=64, micro_batch=1)
    chosen = [peer for peer in args.against if not peer.startswith("deepspeed") or find_spec("deepspeed")]
    for peer in set(args.against) - set(chosen):
        print(f"{PEERS[peer].name} is left out: deepspeed is not installed", file=sys.stderr)
    results = []
    for peer in chosen:
        ranks = PEERS[peer].ranks
        results.append(measure(args, peer) if ranks == 1 else with_ranks(ranks, measure, args, peer))
    finish(args, results, rows=results)


if __name__ == "__main__":
    main()
