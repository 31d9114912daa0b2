"""`meshwright data`: turn text into token files, join them, and look at a sample."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from meshwright.cli import chat_data, merge_data
from meshwright.cli.files import tell_files
from meshwright.cli.mixed import intermixed
from meshwright.config.data import BLANK_SPECIALS, SPECIALS
from meshwright.config.load import load_config
from meshwright.config.rules import READING_RULES, check
from meshwright.data.packed import is_chat
from meshwright.data.prepare import prepare
from meshwright.data.selection import Selection
from meshwright.data.stream import SPLIT_NAMES
from meshwright.errors import UserError, plural
from meshwright.record.companions import tokenizer_of_data
from meshwright.show.progress import progress
from meshwright.show.sample_view import MARKS_LEGEND, conversation_text, conversations_of, conversations_summary
from meshwright.show.terminal import console_for, has_colour, show

EXAMPLES = """example:
  meshwright data prepare stdlib --out data/python --tokenizer train:8192
  meshwright data prepare books/ news.jsonl --out data/text --tokenizer gpt2/tokenizer.json --workers 8
  meshwright data prepare crawl/ --out data/crawl --min-chars 200 --dedup --tokenizer gpt2/tokenizer.json
  meshwright data merge data/all data/text data/crawl
  meshwright data chat talks.jsonl --model models/llama-8b --out data/talks --seq 4096
  meshwright data show examples/demo.yaml --sample 3"""

PREPARE = """Write PREFIX.bin and PREFIX.idx (Megatron's format) and PREFIX.json (what made them).

INPUT is a .txt file (one document), a .jsonl file (one JSON object a line), either of them packed (.gz, .zst), a
.parquet file (one document a row), a folder of these, or the word stdlib: the source text of Python's own standard
library. Every document ends with the end token."""

SHOW = """Print sample N of the data that a config names, as a model gets it.

Of a token to predict, what the model sees comes first: {[MASK]=word} is masked, {other=word} was changed into another
token and {word} stays as it is. In causal data, tokens without a loss are dim. Of conversations, learned tokens are
green (bad answers: red); without colours they stand in « » (bad answers: ‹ ›). Of spans that were taken out, <0>, <1>
and so on stand in the input, and again, each before its span, in the target. Of blanks, the source comes first and then
the spans that fill them, each after [sop] with the place that its first token has in the source."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=intermixed(parser))
    options = actions.add_parser(
        "prepare", help="tokenise text into PREFIX.bin and PREFIX.idx", description=PREPARE, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    inputs = ".txt, .jsonl (also .gz, .zst), .parquet, a folder, or stdlib"
    options.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    options.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without a suffix")
    tokenizers = "bytes (default), PATH/tokenizer.json, PATH.model (SentencePiece), or train:SIZE"
    options.add_argument("--tokenizer", default="bytes", metavar="T", help=tokenizers)
    options.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    options.add_argument("--eod", metavar="TOKEN|ID", help="the end-of-document token or its id, where it is not found")
    options.add_argument("--field", default="text", help="the .jsonl field or parquet column (default: text)")
    options.add_argument("--min-chars", type=int, default=0, metavar="N", help="leave out documents shorter than this")
    options.add_argument("--max-chars", type=int, default=0, metavar="N", help="leave out documents longer than this")
    duplicates = "keep one of several equal documents (takes about 100 bytes of memory for each document)"
    options.add_argument("--dedup", action="store_true", help=duplicates)
    options.add_argument("--sentences", action="store_true", help="keep where sentences begin, for masked data")
    options.add_argument("--force", action="store_true", help="write over existing output")
    # Every command has --json; a default here would undo one before the word `prepare`.
    options.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the summary as JSON")
    merge_data.add_arguments(actions, EXAMPLES)
    chat_data.add_arguments(actions, EXAMPLES)
    shown = actions.add_parser(
        "show", help="print a sample of a run's data", description=SHOW, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    shown.add_argument("config", metavar="CONFIG.yaml")
    shown.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change")
    shown.add_argument("--sample", type=int, default=0, metavar="N", help="its number in the run (default: 0)")
    shown.add_argument("--split", choices=SPLIT_NAMES, default="train", help="the part of the data (default: train)")
    shown.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print all fields as JSON")


def run(args: argparse.Namespace) -> None:
    if args.action == "show":
        show_sample(args)
    elif args.action == "chat":
        chat_data.run(args)
    elif args.action == "merge":
        merge_data.run(args)
    else:
        prepare_files(args)


def show_sample(args: argparse.Namespace) -> None:
    from meshwright.engine.datasets import blanks_of, datasets_of, masking_of, spans_of
    from meshwright.show.sample_view import sample_summary, sample_text

    config = load_config(args.config, args.overrides)
    check(config, config.layout.least_world, READING_RULES)
    if args.sample < 0:
        raise UserError(f"--sample {args.sample} must not be negative: the first is 0")
    data = dict(zip(SPLIT_NAMES, datasets_of(config), strict=True))[args.split]
    if data is None:
        raise UserError(f"data.split={list(config.data.split)} leaves no {args.split} data: choose another --split")
    sample = data.sample(args.sample)
    if args.json:
        print(json.dumps({name: value.tolist() for name, value in sample.items()}))
        return
    tokenizer = tokenizer_of_data(config.data.prefixes)
    if config.objective_facts.packed and tokenizer is not None:
        _show_conversations(args, sample, tokenizer, is_chat(config.data.prefixes[0]) == "pairs")
        return
    special: dict[int, str] = {}
    if config.objective == "masked":
        named = zip(masking_of(config).specials, SPECIALS, strict=True)
        special = {token: f"[{name.upper()}]" for token, name in named}
    elif config.objective_facts.fills_blanks:
        special = dict(zip(blanks_of(config).specials, (f"[{name}]" for name in BLANK_SPECIALS), strict=True))
    elif config.objective == "spans":
        spans = spans_of(config)
        special = {spans.sentinel - n: f"<{n}>" for n in range(spans.spans)} | {spans.eod: "[END]"}
    elif tokenizer is not None:
        special = {tokenizer.eod: "[END]"}
    spelling = (lambda token: f"{token} ") if tokenizer is None else (lambda token: tokenizer.decode([token]))
    from rich.text import Text

    heading = f"sample {args.sample:,} of {args.split}: {sample_summary(sample, special)}"
    show(console_for(sys.stdout), Text(heading), sample_text(sample, spelling, special))


def _show_conversations(args: argparse.Namespace, sample: Mapping[str, Any], tokenizer: Any, pairs: bool) -> None:
    """Print a packed sample, one conversation after the other, with its learned tokens marked."""
    from rich.text import Text

    colour = has_colour(sys.stdout)
    found = list(conversations_of(sample, pairs))
    heading = f"sample {args.sample:,} of {args.split}: {conversations_summary(sample, len(found))}"
    drawn = [conversation_text(n, tokens, mask, tokenizer, colour) for n, (tokens, mask) in enumerate(found, start=1)]
    show(console_for(sys.stdout), Text(heading), *drawn)
    if not colour:
        print(MARKS_LEGEND)


def prepare_files(args: argparse.Namespace) -> None:
    selection = Selection(args.field, args.min_chars, args.max_chars, args.dedup, args.sentences)
    summary = prepare(
        args.inputs, args.out, tokenizer=args.tokenizer, workers=args.workers, eod=args.eod, selection=selection,
        force=args.force, progress=progress,
    )  # fmt: skip
    if summary.replaced:
        what = "document holds" if summary.replaced == 1 else "documents hold"
        bad = f"{summary.replaced:,} {what} bytes that are not UTF-8, replaced by U+FFFD"
        print(f"meshwright: warning: {bad}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(summary)))
        return
    counts = ((summary.empty, "empty"), (summary.filtered, "too short or long"), (summary.duplicates, "seen before"))
    words = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    left_out = f" ({words} left out)" if words else ""
    print(f"documents   {summary.documents:,}{left_out} from {plural(summary.input_files, 'file')}")
    if args.sentences:
        print(f"sentences   {summary.sequences:,}")
    print(f"tokens      {summary.tokens:,} as {summary.dtype}")
    print(f"vocabulary  {summary.vocab_size:,}, documents end with token {summary.eod} ({summary.tokenizer})")
    print(
        f"time        {summary.seconds:.1f} s for {summary.input_bytes / 1e6:,.1f} MB, "
        f"{summary.mb_per_s:.1f} MB/s, workers {summary.workers}"
    )
    tell_files(summary.files)
