"""Predicted against measured training steps: `meshwright comm bench` profiles the machine, the planner predicts.

Two CPU ranks (Gloo, fp32). In every round the machine is profiled as the command does it and then each shape is trained
for a few steps, data-parallel and tensor-parallel; the profile of a round predicts the steps of that round. Printed are
the medians over all rounds. Nothing of the profile comes from these shapes.

    python benchmarks/predicted_steps.py            # 6 shapes, dp=2 and tp=2, 3 rounds, about ten minutes
    python benchmarks/predicted_steps.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.multiprocessing as mp

from meshwright.bench.comm import joined, measure
from meshwright.bench.request import Request, parse_ops, parse_sizes
from meshwright.bench.step import RandomTokens, draw_on_device, release
from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.layout import Layout
from meshwright.plan.account import as_json
from meshwright.plan.cluster import cluster_from
from meshwright.plan.cost import predict_cost
from meshwright.plan.stack import OWN, STACKS
from meshwright.plan.workload import workload_of
from meshwright.train.context import build_context
from meshwright.train.gpt import forward_step, model_provider
from meshwright.train.pretrain import build_modules
from meshwright.train.step import Trainer

RANKS = 2
WITHIN = 0.25
# layers, hidden, heads, seq, vocabulary, sequences of a micro-batch, micro-batches of a rank, the model's family
SHAPES = (
    (2, 256, 4, 64, 4096, 4, 1, "gpt"),
    (4, 256, 4, 256, 8192, 2, 1, "llama"),
    (4, 512, 8, 128, 4096, 2, 2, "gpt"),
    (6, 512, 8, 256, 8192, 1, 2, "llama"),
    (2, 768, 12, 128, 8192, 2, 1, "gpt"),
    (6, 768, 12, 64, 2048, 4, 2, "gpt"),
)
FAMILIES = {
    "gpt": {"tied_embeddings": False},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False},
}


def config_for(shape: tuple[Any, ...], way: str) -> Config:
    layers, hidden, heads, seq, vocab, micro_batch, micro_batches, family = shape
    replicas = RANKS if way == "dp" else 1
    return config_from({
        "model": FAMILIES[family]
        | {"layers": layers, "hidden": hidden, "heads": heads, "seq": seq, "vocab": vocab},
        "layout": {"tp": RANKS if way == "tp" else 1},
        "train": {
            "micro_batch": micro_batch, "global_batch": micro_batch * micro_batches * replicas, "steps": 10**6,
        },
        "data": {"prefixes": ["made"]}, "run": {"device": "cpu"}, "lr": {"schedule": "constant"},
    })  # fmt: skip


def step_times(config: Config, rank: int, steps: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step after two to warm up, and the median of each phase."""
    ctx = build_context(config, rank, RANKS, Device("cpu"), RANKS)
    data = RandomTokens(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, data)
    results = [trainer.step() for _ in range(2 + steps)][2:]
    release(trainer)
    phases = {name: statistics.median(r.phases[name] for r in results) for name in results[0].phases}
    return [r.step_time_s for r in results], phases


def predicted(config: Config, cluster: dict[str, Any]) -> dict[str, Any]:
    cost = predict_cost(workload_of(config, RANKS, RANKS), cluster_from(cluster, "the profile"), STACKS[OWN])
    return as_json(cost)


def rank_main(rank: int, args: argparse.Namespace, port: int, queue: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ops = parse_ops(args.ops)
    request = Request(Layout(RANKS, node_size=RANKS), ("dp",), ops, parse_sizes(args.sizes), 0.1, device="cpu")
    seen: dict[str, dict[str, list[Any]]] = {}
    profiles = []
    with joined(request) as (mesh, device, place):
        for number in range(args.rounds):
            profile = measure(request, mesh, device, place.local_world, quiet=True)
            profiles.append({key: profile[key] for key in ("links", "rates", "cluster")})
            for way in args.ways:
                for index, shape in enumerate(SHAPES):
                    config = config_for(shape, way)
                    times, phases = step_times(config, rank, args.steps)
                    row = seen.setdefault(f"{way} {index}", {"measured": [], "predicted": [], "phases": []})
                    row["measured"] += times
                    row["predicted"].append(predicted(config, profile["cluster"]))
                    row["phases"].append(phases)
                    if rank == 0:
                        told = f"  round {number + 1}/{args.rounds}, {way} shape {index + 1}"
                        print(told, file=sys.stderr, flush=True)
    if rank == 0:
        queue.put(json.dumps({"rows": seen, "profiles": profiles}))


def summary(seen: dict[str, dict[str, list[Any]]]) -> list[dict[str, Any]]:
    rows = []
    for name, row in seen.items():
        way, index = name.split()
        measured = statistics.median(row["measured"])
        guess = statistics.median(p["step_time_s"] for p in row["predicted"])
        rows.append({
            "way": way, "shape": SHAPES[int(index)], "predicted_ms": 1e3 * guess, "measured_ms": 1e3 * measured,
            "ratio": guess / measured,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round and shape")
    parser.add_argument("--ways", nargs="*", choices=["dp", "tp"], default=["dp", "tp"])
    parser.add_argument("--ops", default="all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,send")
    parser.add_argument("--sizes", default="1K:64M")
    parser.add_argument("--json", action="store_true", help="print one JSON document, profiles included")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    before = os.getloadavg()
    ranks = mp.start_processes(rank_main, (args, port, queue), nprocs=RANKS, join=False, start_method="spawn")
    found = json.loads(queue.get())
    while not ranks.join():
        pass
    rows = summary(found["rows"])
    if args.json:
        print(json.dumps({"results": rows, "load_before": before, **found}))
        return
    print(f"load before: {before[0]:.2f}; {args.rounds} rounds of {args.steps} steps")
    print("     layers hidden  seq  vocab batch family  predicted  measured  ratio")
    for r in rows:
        layers, hidden, _, seq, vocab, batch, count, family = r["shape"]
        print(
            f"{r['way']:4} {layers:6} {hidden:6} {seq:4} {vocab:6} {batch:3}x{count} {family:>6} "
            f"{r['predicted_ms']:7.1f} ms {r['measured_ms']:6.1f} ms {r['ratio']:6.2f}"
        )
    for way in args.ways:
        mine = [r["ratio"] for r in rows if r["way"] == way]
        close = sum(abs(ratio - 1) <= WITHIN for ratio in mine)
        print(f"{way}=2: {close} of {len(mine)} within {100 * WITHIN:.0f} %")


if __name__ == "__main__":
    main()
