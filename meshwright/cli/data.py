"""`meshwright data`: turn text into token files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

EXAMPLES = """example:
  meshwright data prepare stdlib --out data/python --tokenizer train:8192
  meshwright data prepare books/ news.jsonl --out data/text --tokenizer gpt2/tokenizer.json --workers 8"""

PREPARE = """Write PREFIX.bin and PREFIX.idx (Megatron's format) and PREFIX.json (what made them).

INPUT is a .txt file (one document), a .jsonl file (one JSON object a line), a folder of these, or the word
stdlib: the source text of Python's own standard library. Every document ends with the end token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare = actions.add_parser(
        "prepare",
        help="tokenise text into PREFIX.bin and PREFIX.idx",
        description=PREPARE,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument("inputs", nargs="+", metavar="INPUT", help=".txt, .jsonl, a folder, or stdlib")
    prepare.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without a suffix")
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="bytes (default), PATH/tokenizer.json, PATH.model (SentencePiece), or train:SIZE",
    )
    prepare.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    prepare.add_argument("--eod", metavar="TOKEN", help="the end-of-document token, where it is not found")
    prepare.add_argument("--field", default="text", help="the field of a .jsonl line with the text (default: text)")
    prepare.add_argument("--force", action="store_true", help="write over existing output")
    prepare.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    from meshwright.data.prepare import Summary, prepare
    from meshwright.show.progress import progress

    summary: Summary = prepare(
        args.inputs,
        args.out,
        tokenizer=args.tokenizer,
        workers=args.workers,
        eod=args.eod,
        field=args.field,
        force=args.force,
        progress=progress,
    )
    if summary.replaced:
        what = "document holds" if summary.replaced == 1 else "documents hold"
        print(
            f"meshwright: warning: {summary.replaced:,} {what} bytes that are not UTF-8, replaced by U+FFFD",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(dataclasses.asdict(summary)))
        return 0
    left_out = f" ({summary.empty:,} empty left out)" if summary.empty else ""
    print(f"documents   {summary.documents:,}{left_out} from {summary.input_files:,} files")
    print(f"tokens      {summary.tokens:,} as {summary.dtype}")
    print(f"vocabulary  {summary.vocab_size:,}, documents end with {summary.eod} ({summary.tokenizer})")
    print(
        f"time        {summary.seconds:.1f} s for {summary.input_bytes / 1e6:,.1f} MB, "
        f"{summary.mb_per_s:.1f} MB/s, workers {summary.workers}"
    )
    for path in summary.files:
        print(f"wrote       {path} ({os.path.getsize(path):,} bytes)")
    return 0
