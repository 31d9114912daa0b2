"""`meshwright eval`: the perplexity of a trained model on token files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.data.stream import SPLIT_NAMES
from meshwright.errors import UserError
from meshwright.schedule.kinds import default_kind

if TYPE_CHECKING:
    from meshwright.config.sections import Config
    from meshwright.train.datasets import Checked

EXAMPLES = """example:
  meshwright eval runs/demo --samples 64
  meshwright eval runs/demo --split test
  meshwright eval runs/mine@100 --data data/other --nproc 2 layout.tp=2 --json"""
MIXED = True

DEFAULT_SAMPLES = 64  # samples


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
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from meshwright.cli.generate import resolve
    from meshwright.train.launch import launch, warm_up
    from meshwright.train.processes import find_place

    if args.nproc < 1 or args.samples < 0:
        raise UserError("--nproc must be at least 1 and --samples at least 0")
    if args.data and args.split:
        raise UserError("--split names a part of the run's own data, and --data other files: leave one of them out")
    if args.nproc > 1:
        warm_up()
    words = (resolve(args.source), args.overrides, args.data, args.split, args.samples, args.json)
    preflight(*words[:4], find_place().world if args.nproc == 1 else args.nproc)
    if args.nproc == 1:
        evaluate_rank(*words)
        return 0
    return launch(args.nproc, 0, evaluate_rank, *words)


def preflight(
    source: str, overrides: Sequence[str], prefixes: Sequence[str] | None, split: str | None, world: int
) -> None:
    """Checks everything that can be checked without ranks and without weights."""
    from meshwright.config.rules import READING_RULES, check
    from meshwright.train.evaluate import config_with, open_model

    config = config_with(open_model(source)[1], sections_of(overrides, world, prefixes))
    check(config, world, READING_RULES)
    data_of(source, config, prefixes, split, 0)  # this draws no sample yet


def sections_of(
    overrides: Sequence[str], nproc: int, prefixes: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the given keys on top of a plain layout: one process, or all ranks data-parallel."""
    from meshwright.config.load import set_key

    raw: dict[str, Any] = {}
    for word in overrides:
        set_key(raw, word)
    plain = {"tp": 1, "pp": 1, "chunks": 1, "sequence_parallel": False}
    raw["layout"] = plain | raw.get("layout", {})
    raw["pipeline"] = {"schedule": default_kind(1), "split": []} | raw.get("pipeline", {})
    raw["train"] = {"micro_batch": 1, "ramp": [], "compile": "false"} | raw.get("train", {})
    sizes = [raw["train"]["micro_batch"], *(raw["layout"].get(axis, 1) for axis in ("tp", "pp", "cp"))]
    if all(isinstance(size, int) and size > 0 for size in sizes):  # otherwise building the config reports the mistake
        micro_batch, tp, pp, cp = sizes
        raw["train"]["global_batch"] = max(1, nproc // (tp * pp * cp)) * micro_batch  # unused, but checked
    raw["run"] = {"eval_samples": 0, "device": "auto"} | raw.get("run", {})
    raw["comm"] = {"backend": "auto"} | raw.get("comm", {})
    if prefixes:
        raw["data"] = raw.get("data", {}) | {"prefixes": list(prefixes), "weights": [], "split": [1.0, 0.0, 0.0]}
    return raw


def data_of(
    source: str, config: Config, prefixes: Sequence[str] | None, split: str | None, most: int
) -> Checked:
    """Returns the samples to evaluate on: at most one epoch of the named files, or of a split of the run's own data."""
    from meshwright.checkpoint.hf import NO_DATA
    from meshwright.data.stream import OneEpoch
    from meshwright.data.token_file import TokenFile
    from meshwright.train.datasets import Checked, datasets_of

    if config.data.prefixes == (NO_DATA,):
        raise UserError(f"{source} comes without data: name token files with --data PREFIX")
    for prefix in prefixes or ():
        tokens = TokenFile(prefix).token_count
        if tokens <= config.model.seq:
            raise UserError(
                f"{prefix} holds {tokens} tokens, and one sample of the model takes {config.model.seq + 1}: name a "
                "longer file with --data"
            )
    part = "train" if prefixes else split or "valid"  # named files are not split: all of their documents are in `train`
    data = dict(zip(SPLIT_NAMES, datasets_of(config), strict=True))[part]
    if data is None:
        raise UserError(
            f"the run has no {part} data (data.split={list(config.data.split)}): choose another part with --split, "
            "or name token files with --data PREFIX"
        )
    return Checked(OneEpoch(data.dataset, most), config.model.vocab)


def evaluate_rank(
    source: str, overrides: list[str], prefixes: list[str] | None, split: str | None, samples: int, as_json: bool
) -> None:
    from meshwright.train.evaluate import evaluate, with_model
    from meshwright.train.processes import find_place

    def use(ctx: Any, modules: Any, place: Any) -> None:
        data = data_of(source, ctx.config, prefixes, split, samples or DEFAULT_SAMPLES)
        count = data.dataset.samples
        result = evaluate(ctx, modules, data, count)
        if place.rank == 0 and samples > count:
            print(f"(the data hold {count:,} samples, and each was looked at once)", file=sys.stderr)
        if place.rank == 0:
            words = (
                f"loss {result['loss']:.4f}  perplexity {result['perplexity']:.2f}  over {result['tokens']:,} tokens"
            )
            print(json.dumps(result) if as_json else words, flush=True)

    with_model(source, sections_of(overrides, find_place().world, prefixes), use)
