"""A small mixture of experts compared with the dense model of as many active parameters, on the demo's text.

    meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
    python benchmarks/experts_loss.py data-cache/stdlib --svg losses.svg

Both train on the same samples in the same order for the same number of steps, on one CPU core. The result, in Markdown,
has the validation losses and, for the mixture, the rows of the busiest expert over the mean: per step in the block
where that ratio is largest, and over all steps after the warm-up together. The drawing has the training losses without
the balance loss. No sample is seen twice.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import BenchParser, finish, tokens

from meshwright.show.chart import Chart, svg

WARMUP = 100  # steps before balance is counted
MEAN = 15  # steps over which each point of the drawing is averaged
SHAPE = [
    "model.layers=4", "model.hidden=128", "model.heads=4", "model.vocab=2048", "model.seq=128", "model.ffn=384",
    "model.norm=rmsnorm", "model.mlp=swiglu", "model.position=rope", "model.bias=false", "train.global_batch=16",
    "train.micro_batch=16", "optimizer.lr=3e-3", "lr.warmup=30", "lr.min=3e-4", "data.split=0.9,0.1,0",
    "run.eval_samples=256", "run.device=cpu",
]  # fmt: skip
# Three of eight experts and one for all tokens are used, each a quarter as wide as the dense MLP. With weights that add
# up to 3, they begin as large as it.
MIXTURE = ["count=8", "top_k=3", "shared=1", "ffn=96", "scale=3", "aux_loss=0.1"]

TINY = [
    "model.layers=1", "model.hidden=32", "model.heads=2", "model.seq=32", "train.global_batch=4", "train.micro_batch=4",
    "lr.warmup=2",
]  # fmt: skip

Lines = list[dict[str, Any]]


def run(prefix: str, steps: int, folder: Path, words: list[str]) -> tuple[Lines, Lines]:
    """Train, and return the lines of metrics.jsonl and of validation.jsonl."""
    given = [f"data.prefixes={prefix}", f"train.steps={steps}", f"run.dir={folder}", f"run.eval_every={steps // 3}"]
    (folder.parent / "empty.yaml").write_text("")
    command = [sys.executable, "-m", "meshwright", "train", str(folder.parent / "empty.yaml"), *SHAPE, *given, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    read = [(folder / name).read_text().splitlines() for name in ("metrics.jsonl", "validation.jsonl")]
    metrics, validation = ([json.loads(line) for line in lines] for lines in read)
    return metrics, validation


def averaged(metrics: Lines) -> list[tuple[float, float]]:
    """Return (last step, mean loss of the next token) for groups of steps, after the steep beginning."""
    losses = [line.get("losses", line)["loss"] for line in metrics]
    return [(n + MEAN, statistics.mean(losses[n : n + MEAN])) for n in range(3 * MEAN, len(losses) - MEAN + 1, MEAN)]


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("prefix", help="token files, without .bin")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before balance is counted")
    parser.add_argument("--words", nargs="*", default=[], help="further keys of the config")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the losses")
    args = parser.parse(prefix=None, steps=12, warmup=6, words=TINY)
    seed = f"train.seed={args.seed}"
    with tempfile.TemporaryDirectory() as folder, tokens(args) as prefix:
        plain, dense = run(prefix, args.steps, Path(folder) / "dense", [seed, *args.words])
        words = [seed, *(f"model.experts.{word}" for word in MIXTURE), *args.words]
        metrics, mixed = run(prefix, args.steps, Path(folder) / "mixture", words)
    report(dense, mixed, metrics, args.warmup)
    finish(args, {"dense": dense, "mixture": mixed})
    if args.svg:
        lines = {"dense": averaged(plain), "mixture": averaged(metrics)}
        args.svg.write_text(svg(Chart(f"Training loss, means of {MEAN} steps", "step", "loss", lines)))


def report(dense: Lines, mixed: Lines, metrics: Lines, warmup: int) -> None:
    print("| validation loss at step | dense | mixture |\n|---|---|---|")
    for one, other in zip(dense, mixed, strict=True):
        print(f"| {one['step']} | {one['loss']:.4f} | {other['loss']:.4f} |")
    later = [line["experts"] for line in metrics[warmup:]]
    busiest = [max(line["busiest"]) for line in later]
    rows = np.array([line["rows"] for line in later]).sum(0)
    print(
        f"\nbusiest expert over the mean, after {warmup} steps: {statistics.mean(busiest):.2f} per step in the worst "
        f"block (1.5 or more in {sum(each >= 1.5 for each in busiest)} of {len(busiest)} steps), "
        f"{statistics.mean(busiest[-50:]):.2f} over the last 50 steps, {(rows.max(1) / rows.mean(1)).max():.2f} over "
        "all these steps together"
    )


if __name__ == "__main__":
    main()
