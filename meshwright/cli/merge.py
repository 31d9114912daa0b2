"""`meshwright merge`: add a run's adapters to their base weights and write a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.cli.export import add_options, tell
from meshwright.errors import UserError

EXAMPLES = """example:
  meshwright merge runs/tuned --to exported/tuned
  meshwright merge runs/tuned@2000 --to exported/tuned --dtype bf16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]", help="a run with adapters, or its checkpoint")
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    from meshwright.checkpoint.base import adapts
    from meshwright.interop.hf import export_folder
    from meshwright.record.checkpoint_format import find_checkpoint, read_index

    folder = find_checkpoint(args.source)
    if not adapts(read_index(folder).config):
        raise UserError(f"{args.source} holds whole weights, which need no merging: use `meshwright export`")
    tell(args, export_folder(folder, Path(args.to), args.dtype, args.family, args.like))
