"""`meshwright generate` of a model that fills in blanks: the prompt is a text with [MASK]s in it, or one that goes on
where [gMASK] stands."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from meshwright.config.sections import Config
from meshwright.engine.datasets import blank_specials
from meshwright.errors import UserError

MARKS = re.compile(r"(\[g?MASK\])")


def check_source(config: Config, ids: list[int], tokenizer: Any) -> list[int]:
    """Returns the prompt with its masks: without any, the text goes on, for which [gMASK] stands."""
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
    """Returns the tokens of a text in which [MASK] and [gMASK] stand for themselves."""
    mask, gmask, *_ = blank_specials(config, tokenizer)
    special = {"[MASK]": [mask], "[gMASK]": [gmask]}
    return [id for part in MARKS.split(prompt) if part for id in special.get(part) or tokenizer.encode(part)]


def fill_rank(args: argparse.Namespace, ctx: Any, module: Any, tokenizer: Any) -> None:
    """Fills in the blanks of `args.ids` and prints the whole text."""
    from meshwright.infer.fill_blanks import BlankGenerator, fill_blanks

    mask, gmask, sop, eop, _ = blank_specials(ctx.config, tokenizer)
    places = [at for at, id in enumerate(args.ids) if id in (mask, gmask)]
    generator = BlankGenerator(module, ctx.config.model, args.ids, places, gmask in args.ids)
    found = fill_blanks(generator, sop, eop, args.max_tokens, args.temperature, args.top_p, args.seed)
    if ctx.mesh.rank:
        return
    if generator.room == 0:
        print(f"(stopped: the model's context of {ctx.config.model.seq} tokens is full)", file=sys.stderr)
    filled, spans = list[int](), iter(found)
    for id in args.ids:
        filled += next(spans) if id in (mask, gmask) else [id]
    text = None if tokenizer is None else tokenizer.decode(filled)
    if args.json:
        print(json.dumps({"prompt_tokens": args.ids, "tokens": found, "text": text}), flush=True)
        return
    print(",".join(map(str, filled)) if text is None else text, flush=True)
    if text is not None:
        print(f"({', '.join(str(len(span)) for span in found)} tokens)", file=sys.stderr)
