"""Predicted and measured training steps: `meshwright comm bench` profiles the machine, and the planner predicts.

There are two CPU ranks (Gloo, fp32). In every round the machine is profiled as the command does it. Then each shape is
trained for a few steps, data-parallel and tensor-parallel. The profile of a round predicts the steps of that round, and
the result has the medians over all rounds, so that changes of the machine's speed affect both equally. Nothing in the
profile comes from these shapes. On a machine that others use too, `--calm` waits for idle moments and repeats disturbed
measurements.

    python benchmarks/predicted_steps.py            # 6 shapes, dp=2 and tp=2, about five minutes
    python benchmarks/predicted_steps.py --calm --json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from common import BenchParser, finish

from meshwright.bench.comm import join_world, measure
from meshwright.bench.request import OPS, MeasurementRequest, parse_sizes
from meshwright.comm.mesh import Mesh
from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens, draw_on_device
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.plan.account import as_json
from meshwright.plan.cluster import cluster_from
from meshwright.plan.cost import predict_cost
from meshwright.plan.job import job_of
from meshwright.plan.stack import CPU
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout import Layout

RANKS = 2
WITHIN = 0.25
QUIET = 0.06  # processors that other programs may keep busy
# layers, hidden, heads, seq, vocabulary, sequences of a micro-batch, micro-batches of a rank, the model's family
SHAPES = (
    (2, 256, 4, 64, 4096, 4, 1, "gpt"),
    (4, 256, 4, 256, 8192, 2, 1, "llama"),
    (4, 512, 8, 128, 4096, 2, 2, "gpt"),
    (6, 512, 8, 256, 8192, 1, 2, "llama"),
    (2, 768, 12, 128, 8192, 2, 1, "gpt"),
    (6, 768, 12, 64, 2048, 4, 2, "gpt"),
)
FAMILIES: dict[str, dict[str, Any]] = {
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


def make_trainer(config: Config, rank: int) -> Trainer:
    ctx = build_context(config, rank, RANKS, Device("cpu"), RANKS)
    data = RandomTokens(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, data)


def predicted(config: Config, cluster: dict[str, Any]) -> dict[str, Any]:
    cost = predict_cost(job_of(config, RANKS, CPU, cluster_node=RANKS, host=True), cluster_from(cluster, "the profile"))
    return as_json(cost)


def busy_seconds() -> float:
    """Return the busy seconds of all cores since boot, as Linux counts them, with the time taken by the host's other
    guests.
    """
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *rest = (int(word) for word in file.readline().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class Calm:
    """A runner of work while no other program uses the machine. It waits for idle moments, and repeats disturbed
    work.
    """

    def __init__(self, mesh: Mesh, device: Device, wanted: bool) -> None:
        self.mesh, self.device, self.wanted = mesh, device, wanted
        self.disturbed = 0

    def others(self, begin: tuple[float, float, float]) -> float:
        """Return how many cores other programs kept busy since `begin`. Both ranks get the same number."""
        world, device = self.mesh.world, self.device.torch
        own = torch.tensor([time.process_time() - begin[1]], dtype=torch.float64, device=device)
        world.all_reduce(own)
        share = (busy_seconds() - begin[0] - float(own)) / (time.perf_counter() - begin[2])
        return world.max_over_ranks(share, device)

    def __call__(self, work: Callable[[], Any]) -> Any:
        while True:
            while self.wanted:
                begin = busy_seconds(), time.process_time(), time.perf_counter()
                time.sleep(1.0)
                if self.others(begin) < QUIET:
                    break
            begin = busy_seconds(), time.process_time(), time.perf_counter()
            result = work()
            if not self.wanted or self.others(begin) < QUIET:
                return result
            self.disturbed += 1


def steps_of(trainer: Trainer, count: int) -> list[Any]:
    return [trainer.step() for _ in range(count)]


def rank_main(rank: int, args: argparse.Namespace, port: int, queue: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    layout = Layout(RANKS, node_size=RANKS)
    request = MeasurementRequest(layout, ("dp",), OPS, parse_sizes(args.sizes), args.seconds, device="cpu")
    jobs = {f"{way} {n}": config_for(shape, way) for way in args.ways for n, shape in enumerate(SHAPES[: args.shapes])}
    seen: dict[str, dict[str, list[Any]]] = {name: {"measured": [], "predicted": [], "phases": []} for name in jobs}
    profiles = []
    with join_world(request) as (mesh, device, place):
        trainers = {name: make_trainer(config, rank) for name, config in jobs.items()}
        for trainer in trainers.values():
            trainer.step()
        calm = Calm(mesh, device, args.calm)
        for number in range(args.rounds):
            found = calm(lambda: measure(request, mesh, device, place.local_world, quiet=True))
            profiles.append({key: found[key] for key in ("links", "rates", "cluster")})
            for name, config in jobs.items():
                # The first step is not counted: it brings caches and the allocator to this shape.
                results = calm(partial(steps_of, trainers[name], 1 + args.steps))[1:]
                seen[name]["measured"] += [result.step_time_s for result in results]
                seen[name]["phases"] += [result.phases for result in results]
                seen[name]["predicted"].append(predicted(config, found["cluster"]))
            if rank == 0:
                print(f"  round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        queue.put(json.dumps({"rows": seen, "profiles": profiles, "disturbed": calm.disturbed}))


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
    parser = BenchParser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a round and shape")
    parser.add_argument("--ways", nargs="*", choices=["dp", "tp"], default=["dp", "tp"])
    parser.add_argument("--sizes", default="1K,8K,64K,256K,1M,4M,16M,64M", help="as of the command")
    parser.add_argument("--seconds", type=float, default=0.05, help="as of the command")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="number of shapes to measure")
    parser.add_argument("--calm", action="store_true", help="measure while no other program uses the machine (Linux)")
    args = parser.parse(rounds=1, steps=1, sizes="1K,64K", seconds=0.001, shapes=1)
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
    repeated = f", {found['disturbed']} measurements repeated because others used the machine" if args.calm else ""
    print(f"load before: {before[0]:.2f}; {args.rounds} rounds of {args.steps} steps{repeated}")
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
    finish(args, {"results": rows, "load_before": before, **found})


if __name__ == "__main__":
    main()
