"""`meshwright data chat`: conversations become token files with a loss mask, and five of them are shown."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from meshwright.cli.files import tell_files
from meshwright.config.numbers import length_argument
from meshwright.data.chat_prepare import packing, prepare_chat
from meshwright.errors import UserError, plural
from meshwright.show.sample_view import MARKS_LEGEND, conversation_text
from meshwright.show.terminal import console_for, has_colour, show
from meshwright.show.units import percent

CHAT = """Write PREFIX.bin and PREFIX.idx, one conversation a document, and PREFIX.mask.bin and .idx, which say what is
learned of it. Then print five conversations: what is learned is green (bad answers: red), all else dim; in a file it
stands in « » (bad answers: ‹ ›).

INPUT is a .jsonl file (or a .json list) of objects with: messages (role, content); conversations (from, value:
sharegpt); prompt and completion; instruction, input and output (alpaca); prompt, chosen and rejected (preference
pairs); or prompt, completion and label (judged answers). The chat template and the tokenizer are those of the
model's folder."""


def add_arguments(actions: Any, examples: str) -> None:
    options = actions.add_parser(
        "chat", help="turn conversations into token files with a loss mask", description=CHAT, epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_argument("inputs", nargs="+", metavar="INPUT.jsonl")
    options.add_argument("--model", required=True, metavar="DIR", help="the model's folder: tokenizer, chat template")
    options.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without a suffix")
    options.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    packed = "also report how samples of N tokens are filled"
    options.add_argument("--seq", type=length_argument, default=0, metavar="N", help=packed)
    options.add_argument("--force", action="store_true", help="write over existing output")
    options.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    if args.seq < 0:
        raise UserError(f"--seq {args.seq} must be greater than zero")
    summary, tokenizer, lengths = prepare_chat(args.inputs, args.out, args.model, args.template, args.force)
    packed = packing(lengths, args.seq, 2 if summary.kind == "pairs" else 1) if args.seq else None
    if args.json:
        names = ("prefix", "kind", "conversations", "tokens", "learned", "longest", "files")
        found = {name: getattr(summary, name) for name in names} | {"share": summary.share}
        if packed:
            found |= {"samples": packed[0], "cut": packed[1], "filled": packed[2]}
        print(json.dumps(found))
        return
    console = console_for(sys.stdout)
    pairs = summary.kind == "pairs"
    for number, masked in enumerate(summary.samples, start=1):
        # The files hold the two answers of a pair alike, one after the other: the second is the bad one.
        mask = [2 * each for each in masked.mask] if pairs and number % 2 == 0 else masked.mask
        show(console, conversation_text(number, masked.tokens, mask, tokenizer, has_colour(sys.stdout)))
    if not has_colour(sys.stdout):
        print(MARKS_LEGEND)
    count = plural(summary.conversations // 2, "pair") if pairs else f"{summary.conversations:,} ({summary.kind})"
    print(f"conversations  {count}, the longest of {summary.longest:,} tokens")
    print(f"tokens         {summary.tokens:,}, of which {summary.learned:,} are learned ({percent(summary.share)})")
    _tell_packing(args.seq, packed)
    tell_files(summary.files, column=15)


def _tell_packing(seq: int, packed: tuple[int, int, float] | None) -> None:
    if packed:
        samples, cut, filled = packed
        made = plural(samples, "sample")
        print(f"packed         {made} of {seq:,} tokens, {percent(filled)} filled, {cut:,} cut at the end")
