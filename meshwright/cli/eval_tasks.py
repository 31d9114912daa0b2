"""`meshwright eval RUN --tasks ...`: the tasks of lm-eval, with a model on any layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.cli.chat import template_of
from meshwright.cli.generate import end_tokens, tokenizer_of
from meshwright.cli.reading import sections_of
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.launch.processes import find_place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("tasks of lm-eval, instead of token files (pip install meshwright[tasks])")
    tasks.add_argument("--tasks", default="", metavar="A,B", help="names of tasks, e.g. hellaswag,arc_easy")
    tasks.add_argument("--task-folder", action="append", default=[], metavar="DIR", help="of tasks of your own")
    tasks.add_argument("--shots", type=int, metavar="N", help="examples before each question (default: the task's own)")
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    tasks.add_argument("--chat", action="store_true", help="questions as messages, through the model's chat template")
    tasks.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    tasks.add_argument("--tokenizer", metavar="T", help="another tokenizer than the one beside the model")
    tasks.add_argument("--batch", type=int, default=8, metavar="N", help="texts that are written together (default 8)")


def check(args: argparse.Namespace, config: Config) -> None:
    """Finds mistakes before ranks start."""
    if args.data or args.split or args.samples:
        raise UserError("--tasks brings its own data: leave --data, --split and --samples out")
    if args.batch < 1 or (args.limit or 1) < 1 or (args.shots or 0) < 0:
        raise UserError("--batch and --limit must be at least 1 and --shots at least 0")
    if config.model.kind != "gpt" or config.objective not in ("causal", "chat", "preference"):
        raise UserError(f"{args.source} does not continue texts, as tasks ask: evaluate it on token files")
    if config.layout.tp_grid:
        raise UserError("tasks can't be run on a grid of ranks: leave layout.tp_grid out, and set layout.tp")
    if tokenizer_of(args, config) is None:
        raise UserError("no tokenizer is known for this model: name one with --tokenizer")
    if args.chat:
        template_of(args, config)


def tasks_rank(args: argparse.Namespace) -> None:
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.harness import run_tasks

    def use(ctx: Any, modules: Any, place: Any) -> None:
        tokenizer, folder = tokenizer_of(args, ctx.config), Path(args.source)
        template = template_of(args, ctx.config) if args.chat else None
        ends = end_tokens(folder, tokenizer)
        found = run_tasks(
            lambda kind: kind(ctx, modules, tokenizer, folder, ends, template, args.batch),
            [name for name in args.tasks.split(",") if name], args.task_folder, args.shots, args.limit, args.chat,
            quiet=place.rank > 0,
        )  # fmt: skip
        if place.rank == 0:
            show(found, args.json)

    with_model(args.source, sections_of(args.overrides, find_place().world), use)


def show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, default=str), flush=True)
        return
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, _, rule = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{rule}")
                plus = f"  +- {error:.4f}" if isinstance(error, float) else ""
                print(f"{task:<28} {metric:<20} {value:.4f}{plus}", flush=True)
