"""`meshwright export`: write a run's or a checkpoint's weights as a folder that transformers loads, or its adapters as
a folder that PEFT loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.cli.compare import add_compare, check_compare, compare_with_folder, exit_code
from meshwright.errors import UserError, plural
from meshwright.spec.model.hf import FAMILIES

EXAMPLES = """example:
  meshwright export runs/demo --to exported/demo
  meshwright export runs/tuned@2000 --to exported/tuned --dtype bf16 --like models/llama-8b
  meshwright export runs/demo --to exported/demo --compare       (does transformers compute the same with it?)
  python -c "import transformers as t; t.AutoModelForCausalLM.from_pretrained('exported/demo')\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]", help="a run's folder, or a checkpoint's")
    add_options(parser)
    add_compare(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the Hugging Face folder to write, which `merge` takes too."""
    parser.add_argument("--to", required=True, metavar="DIR", help="the folder to write, a new one")
    dtype = "dtype of the weights (default: that of the folder that the model was imported from, or of the checkpoint)"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="", help=dtype)
    parser.add_argument("--family", choices=tuple(FAMILIES), default="", help="default: the first that fits")
    like = "a Hugging Face folder or imported checkpoint, whose config and tokenizer to use"
    parser.add_argument("--like", type=Path, metavar="DIR", help=like)


def run(args: argparse.Namespace) -> int:
    check_compare(args)
    from meshwright.checkpoint.base import adapts
    from meshwright.interop.hf import export_folder
    from meshwright.interop.peft import export_adapters
    from meshwright.record.checkpoint_format import find_checkpoint, read_index

    folder = find_checkpoint(args.source)
    if adapts(read_index(folder).config):
        if args.compare:
            raise UserError(f"{args.source} holds adapters: compare what `meshwright merge` writes of them")
        tell(args, export_adapters(folder, Path(args.to)))
        return 0
    written = export_folder(folder, Path(args.to), args.dtype, args.family, args.like)
    found = compare_with_folder(args, str(folder), Path(args.to))
    tell(args, {**written, **found})
    return exit_code(found)


def tell(args: argparse.Namespace, written: dict[str, Any]) -> None:
    """Print a summary of the written folder, or with --json all that is known about it."""
    if args.json:
        print(json.dumps({"folder": args.to, **written}))
        return
    beside = f" and {', '.join(written['beside'])}" if written["beside"] else "; no tokenizer is known"
    print(
        f"{args.to}: {written['family']} of step {written['step']}, {plural(written['tensors'], 'tensor')}, "
        f"{written['bytes'] / 1e6:,.1f} MB in {plural(len(written['files']), 'file')}{beside}"
    )
