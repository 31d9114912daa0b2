"""`meshwright data`: turn text into token files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from meshwright.data.prepare import prepare
from meshwright.show.progress import progress

EXAMPLES = """example:
  meshwright data prepare stdlib --out data/python --tokenizer train:8192
  meshwright data prepare books/ news.jsonl --out data/text --tokenizer gpt2/tokenizer.json --workers 8"""

PREPARE = """Write PREFIX.bin and PREFIX.idx (Megatron's format) and PREFIX.json (what made them).

INPUT is a .txt file (one document), a .jsonl file (one JSON object a line), a folder of these, or the word
stdlib: the source text of Python's own standard library. Every document ends with the end token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    options = actions.add_parser(
        "prepare", help="tokenise text into PREFIX.bin and PREFIX.idx", description=PREPARE, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_argument("inputs", nargs="+", metavar="INPUT", help=".txt, .jsonl, a folder, or stdlib")
    options.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without a suffix")
    tokenizers = "bytes (default), PATH/tokenizer.json, PATH.model (SentencePiece), or train:SIZE"
    options.add_argument("--tokenizer", default="bytes", metavar="T", help=tokenizers)
    options.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    options.add_argument("--eod", metavar="TOKEN|ID", help="the end-of-document token or its id, where it is not found")
    options.add_argument("--field", default="text", help="the field of a .jsonl line with the text (default: text)")
    options.add_argument("--force", action="store_true", help="write over existing output")
    # Every command has --json; a default here would undo one before the word `prepare`.
    options.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    summary = prepare(
        args.inputs, args.out, tokenizer=args.tokenizer, workers=args.workers, eod=args.eod, field=args.field,
        force=args.force, progress=progress,
    )  # fmt: skip
    if summary.replaced:
        what = "document holds" if summary.replaced == 1 else "documents hold"
        bad = f"{summary.replaced:,} {what} bytes that are not UTF-8, replaced by U+FFFD"
        print(f"meshwright: warning: {bad}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(summary)))
        return
    left_out = f" ({summary.empty:,} empty left out)" if summary.empty else ""
    print(f"documents   {summary.documents:,}{left_out} from {summary.input_files:,} files")
    print(f"tokens      {summary.tokens:,} as {summary.dtype}")
    print(f"vocabulary  {summary.vocab_size:,}, documents end with token {summary.eod} ({summary.tokenizer})")
    print(
        f"time        {summary.seconds:.1f} s for {summary.input_bytes / 1e6:,.1f} MB, "
        f"{summary.mb_per_s:.1f} MB/s, workers {summary.workers}"
    )
    for path in summary.files:
        print(f"wrote       {path} ({os.path.getsize(path):,} bytes)")
