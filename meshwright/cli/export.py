"""`meshwright export`: write a run's or a checkpoint's weights as a folder that transformers or Megatron-LM loads, or
its adapters as a folder that PEFT loads."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from meshwright.cli.compare import add_compare, check_compare, compare_with_folder, exit_code
from meshwright.errors import UserError, plural
from meshwright.infer.reading import add_ema
from meshwright.show.terminal import say_next
from meshwright.spec.model.hf import FAMILIES

QUANTISED = ("fp8", "int8", "int4", "nf4")
SAMPLE_TOKENS = 512  # The length of samples for calibration and perplexity.

EXAMPLES = """example:
  meshwright export runs/demo --to exported/demo
  meshwright export runs/tuned@2000 --to exported/tuned --dtype bf16 --like models/llama-8b
  meshwright export runs/demo --to exported/demo --compare       (does transformers compute the same with it?)
  meshwright export runs/demo --to exported/megatron --format megatron --tp 2 --pp 2
  meshwright export runs/demo --to exported/demo-int4 --quantise int4
  meshwright export models/llama-8b --to exported/llama-8b-fp8 --quantise fp8 --text sample.txt
  python -c "import transformers as t; t.AutoModelForCausalLM.from_pretrained('exported/demo')\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = "a run's folder, or a checkpoint's; with --quantise also a Hugging Face folder"
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]", help=source)
    form = "hf: for transformers (the default); megatron: Megatron-LM's classic format, for --transformer-impl local"
    parser.add_argument("--format", choices=("hf", "megatron"), default="hf", help=form)
    for axis in ("tp", "pp"):
        ranks = f"{axis} ranks of the Megatron-LM files (default: 1)"
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=ranks)
    add_options(parser)
    add_compare(parser)
    add_ema(parser)
    form = "store linear layers in 8 or 4 bits, for vLLM and transformers, and print the perplexity before and after"
    parser.add_argument("--quantise", choices=QUANTISED, default="", help=form)
    text = "with --quantise: the text to choose codes by and to measure with (default: the run's own data)"
    parser.add_argument("--text", type=Path, metavar="FILE", help=text)
    samples = "with --quantise: samples to choose codes by, and as many to measure with (default 32; 0: neither)"
    parser.add_argument("--samples", type=int, default=32, metavar="N", help=samples)


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
    if args.compare and args.ema:
        raise UserError("--compare runs the weights without their average: leave out --ema")
    from meshwright.checkpoint.base import adapts
    from meshwright.interop.hf import export_folder
    from meshwright.interop.megatron_export import export_megatron
    from meshwright.interop.peft import export_adapters
    from meshwright.record.checkpoint_format import find_checkpoint, read_index

    megatron = args.format == "megatron"
    if megatron and (args.compare or args.like or args.family or args.quantise):
        raise UserError("--compare, --like, --family and --quantise are for --format hf: leave them out")
    if not megatron and (args.tp, args.pp) != (1, 1):
        raise UserError("--tp and --pp are for --format megatron: leave them out")
    if args.quantise:
        return quantised(args)
    folder = find_checkpoint(args.source)
    if adapts(read_index(folder).config):
        if args.compare or megatron:
            raise UserError(f"{args.source} holds adapters: run `meshwright merge` first, and use what it writes")
        tell(args, export_adapters(folder, Path(args.to), args.ema))
        return 0
    if megatron and args.ema:
        raise UserError("--format megatron writes the weights without their average: leave out --ema")
    if megatron:
        tell(args, export_megatron(folder, Path(args.to), args.dtype, args.tp, args.pp))
        return 0
    written = export_folder(folder, Path(args.to), args.dtype, args.family, args.like, args.ema)
    found = compare_with_folder(args, str(folder), Path(args.to))
    tell(args, {**written, **found})
    return exit_code(found)


def quantised(args: argparse.Namespace) -> int:
    """Export a plain folder aside, unless the source is one already, and quantise it."""
    if args.compare:
        raise UserError("--compare expects equal logits, which --quantise changes: leave one of them out")
    if args.samples < 0:
        raise UserError(f"--samples {args.samples} is not a number of samples: give 0 or more")
    if importlib.util.find_spec("transformers") is None:
        raise UserError("--quantise builds the model in transformers: pip install transformers")
    from meshwright.checkpoint.base import adapts
    from meshwright.interop.hf import export_folder
    from meshwright.interop.quantised import quantise_folder
    from meshwright.outside import read_json
    from meshwright.record.checkpoint_format import find_checkpoint, read_index

    source, to = Path(args.source), Path(args.to)
    if (source / "config.json").is_file():
        if args.ema:
            raise UserError(f"--ema reads the averaged weights of a checkpoint, and {args.source} has none: omit it")
        longest = read_json(source / "config.json").get("max_position_embeddings", SAMPLE_TOKENS)
        samples = _samples(args, source, [], longest)
        written = quantise_folder(source, to, args.quantise, *samples)
    else:
        folder = find_checkpoint(args.source)
        config = read_index(folder).config
        if adapts(config):
            raise UserError(f"{args.source} holds adapters: run `meshwright merge` and quantise the folder it writes")
        prefixes = [str(each) for each in config.get("data", {}).get("prefixes", [])]
        samples = _samples(args, folder, prefixes, config["model"]["seq"])
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".plain-", dir=to.parent) as aside:
            plain = Path(aside) / "model"
            export_folder(folder, plain, args.dtype, args.family, args.like, args.ema)
            written = quantise_folder(plain, to, args.quantise, *samples)
    if args.json:
        print(json.dumps({"folder": args.to, **written}))
        return 0
    shrunk = f"{written['bytes_before'] / 1e6:,.1f} to {written['bytes'] / 1e6:,.1f} MB"
    print(f"{args.to}: {plural(written['layers'], 'linear layer')} in {args.quantise}, {shrunk}")
    if "perplexity" in written:
        how = f", codes chosen by {plural(written['calibrated'], 'sample')}" if written["calibrated"] else ""
        print(f"perplexity {written['perplexity_before']:.3f} before, {written['perplexity']:.3f} after{how}")
    else:
        print("perplexity not measured: name a text with --text")
    print(f"next: vllm serve {args.to}")
    return 0


def _samples(args: argparse.Namespace, folder: Path, prefixes: list[str], longest: int) -> tuple[list[Any], list[Any]]:
    """Return samples to calibrate with and samples to measure with, of --text or else of the run's data, if any."""
    import numpy as np

    from meshwright.data.token_file import TokenFile
    from meshwright.interop.quantised import samples_of
    from meshwright.record.companions import tokenizer_beside

    if not args.samples:
        return [], []
    if args.text:
        tokenizer = tokenizer_beside(folder, prefixes)
        if tokenizer is None:
            raise UserError(f"{args.source} has no tokenizer to read --text with: put its tokenizer.json there")
        tokens = np.array(tokenizer.encode(args.text.read_text(encoding="utf-8")))
    else:
        present = [prefix for prefix in prefixes if Path(f"{prefix}.idx").is_file()]
        if not present:
            return [], []
        tokens = TokenFile(present[0]).tokens
    return samples_of(tokens, args.samples, max(2, min(SAMPLE_TOKENS, longest, len(tokens) // 3)))


def tell(args: argparse.Namespace, written: dict[str, Any]) -> None:
    """Print a summary of the written folder, or with --json all that is known about it."""
    if args.json:
        print(json.dumps({"folder": args.to, **written}))
        return
    if written["family"] == "megatron":
        beside = ""
    else:
        beside = f" and {', '.join(written['beside'])}" if written["beside"] else "; no tokenizer is known"
    print(
        f"{args.to}: {written['family']} of step {written['step']}, {plural(written['tensors'], 'tensor')}, "
        f"{written['bytes'] / 1e6:,.1f} MB in {plural(len(written['files']), 'file')}{beside}"
    )
    if written["beside"]:
        say_next(f'meshwright generate {shlex.quote(args.to)} --prompt "..."')
