"""`meshwright eval`: measure a trained model's perplexity on token files, or its results on lm-eval's tasks."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from meshwright.cli.chat import template_of
from meshwright.cli.generate import tokenizer_of
from meshwright.config.rules import READING_RULES, check
from meshwright.config.sections import Config
from meshwright.data.stream import SPLIT_NAMES, FirstEpoch
from meshwright.data.token_file import TokenFile
from meshwright.engine.datasets import CheckedDataset, datasets_of
from meshwright.errors import UserError, plural
from meshwright.infer.reading import add_ema, resolve, sections_of
from meshwright.infer.texts import end_tokens
from meshwright.launch.launch import start, warm_up
from meshwright.launch.processes import find_place
from meshwright.record.companions import check_tokenizer
from meshwright.show.terminal import say_next
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
    data = "evaluate on the whole of these token files instead of a part of the run's own data"
    parser.add_argument("--data", action="append", metavar="PREFIX", help=data)
    split = "the part of the run's data, as its data.split cuts them (default: valid)"
    parser.add_argument("--split", choices=SPLIT_NAMES, help=split)
    samples = "sequences to evaluate on (default: 64); if the data hold fewer, each is used once"
    parser.add_argument("--samples", type=int, default=0, metavar="N", help=samples)
    parser.add_argument("--nproc", type=int, default=1, help="local ranks (default 1)")
    add_ema(parser)
    add_task_arguments(parser)


def run(args: argparse.Namespace) -> int:
    prepare(args)
    return start(args.nproc, tasks_rank if args.tasks else evaluate_rank, args)


def prepare(args: argparse.Namespace) -> None:
    """Find the model and the data, and report every mistake that can be found before ranks start."""
    if args.nproc < 1 or args.samples < 0:
        raise UserError("--nproc must be at least 1 and --samples at least 0")
    if args.data and args.split:
        raise UserError("--split names a part of the run's own data, and --data other files: leave one of them out")
    if args.nproc > 1:
        warm_up()
    args.source = resolve(args.source)
    from meshwright.infer.evaluate import config_with, open_model

    world = find_place().world if args.nproc == 1 else args.nproc
    config = config_with(open_model(args.source, args.ema)[1], sections_of(args.overrides, world, args.data))
    if config.compares and not args.tasks:
        raise UserError(
            f"{args.source} was trained with tune.loss={config.tune.loss}, which compares with the frozen weights, and "
            "eval reads adapters and weights as one model: name conversations with --data PREFIX data.objective=chat"
        )
    check(config, world, READING_RULES)
    if args.tasks:
        check_tasks(args, config)
        return
    check_tokenizer(Path(args.source), config.data)
    # Mistakes in the data are found here, before ranks start. This draws no sample yet.
    data_of(args, config, 0)


def data_of(args: argparse.Namespace, config: Config, most: int) -> CheckedDataset:
    """Return the samples to evaluate on: at most one epoch of the named files, or of a part of the run's own data.
    `most`: the largest number of samples."""
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
    # Named files are not split: `train` has all of them.
    part = "train" if args.data else args.split or "valid"
    data = dict(zip(SPLIT_NAMES, datasets_of(config), strict=True))[part]
    if data is None:
        raise UserError(
            f"the run has no {part} data (data.split={list(config.data.split)}): choose another part with --split, "
            "or name token files with --data PREFIX"
        )
    return CheckedDataset(FirstEpoch(data.dataset, most), config.model.vocab)


def evaluate_rank(args: argparse.Namespace) -> None:
    """Evaluate on token files as one rank; rank 0 prints the result."""
    found, unit = evaluated(args)
    if find_place().rank:
        return
    if args.samples > found["samples"]:
        print(f"(the data hold {found['samples']:,} samples, and each was used once)", file=sys.stderr)
    likely = f"  perplexity {found['perplexity']:.2f}" if unit == LEARNED else ""
    over = plural(found["tokens"], "token") if unit == LEARNED else f"{found['tokens']:,} {unit}"
    words = f"loss {found['loss']:.4f}{likely}  over {over}"
    print(json.dumps(found) if args.json else words, flush=True)
    if not args.json:
        source = shlex.quote(args.source)
        say_next(f'meshwright generate {source} --prompt "..."' if unit == LEARNED else f"meshwright inspect {source}")


def evaluated(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Evaluate on token files as one rank. Return the figures, and what their tokens count."""
    from meshwright.infer.evaluate import evaluate, with_model

    def use(ctx: Any, modules: Any, place: Any) -> tuple[dict[str, Any], str]:
        data = data_of(args, ctx.config, args.samples or DEFAULT_SAMPLES)
        return evaluate(ctx, modules, data, data.dataset.samples), counted_as(ctx.config)

    found: tuple[dict[str, Any], str]
    found = with_model(args.source, sections_of(args.overrides, find_place().world, args.data), use, args.ema)
    return found


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for lm-eval's tasks."""
    tasks = parser.add_argument_group("tasks of lm-eval, instead of token files (pip install meshwright[tasks])")
    tasks.add_argument("--tasks", default="", metavar="A,B", help="names of tasks, e.g. hellaswag,arc_easy")
    tasks.add_argument("--task-folder", action="append", default=[], metavar="DIR", help="a folder with your own tasks")
    tasks.add_argument("--shots", type=int, metavar="N", help="examples before each question (default: the task's own)")
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    tasks.add_argument("--chat", action="store_true", help="ask questions as messages, through the chat template")
    tasks.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    tasks.add_argument("--tokenizer", metavar="T", help="another tokenizer than the one beside the model")
    tasks.add_argument("--batch", type=int, default=8, metavar="N", help="texts to generate together (default 8)")


def check_tasks(args: argparse.Namespace, config: Config) -> None:
    """Refuse options and configs that can't run tasks, before ranks start."""
    if args.data or args.split or args.samples:
        raise UserError("--tasks brings its own data: leave --data, --split and --samples out")
    if args.batch < 1 or (args.limit or 1) < 1 or (args.shots or 0) < 0:
        raise UserError("--batch and --limit must be at least 1 and --shots at least 0")
    if not config.continues_text:
        raise UserError(f"{args.source} does not continue texts, as tasks ask: evaluate it on token files")
    if config.layout.tp_grid:
        raise UserError("tasks can't be run on a grid of ranks: leave layout.tp_grid out, and set layout.tp")
    if tokenizer_of(args, config) is None:
        raise UserError("no tokenizer is known for this model: name one with --tokenizer")
    if args.chat:
        template_of(args, config)


def tasks_rank(args: argparse.Namespace) -> None:
    """Run lm-eval's tasks as one rank; rank 0 prints the results."""
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.harness import run_tasks

    def use(ctx: Any, modules: Any, place: Any) -> None:
        tokenizer = tokenizer_of(args, ctx.config)
        folder = Path(args.source)
        template = template_of(args, ctx.config) if args.chat else None
        ends = end_tokens(folder, tokenizer)
        found = run_tasks(
            lambda kind: kind(ctx, modules, tokenizer, folder, ends, template, args.batch),
            [name for name in args.tasks.split(",") if name], args.task_folder, args.shots, args.limit, args.chat,
            quiet=place.rank > 0,
        )  # fmt: skip
        if place.rank == 0:
            show_tasks(found, args.json)

    with_model(args.source, sections_of(args.overrides, find_place().world), use, args.ema)


def show_tasks(found: dict[str, Any], as_json: bool) -> None:
    """Print the metrics of each task with their standard errors."""
    if as_json:
        print(json.dumps(found, default=str), flush=True)
        return
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            # lm-eval names a metric `acc,none` and its standard error `acc_stderr,none`.
            metric, _, rule = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{rule}")
                plus = f"  +- {error:.4f}" if isinstance(error, float) else ""
                print(f"{task:<28} {metric:<20} {value:.4f}{plus}", flush=True)
