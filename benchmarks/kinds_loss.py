"""Small models that are no GPTs learn from the same text on a CPU: the curves of docs/models.md.

    meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
    python benchmarks/kinds_loss.py data-cache/stdlib --svg docs/kinds_loss.svg

The result is a table of the loss in the first step, its means over 20 steps, and the final loss of the validation
samples.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from common import BenchParser, finish, tokens

from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.engine.datasets import datasets_of
from meshwright.engine.output import LOSS
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.run.pretrain import build_modules
from meshwright.show.chart import Chart, svg

SIZES = {"hidden": 64, "heads": 4, "vocab": 2176, "seq": 64, "dropout": 0.0}  # room for special tokens and sentinels
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "bert", "layers": 2},
    "t5": {"kind": "t5", "layers": 4},
    "glm": {"kind": "glm", "layers": 2},
}
MEAN = 20


def curve(prefix: str, model: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """Return the losses of all steps, and the loss of the validation samples with its other terms."""
    config = config_from({
        "model": SIZES | model, "train": {"steps": steps, "global_batch": 32, "micro_batch": 32},
        "optimizer": {"lr": 2e-3}, "lr": {"schedule": "cosine", "warmup": 20, "min": 2e-4},
        "data": {"prefixes": [prefix], "split": [0.9, 0.1, 0]}, "run": {"device": "cpu"},
    })  # fmt: skip
    ctx = build_context(config, 0, 1, Device.choose("cpu"))
    train_data, valid_data, _ = datasets_of(config)
    trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, train_data, valid_data)
    losses = [trainer.step() for _ in range(steps)]
    found = trainer.validate() or {}
    return [result.losses.get(LOSS, result.loss) for result in losses], list(found.get("losses", found).values())


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("prefix")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the losses")
    args = parser.parse(prefix=None, steps=20)
    lines: dict[str, list[tuple[float, float]]] = {}
    at = [step for step in (50, 100, 200, 300, 400, 500, 600) if step <= args.steps]
    print("| kind | step 1 |", " | ".join(map(str, at)), "| validation |")
    print("|---|" + "---|" * (len(at) + 2))
    found = []
    for kind in args.kinds:
        with tokens(args) as prefix:
            losses, validation = curve(prefix, KINDS[kind], args.steps)
        found.append({"kind": kind, "losses": losses, "validation": validation})
        ends = range(MEAN, args.steps + 1, MEAN)
        lines[kind] = [(end, statistics.fmean(losses[end - MEAN : end])) for end in ends]
        means = [statistics.fmean(losses[step - MEAN : step]) for step in at]
        print(f"| {kind} | {losses[0]:.2f} |", " | ".join(f"{mean:.2f}" for mean in means),
              f"| {', '.join(f'{loss:.2f}' for loss in validation)} |", flush=True)  # fmt: skip
    finish(args, found)
    if args.svg:
        chart = Chart(f"Training loss, means of {MEAN} steps", "step", "loss", lines)
        args.svg.write_text(svg(chart), encoding="utf-8")


if __name__ == "__main__":
    main()
