"""`meshwright data merge`: token files become one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from meshwright.cli.files import tell_files
from meshwright.data.merge import merge
from meshwright.show.progress import progress

MERGE = """Write OUT.bin, OUT.idx and OUT.json with the documents of several token files, in order.

All of them must have been made with the same tokenizer."""


def add_arguments(actions: Any, examples: str) -> None:
    options = actions.add_parser(
        "merge", help="join token files", description=MERGE, epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    options.add_argument("out", metavar="OUT", help="where to write, without a suffix")
    options.add_argument("prefixes", nargs="+", metavar="PREFIX", help="the token files to join")
    options.add_argument("--force", action="store_true", help="write over existing output")
    options.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the summary as JSON")


def run(args: argparse.Namespace) -> None:
    merged = merge(args.out, args.prefixes, force=args.force, progress=progress)
    if not merged.checked:
        what = "no file says which tokenizer made it, so only their dtypes were compared"
        print(f"meshwright: warning: {what}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(merged)))
        return
    print(f"documents   {merged.documents:,} from {merged.inputs:,} token files")
    print(f"tokens      {merged.tokens:,} as {merged.dtype}")
    tell_files(merged.files)
