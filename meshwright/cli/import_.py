"""`meshwright import`: turn a Hugging Face folder into a checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import yaml

from meshwright.cli.compare import add_compare, check_compare, compare_with_folder, exit_code
from meshwright.config.numbers import length_argument
from meshwright.errors import UserError

EXAMPLES = """example:
  meshwright import models/llama-8b --to imported/llama-8b
  meshwright train CONFIG.yaml run.dir=runs/tuned --from imported/llama-8b      (starts from its weights)
  meshwright import models/llama-8b --to imported/llama-8b --compare             (its logits against transformers')
  meshwright import models/mistral-7b --to imported/mistral --seq 4096
  meshwright import models/llama-8b --to imported/mixture --upcycle count=8,top_k=2"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a folder that transformers saved a model in (safetensors)")
    parser.add_argument("--to", required=True, metavar="CHECKPOINT", help="the checkpoint's folder, a new one")
    dtype = "dtype of the checkpoint (default: fp32, or fp64 if the folder has fp64)"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="", help=dtype)
    context = "context length (default: the model's)"
    parser.add_argument("--seq", type=length_argument, default=0, metavar="N", help=context)
    upcycle = "make a dense model a mixture of experts, each a copy of the MLP: count=8,top_k=2[,ffn=...,every=...]"
    base = "for a folder of adapters that PEFT saved: the checkpoint or Hugging Face folder that they belong to"
    parser.add_argument("--base", metavar="DIR", help=base)
    parser.add_argument("--upcycle", metavar="KEY=N,...", help=upcycle)
    add_compare(parser)


def run(args: argparse.Namespace) -> int:
    if args.seq < 0:
        raise UserError(f"--seq {args.seq} must be greater than zero")
    check_compare(args)
    adapters = (Path(args.folder) / "adapter_config.json").is_file() or args.base
    if args.compare and (args.upcycle or adapters):
        raise UserError("--compare is for models that stay what they are: leave it out with --upcycle and for adapters")
    from meshwright.interop.hf import import_folder

    if adapters:
        _import_adapters(args)
        return 0
    model = asdict(import_folder(Path(args.folder), Path(args.to), args.dtype, args.seq, args.upcycle))
    found = compare_with_folder(args, args.to, Path(args.folder))
    if args.json:
        print(json.dumps({"checkpoint": args.to, "model": model, **found}))
        return exit_code(found)
    print(f"{args.folder} is imported as {args.to}; the model section for a config:", file=sys.stderr)
    # A section whose key here is 0 has no effect, so it is not printed.
    switches = {"experts": "count", "latent": "kv_rank"}
    unused = {"preset", *(name for name, key in switches.items() if not model[name][key])}
    used = {key: value for key, value in model.items() if key not in unused}
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in used.items()}
    print(yaml.safe_dump({"model": shown}, sort_keys=False), end="")
    return exit_code(found)


def _import_adapters(args: argparse.Namespace) -> None:
    """Turn a folder of PEFT's adapters into a checkpoint and print the tune section for a config."""
    from meshwright.interop.peft import import_adapters

    if not args.base:
        raise UserError(f"{args.folder} holds adapters: name the model that they belong to with --base")
    if args.dtype or args.seq or args.upcycle:
        raise UserError("--dtype, --seq and --upcycle are for whole models, not for adapters: leave them out")
    tune = asdict(import_adapters(Path(args.folder), Path(args.to), args.base))
    if args.json:
        print(json.dumps({"checkpoint": args.to, "tune": tune}))
        return
    print(f"{args.folder} is imported as {args.to}; the tune section for a config:", file=sys.stderr)
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in tune.items()}
    print(yaml.safe_dump({"tune": shown}, sort_keys=False), end="")
