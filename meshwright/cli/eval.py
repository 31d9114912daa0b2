"""`meshwright eval`: the perplexity of a trained model on token files, or what it does at tasks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from meshwright.cli import eval_tasks
from meshwright.cli.ranks import start
from meshwright.cli.reading import resolve, sections_of
from meshwright.config.rules import READING_RULES, check
from meshwright.config.sections import Config
from meshwright.data.stream import SPLIT_NAMES, OneEpoch
from meshwright.data.token_file import TokenFile
from meshwright.engine.datasets import Checked, datasets_of
from meshwright.errors import UserError, plural
from meshwright.launch.launch import warm_up
from meshwright.launch.processes import find_place
from meshwright.record.companions import check_tokenizer
from meshwright.spec.traffic.counts import LEARNED, counted_as

EXAMPLES = """example:
  meshwright eval runs/demo --samples 64
  meshwright eval runs/demo --split test
  meshwright eval runs/mine@100 --data data/other --nproc 2 layout.tp=2 --json
  meshwright eval runs/tuned --tasks hellaswag,arc_easy --limit 200"""
DEFAULT_SAMPLES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]|HF-FOLDER")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change, e.g. layout.tp=2")
    data = "token files to evaluate on as a whole, instead of a part of the run's own data"
    parser.add_argument("--data", action="append", metavar="PREFIX", help=data)
    split = "the part of the run's data, as its data.split cuts them (default: valid)"
    parser.add_argument("--split", choices=SPLIT_NAMES, help=split)
    samples = "sequences to look at (default: 64); where the data hold fewer, each is looked at once"
    parser.add_argument("--samples", type=int, default=0, metavar="N", help=samples)
    parser.add_argument("--nproc", type=int, default=1, help="local ranks (default 1)")
    eval_tasks.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.nproc < 1 or args.samples < 0:
        raise UserError("--nproc must be at least 1 and --samples at least 0")
    if args.data and args.split:
        raise UserError("--split names a part of the run's own data, and --data other files: leave one of them out")
    if args.nproc > 1:
        warm_up()
    args.source = resolve(args.source)
    from meshwright.infer.evaluate import config_with, open_model

    world = find_place().world if args.nproc == 1 else args.nproc
    config = config_with(open_model(args.source)[1], sections_of(args.overrides, world, args.data))
    if config.compares and not args.tasks:
        raise UserError(
            f"{args.source} was trained with tune.loss={config.tune.loss}, which compares with the frozen weights, and "
            "eval reads adapters and weights as one model: name conversations with --data PREFIX data.objective=chat"
        )
    check(config, world, READING_RULES)
    if args.tasks:
        eval_tasks.check(args, config)
        return start(args.nproc, eval_tasks.tasks_rank, args)
    check_tokenizer(Path(args.source), config.data)
    data_of(args, config, 0)  # finds mistakes before ranks start; this draws no sample yet
    return start(args.nproc, evaluate_rank, args)


def data_of(args: argparse.Namespace, config: Config, most: int) -> Checked:
    """Returns the samples to evaluate on: at most one epoch of the named files, or of a split of the run's own data."""
    from meshwright.interop.hf import NO_DATA

    if config.data.prefixes == (NO_DATA,):
        raise UserError(f"{args.source} comes without data: name token files with --data PREFIX")
    for prefix in args.data or ():
        tokens = TokenFile(prefix).token_count
        if tokens <= config.model.seq and config.objective == "causal":
            raise UserError(
                f"{prefix} holds {tokens} tokens, and one sample of the model takes {config.model.seq + 1}: name a "
                "longer file with --data"
            )
    part = "train" if args.data else args.split or "valid"  # named files are not split: `train` has all of them
    data = dict(zip(SPLIT_NAMES, datasets_of(config), strict=True))[part]
    if data is None:
        raise UserError(
            f"the run has no {part} data (data.split={list(config.data.split)}): choose another part with --split, "
            "or name token files with --data PREFIX"
        )
    return Checked(OneEpoch(data.dataset, most), config.model.vocab)


def evaluate_rank(args: argparse.Namespace) -> None:
    from meshwright.infer.evaluate import evaluate, with_model

    def use(ctx: Any, modules: Any, place: Any) -> None:
        data = data_of(args, ctx.config, args.samples or DEFAULT_SAMPLES)
        count = data.dataset.samples
        found = evaluate(ctx, modules, data, count)
        if place.rank:
            return
        if args.samples > count:
            print(f"(the data hold {count:,} samples, and each was looked at once)", file=sys.stderr)
        unit = counted_as(ctx.config)
        likely = f"  perplexity {found['perplexity']:.2f}" if unit == LEARNED else ""
        over = plural(found["tokens"], "token") if unit == LEARNED else f"{found['tokens']:,} {unit}"
        words = f"loss {found['loss']:.4f}{likely}  over {over}"
        print(json.dumps(found) if args.json else words, flush=True)

    with_model(args.source, sections_of(args.overrides, find_place().world, args.data), use)
