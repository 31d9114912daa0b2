"""The loss of the same model on the same text in bf16 and in fp8: same weights, same samples, 200 steps.

    meshwright data prepare stdlib --out data-cache/stdlib --tokenizer train:2048
    python benchmarks/fp8_loss.py data-cache/stdlib

The result has the loss curves and, for each, the mean of the last ten steps against that of bf16. The second bf16 run
differs from the first only in its rounding (its blocks are not compiled), so any run may deviate as much as it does.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import torch
from common import BenchParser, finish, tokens

from meshwright.bench.models import LLAMA_ARCHITECTURE
from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.dryrun.stand_ins import draw_on_device
from meshwright.engine.context import build_context
from meshwright.engine.datasets import datasets_of
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.run.loop import LaunchAhead
from meshwright.run.pretrain import build_modules

RUNS = {
    "bf16": {"precision": "bf16"},
    "bf16, not compiled": {"precision": "bf16", "compile": "false"},
    "fp8": {"precision": "fp8"},
    "fp8 by rows": {"precision": "fp8", "fp8_scale": "row"},
}


def losses(prefix: str, train: dict[str, str], args: argparse.Namespace) -> list[float]:
    config = config_from({
        "model": LLAMA_ARCHITECTURE | {
            "layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64, "kv_heads": args.hidden // 128,
            "vocab": 2048, "seq": args.seq,
        },
        "train": train | {
            "micro_batch": args.batch, "global_batch": args.batch, "steps": args.steps, "seed": args.seed,
        },
        "optimizer": {"lr": args.lr}, "lr": {"warmup": args.warmup, "min": args.lr / 10},
        "data": {"prefixes": [prefix]}, "run": {"device": args.device},
    })  # fmt: skip
    torch._dynamo.reset()
    gc.collect()
    ctx = build_context(config, 0, 1, Device.choose(args.device))
    train_data, _, _ = datasets_of(config)
    trainer = Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, train_data)
    ahead = LaunchAhead(trainer, lambda step: step == args.steps)
    return [ahead.next(False).loss for _ in range(args.steps)]


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("prefix")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1.5e-4)
    parser.add_argument("--warmup", type=int, default=100, help="steps; a short one lets rounding alone change the run")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights")
    parser.add_argument("--device", default="auto")
    args = parser.parse(prefix=None, steps=10, layers=1, hidden=128, seq=16, batch=1, warmup=2, device="cpu")
    rows: list[dict[str, Any]] = []
    with tokens(args) as prefix:
        for name, train in RUNS.items():
            found = losses(prefix, train, args)
            last = statistics.mean(found[-10:])
            base = rows[0]["last"] if rows else last
            rows.append({"run": name, "last": last, "against_bf16": last / base - 1, "losses": found})
    finish(args, rows, rows=rows)


if __name__ == "__main__":
    main()
