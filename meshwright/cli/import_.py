"""`meshwright import`: turn a folder of Hugging Face, Megatron-LM or DeepSpeed into a checkpoint."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from meshwright.cli.compare import add_compare, check_compare, compare_with_folder, exit_code
from meshwright.config.numbers import length_argument
from meshwright.errors import UserError, notice
from meshwright.show.terminal import say_next

EXAMPLES = """example:
  meshwright import models/llama-8b --to imported/llama-8b
  meshwright train CONFIG.yaml run.dir=runs/tuned --from imported/llama-8b      (starts from its weights)
  meshwright import models/llama-8b --to imported/llama-8b --compare             (its logits against transformers')
  meshwright import models/mistral-7b --to imported/mistral --seq 4096
  meshwright import models/llama-8b --to imported/mixture --upcycle count=8,top_k=2
  meshwright import megatron/checkpoints --to imported/gpt --vocab 50257       (tp and pp shards, and .distcp files)
  meshwright import deepspeed/global_step500 --to imported/llama --like models/llama-8b"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a folder with a model of transformers, Megatron-LM or DeepSpeed")
    parser.add_argument(
        "--format", choices=("hf", "megatron", "deepspeed"), help="of the folder (default: by its files)"
    )
    parser.add_argument("--to", required=True, metavar="CHECKPOINT", help="the checkpoint's folder, a new one")
    dtype = "dtype of the checkpoint (default: fp32, or fp64 if the folder has fp64)"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="", help=dtype)
    context = "context length (default: the model's)"
    parser.add_argument("--seq", type=length_argument, default=0, metavar="N", help=context)
    like = "a Hugging Face folder with the config.json of the same model, for a DeepSpeed folder and for --compare"
    parser.add_argument("--like", type=Path, metavar="DIR", help=like)
    vocab = "tokens of the vocabulary without the rows that Megatron-LM adds (default: as its arguments say)"
    parser.add_argument("--vocab", type=int, default=0, metavar="N", help=vocab)
    upcycle = "make a dense model a mixture of experts, each a copy of the MLP: count=8,top_k=2[,ffn=...,every=...]"
    base = "for a folder of adapters that PEFT saved: the checkpoint or Hugging Face folder that they belong to"
    parser.add_argument("--base", metavar="DIR", help=base)
    parser.add_argument("--upcycle", metavar="KEY=N,...", help=upcycle)
    add_compare(parser)


def run(args: argparse.Namespace) -> int:
    if args.seq < 0 or args.vocab < 0:
        raise UserError("--seq and --vocab must be greater than zero")
    check_compare(args)
    adapters = (Path(args.folder) / "adapter_config.json").is_file() or args.base
    if args.compare and (args.upcycle or adapters):
        raise UserError("--compare is for models that stay what they are: leave it out with --upcycle and for adapters")
    if adapters:
        _import_adapters(args)
        return 0
    model, report, twin = _imported(args)
    found = compare_with_folder(args, args.to, twin)
    if args.json:
        print(json.dumps({"checkpoint": args.to, "model": model, "report": report, **found}))
        return exit_code(found)
    print(f"{args.folder} is imported as {args.to}; the model section for a config:", file=sys.stderr)
    # A section whose key here is 0 has no effect, so it is not printed.
    switches = {"experts": "count", "latent": "kv_rank"}
    unused = {"preset", *(name for name, key in switches.items() if not model[name][key])}
    used = {key: value for key, value in model.items() if key not in unused}
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in used.items()}
    print(yaml.safe_dump({"model": shown}, sort_keys=False), end="")
    place = shlex.quote(args.to)
    say_next(f'meshwright generate {place} --prompt "..."', f"meshwright train CONFIG.yaml --from {place}")
    return exit_code(found)


def _imported(args: argparse.Namespace) -> tuple[dict[str, Any], list[str], Path]:
    """Import the folder. Return its model section, a report on its contents, and its Hugging Face twin."""
    from meshwright.interop.deepspeed import is_deepspeed, read_deepspeed
    from meshwright.interop.hf import import_folder, import_weights
    from meshwright.interop.megatron import is_megatron, read_megatron

    folder, to, like = Path(args.folder), Path(args.to), args.like
    kinds_found = (("megatron", is_megatron(folder)), ("deepspeed", is_deepspeed(folder)), ("hf", True))
    kind = args.format or next(name for name, is_it in kinds_found if is_it)
    for option, value, kinds in (("--like", like, ("megatron", "deepspeed")), ("--vocab", args.vocab, ("megatron",))):
        if value and kind not in kinds:
            raise UserError(f"{option} has no effect on a {kind} folder: leave it out")
    if kind == "hf":
        return asdict(import_folder(folder, to, args.dtype, args.seq, args.upcycle)), [], folder
    if args.compare and like is None:
        raise UserError(
            f"--compare needs the same model in transformers' form, and {folder} is not: name it with --like"
        )
    weights = (
        read_megatron(folder, args.vocab, args.seq) if kind == "megatron" else read_deepspeed(folder, like, args.seq)
    )
    model = import_weights(weights, like or folder, to, args.dtype, args.upcycle)
    for line in weights.report:
        notice(line)
    return asdict(model), weights.report, like or folder


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
    place = shlex.quote(args.to)
    say_next(f'meshwright generate {place} --prompt "..."', f"meshwright merge {place} --to {place}-merged")
