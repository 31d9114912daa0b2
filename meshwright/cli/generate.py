"""`meshwright generate`: write text with a trained or imported model."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.config import rules
from meshwright.config.sections import Config
from meshwright.engine.datasets import blank_specials
from meshwright.errors import UserError, either, one_line, plural
from meshwright.infer.reading import add_ema, resolve, sections_of
from meshwright.infer.texts import check_drawing, end_tokens, text_ids, tokenizer_for
from meshwright.launch.launch import start, warm_up
from meshwright.outside import parse_json

EXAMPLES = """example:
  meshwright generate runs/demo --prompt "def main(" --max-tokens 64
  meshwright generate runs/mine@100 --prompt-tokens 5,17,2 --temperature 0.8 --top-p 0.9 --nproc 2 --json
  meshwright generate runs/demo --prompts questions.txt --batch 16 --json > answers.json
  meshwright generate runs/glm --prompt "def [MASK](x):"                # a model of blanks fills them in; or [gMASK]"""

MARKS = re.compile(r"(\[g?MASK\])")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]|HF-FOLDER")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-tokens", metavar="1,2,3")
    many = "a text file with one prompt per line, or a .jsonl file of objects with a prompt"
    prompt.add_argument("--prompts", metavar="FILE", help=many)
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="prompts to run together (default 8)")
    tokenizer = "bytes, PATH/tokenizer.json or PATH.model (default: the one that the model was trained with)"
    parser.add_argument("--tokenizer", metavar="T", help=tokenizer)
    parser.add_argument("--max-tokens", "--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that hold this share")
    parser.add_argument("--seed", type=int, default=0, help="random seed (with --prompts, plus the prompt's number)")
    parser.add_argument("--nproc", type=int, default=1, help="split the model over this many tensor-parallel ranks")
    add_ema(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.nproc, args.max_tokens, args.batch) < 1:
        raise UserError("--batch, --nproc and --max-tokens must be at least 1")
    check_drawing(args.temperature, args.top_p, args.seed)
    config = model_config(args)
    texts = read_prompts(args.prompts) if args.prompts is not None else [args.prompt]
    tokenizer = tokenizer_of(args, config)
    args.texts, args.ids = texts, [prompt_ids(args, text, tokenizer, config) for text in texts]
    if config.objective_facts.fills_blanks:
        if args.prompts is not None:
            raise UserError(f"{args.source} fills in blanks, of one prompt at a time: give --prompt")
        args.ids = check_source(config, args.ids[0], tokenizer)
    return start(args.nproc, generate_rank, args)


def model_config(args: argparse.Namespace) -> Config:
    """Find the model that a command writes text with, check that it can, and return its config."""
    if args.nproc > 1:
        warm_up()
    args.source = resolve(args.source)
    args.sections = sections_of([f"layout.tp={args.nproc}"], args.nproc)
    from meshwright.infer.evaluate import config_with, open_model
    from meshwright.interop.hf import context_length

    config = config_with(open_model(args.source, args.ema)[1], args.sections)
    if not config.model.kind_facts.writes_text:
        raise UserError(f"{args.source} is an encoder, which predicts masked tokens and no text: use meshwright eval")
    args.sections["model"] = {"seq": context_length(Path(args.source), config.model)}
    config = replace(config, model=replace(config.model, **args.sections["model"]))
    check_cut(config, args.nproc)
    rules.check(config, args.nproc, rules.READING_RULES)
    return config


def read_prompts(path: str) -> list[str]:
    """Read a file of prompts, one per line."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [parse_json(line)["prompt"] for line in lines] if path.endswith(".jsonl") else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--prompts {path} can't be read ({one_line(str(error))}): name a text file, or .jsonl of objects with a "
            "prompt"
        ) from None
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise UserError(f"--prompts {path} has no prompt, or one that is no text: write one in each line")
    return prompts


def check_cut(config: Config, nproc: int) -> None:
    """Check that the model can be split over `nproc` ranks. The errors name --nproc instead of layout.tp."""
    model = config.model
    reasons: dict[rules.Rule, str] = {
        rules.tp_divides_heads: f"does not divide the model's {model.heads} heads",
        rules.tp_fits_kv_heads: f"neither divides the model's {model.kv_heads} key-value heads nor is a multiple",
        rules.tp_divides_ffn: f"does not divide the model's ffn of {model.ffn}",
        rules.etp_divides_experts: f"does not divide the experts' ffn of {model.experts.ffn}",
    }

    def broken(ranks: int) -> rules.Rule | None:
        cut = replace(config, layout=replace(config.layout, tp=ranks))
        return next((rule for rule in reasons if any(rule(cut, ranks))), None)

    if rule := broken(nproc):
        fitting = either(n for n in range(1, model.heads + 1) if broken(n) is None)
        raise UserError(f"--nproc {nproc} {reasons[rule]}: try --nproc {fitting}")


def tokenizer_of(args: argparse.Namespace, config: Config) -> Any:
    """Return the tokenizer given by --tokenizer, else the model's own."""
    return tokenizer_for(Path(args.source), config, args.tokenizer)


def prompt_ids(args: argparse.Namespace, text: str, tokenizer: Any, config: Config) -> list[int]:
    """Return the tokens of a prompt, checked against the model's vocabulary."""
    vocab = config.model.vocab
    if args.prompt_tokens is not None:
        try:
            ids = [int(word) for word in args.prompt_tokens.split(",")]
        except ValueError:
            raise UserError(f"--prompt-tokens {args.prompt_tokens} must be numbers, e.g. 5,17,2") from None
        if min(ids) < 0 or max(ids) >= vocab:
            raise UserError(f"--prompt-tokens must lie between 0 and {vocab - 1}, the model's vocabulary")
        return ids
    if tokenizer is None:
        raise UserError("no tokenizer is known for this model: name one with --tokenizer, or give --prompt-tokens")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("--prompt is not UTF-8: write the text in UTF-8, or give --prompt-tokens") from None
    if config.objective_facts.fills_blanks:
        return encode_source(config, text, tokenizer)
    return text_ids(Path(args.source), config, tokenizer, text)


def generate_rank(args: argparse.Namespace) -> None:
    """Generate text as one rank; rank 0 prints it."""
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.generate import generate_all

    def use(ctx: Any, modules: Any, place: Any) -> None:
        model = ctx.config.model
        tokenizer = tokenizer_of(args, ctx.config)
        if ctx.config.objective_facts.fills_blanks:
            return fill_rank(args, ctx, modules[0], tokenizer)
        ends = end_tokens(Path(args.source), tokenizer)
        drawing = (args.temperature, args.top_p, args.seed)
        generated = generate_all(modules[0], model, args.ids, args.max_tokens, *drawing, ends, args.batch)
        if place.rank:
            return
        if any(len(tokens) < args.max_tokens and tokens[-1] not in ends for tokens in generated):
            print(f"(stopped: the model's context of {model.seq} tokens is full)", file=sys.stderr)
        show(args, generated, tokenizer, ends, answers=model.kind_facts.is_encoder_decoder)

    with_model(args.source, args.sections, use, args.ema)


def show(args: argparse.Namespace, generated: list[list[int]], tokenizer: Any, ends: set[int], answers: bool) -> None:
    """Print the generated texts, each after the prompt that it continues; with `answers` without the prompt.

    --json prints one object for --prompt, and a list of objects for a file of prompts."""
    lines: list[dict[str, Any]] = []
    for ids, tokens in zip(args.ids, generated, strict=True):
        without_end = tokens[:-1] if tokens[-1] in ends else tokens
        text = tokenizer.decode(without_end) if tokenizer is not None else None
        lines.append({"prompt_tokens": ids, "tokens": tokens, "text": text})
    if args.json:
        print(json.dumps(lines if args.prompts is not None else lines[0]), flush=True)
        return
    for prompt, line in zip(args.texts, lines, strict=True):
        plain = ",".join(map(str, line["tokens"]))
        beginning = "" if answers else prompt or ""
        print(plain if line["text"] is None else beginning + line["text"], flush=True)
    if tokenizer is not None:
        print(f"({plural(sum(map(len, generated)), 'token')})", file=sys.stderr)


# The functions below are for a model that fills in blanks. Its prompt is a text with [MASK]s within it, or with a
# [gMASK] at its end, from where the model continues the text.


def check_source(config: Config, ids: list[int], tokenizer: Any) -> list[int]:
    """Return the prompt with its masks checked. A prompt without a mask gets a [gMASK] at its end, which asks the model
    to continue the text."""
    mask, gmask, *_ = blank_specials(config, tokenizer)
    if mask not in ids and gmask not in ids:
        ids = [*ids, gmask]
    if mask in ids and gmask in ids:
        raise UserError("the prompt has [MASK] and [gMASK], and the model learned texts with one kind: use one of them")
    if gmask in ids[:-1]:
        raise UserError("[gMASK] stands for the end of a text: put it last, or use [MASK] within the text")
    if len(ids) >= config.model.seq:
        raise UserError(
            f"the prompt's {len(ids)} tokens leave no room in the model's {config.model.seq}: give a shorter prompt"
        )
    return ids


def encode_source(config: Config, prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a text. [MASK] and [gMASK] in it become their special tokens and are not encoded as text."""
    mask, gmask, *_ = blank_specials(config, tokenizer)
    special = {"[MASK]": [mask], "[gMASK]": [gmask]}
    return [id for part in MARKS.split(prompt) if part for id in special.get(part) or tokenizer.encode(part)]


def fill_rank(args: argparse.Namespace, ctx: Any, module: Any, tokenizer: Any) -> None:
    """Fill in the blanks of `args.ids` and print the whole text."""
    from meshwright.infer.fill_blanks import BlankGenerator, fill_blanks

    mask, gmask, sop, eop, _ = blank_specials(ctx.config, tokenizer)
    places = [at for at, id in enumerate(args.ids) if id in (mask, gmask)]
    generator = BlankGenerator(module, ctx.config.model, args.ids, places, gmask in args.ids)
    spans = fill_blanks(generator, sop, eop, args.max_tokens, args.temperature, args.top_p, args.seed)
    if ctx.mesh.rank:
        return
    if generator.room == 0:
        print(f"(stopped: the model's context of {ctx.config.model.seq} tokens is full)", file=sys.stderr)
    filled: list[int] = []
    remaining = iter(spans)
    for id in args.ids:
        filled += next(remaining) if id in (mask, gmask) else [id]
    text = None if tokenizer is None else tokenizer.decode(filled)
    if args.json:
        print(json.dumps({"prompt_tokens": args.ids, "tokens": spans, "text": text}), flush=True)
        return
    print(",".join(map(str, filled)) if text is None else text, flush=True)
    if text is not None:
        print(f"({', '.join(str(len(span)) for span in spans)} tokens)", file=sys.stderr)
