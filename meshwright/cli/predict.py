"""`meshwright predict`: compare predicted step times and memory with those of published runs. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from meshwright.disk import write
from meshwright.errors import UserError
from meshwright.plan.predictions import as_json, report, system_of
from meshwright.plan.published import NEEDED, TABLE, predict_row, predictions_csv, read_rows
from meshwright.show.progress import progress
from meshwright.show.terminal import say_next

EXAMPLES = f"""example:
  meshwright predict                                # the published runs that ship with the package
  meshwright predict --system torchtitan --full
  meshwright predict --model llama --json
  meshwright predict --csv my_runs.csv --out predictions.csv

A table of your own needs the columns id, {', '.join(NEEDED)}.
Empty cp, ep, vpp and kv_heads mean 1, 1, 1 and as many as heads. An empty vocab is 51200, an empty ffn 4 x hidden, and
an empty precision fp16. The measured time is step_time_s, tokens_s_gpu or tflops_per_gpu with flops_kind."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="NAME", help="only runs of this program, e.g. nanotron")
    parser.add_argument("--model", default="", metavar="NAME", help="only runs of models with this in their name")
    parser.add_argument("--full", action="store_true", help="show every run, and the errors by device and of memory")
    parser.add_argument("--csv", type=Path, default=TABLE, metavar="FILE", help="another table of runs, one per line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the predictions here, as CSV")


def run(args: argparse.Namespace) -> None:
    every = read_rows(args.csv)
    rows = [row for row in every if _has(system_of(row), args.system) and _has(row.get("model", ""), args.model)]
    if not rows:
        systems = ", ".join(sorted({system_of(row) for row in every}))
        raise UserError(f"no run has that system and model: the systems are {systems}")
    predictions = []
    with progress("predicting", len(rows), unit="runs") as advance:
        for row in rows:
            predictions.append(predict_row(row))
            advance(1)
    write(args.out, lambda: predictions_csv(predictions))
    if args.json:
        print(json.dumps(as_json(predictions)))
        return
    print(report(predictions, args.full))
    say_next("meshwright recipes" if args.full else "meshwright predict --full")


def _has(text: str, part: str) -> bool:
    return part.lower() in text.lower()
