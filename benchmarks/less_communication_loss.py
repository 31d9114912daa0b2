"""The loss if ranks send less: compressed gradients and rare synchronisation of replicas, compared with plain sums.

    meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
    python benchmarks/less_communication_loss.py data-cache/stdlib --results runs.jsonl --svg losses.svg

A small GPT trains on real text, on four processes of a CPU, once for each seed and technique. A seed decides the
weights and the order of the samples, and all techniques see the same samples. The result is a table: the validation
loss after the last step, its difference to the plain run of the same seed, and the bytes that all ranks sent for
gradients and parameters in the whole run. Runs that the file of results already holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import BenchParser, finish, tokens

from meshwright.show.chart import Chart, svg

RANKS, STEPS, SEEDS = 4, 600, (1, 2, 3)
MEAN = 15  # steps over which each point of the drawing is averaged
SHAPE = [
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab=2048", "model.seq=64", "model.norm=rmsnorm",
    "model.position=rope", "model.bias=false", "train.global_batch=16", "train.micro_batch=4", "optimizer.lr=3e-3",
    "lr.warmup=30", "lr.min=3e-4", "data.split=0.9,0.1,0", "run.eval_samples=512", "run.device=cpu",
    "run.tensorboard=false",
]  # fmt: skip
WARMUP = "comm.reduce.warmup_steps=90"
TECHNIQUES: dict[str, list[str]] = {
    "plain": [],
    "int8": ["comm.reduce.kind=int8"],
    "PowerSGD, rank 8, 60 plain steps first": [
        "comm.reduce.kind=powersgd", "comm.reduce.rank=8", "comm.reduce.warmup_steps=60",
    ],
    "one bit, 90 plain steps first": ["comm.reduce.kind=onebit", WARMUP],
    "top-k 1 %, 90 plain steps first": ["comm.reduce.kind=topk", "comm.reduce.ratio=0.01", WARMUP],
    "local SGD (averages), H = 20": [f"layout.replicas={RANKS}", "train.local.steps=20", "train.local.outer=average"],
    "DiLoCo, H = 20": [f"layout.replicas={RANKS}", "train.local.steps=20"],
    "DiLoCo, H = 20, 4 fragments, delay 2, int4": [
        f"layout.replicas={RANKS}", "train.local.steps=20", "train.local.fragments=4", "train.local.delay=2",
        "train.local.compress.kind=int4",
    ],
}  # fmt: skip
# The techniques that are drawn, with their names in the drawing. (int8 would coincide with the plain line.)
DRAWN = dict(zip(TECHNIQUES, ("plain", "", "PowerSGD 8", "one bit", "top-k 1 %", "averages, H = 20", "DiLoCo, H = 20"),
                 strict=False))  # fmt: skip
SUMS = ("dp", "replicas")  # the axes over which gradients and parameters are summed

Run = dict[str, Any]


def run(prefix: str, name: str, seed: int, steps: int) -> Run:
    """Train once, and return the losses and bytes of the run."""
    with tempfile.TemporaryDirectory() as folder:
        empty, out = Path(folder) / "empty.yaml", Path(folder) / "run"
        empty.write_text("")
        given = [f"data.prefixes={prefix}", f"train.steps={steps}", f"run.dir={out}", f"train.seed={seed}"]
        command = [sys.executable, "-m", "meshwright", "train", str(empty), "--nproc", str(RANKS), *SHAPE, *given]
        subprocess.run([*command, *TECHNIQUES[name]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        metrics, valid = (
            [json.loads(line) for line in (out / file).read_text().splitlines()]
            for file in ("metrics.jsonl", "validation.jsonl")
        )
    sent = sum(line["comm"].get(axis, {}).get("wire_bytes", 0) for line in metrics for axis in SUMS)
    return {
        "technique": name, "seed": seed, "validation": valid[-1]["loss"], "losses": [line["loss"] for line in metrics],
        "sent": sent, "step_s": statistics.median(line["step_time_s"] for line in metrics),
    }  # fmt: skip


def all_runs(prefix: str, args: argparse.Namespace) -> list[Run]:
    results: Path = args.results
    found: list[Run] = []
    for seed in args.seeds:
        for name in args.techniques:
            there = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
            one = next((each for each in there if (each["technique"], each["seed"]) == (name, seed)), None)
            if one is None:
                one = run(prefix, name, seed, args.steps)
                with results.open("a") as file:
                    file.write(json.dumps(one) + "\n")
                print(f"{name}, seed {seed}: {one['validation']:.4f}", file=sys.stderr, flush=True)
            found.append(one)
    return found


def spread(values: list[float]) -> str:
    """Return a mean, and the standard deviation over the seeds, as text."""
    return f"{statistics.mean(values):+.4f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.4f}"


def table(runs: list[Run]) -> str:
    plain = {each["seed"]: each for each in runs if each["technique"] == "plain"}
    lines = ["| technique | validation loss | against plain, same seed | sent | saved |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(each["technique"] for each in runs):
        of_name = [each for each in runs if each["technique"] == name]
        losses = [each["validation"] for each in of_name]
        against = [each["validation"] - plain[each["seed"]]["validation"] for each in of_name]
        sent, whole = of_name[0]["sent"], plain[of_name[0]["seed"]]["sent"]
        loss = spread(losses).removeprefix("+")
        other = "-" if name == "plain" else spread(against)
        lines.append(f"| {name} | {loss} | {other} | {sent / 2**20:,.1f} MiB | {1 - sent / whole:.1%} |")
    return "\n".join(lines)


def averaged(runs: list[Run], name: str) -> list[tuple[float, float]]:
    """Return the training loss after the steep beginning, as means over the seeds and groups of steps."""
    losses = [statistics.mean(at) for at in zip(*(r["losses"] for r in runs if r["technique"] == name), strict=True)]
    return [(n + MEAN, statistics.mean(losses[n : n + MEAN])) for n in range(6 * MEAN, len(losses) - MEAN + 1, MEAN)]


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("prefix", help="token files, without .bin")
    parser.add_argument("--results", type=Path, default=Path("less_communication_loss.jsonl"), metavar="FILE")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--techniques", nargs="+", choices=list(TECHNIQUES), default=list(TECHNIQUES))
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the training losses")
    args = parser.parse(prefix=None, seeds=[1], steps=32, techniques=["plain", "int8"], results=Path(os.devnull))
    with tokens(args) as prefix:
        runs = all_runs(prefix, args)
    print(table(runs))
    finish(args, runs)
    if args.svg:
        lines = {short: averaged(runs, name) for name, short in DRAWN.items() if short}
        title = f"Training loss, means of {MEAN} steps and {len(args.seeds)} seeds"
        args.svg.write_text(svg(Chart(title, "step", "loss", lines)))


if __name__ == "__main__":
    main()
