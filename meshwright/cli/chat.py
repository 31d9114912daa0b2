"""`meshwright chat`: a conversation with a model in the terminal, or with lines that another program writes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from meshwright.cli.generate import check_drawing, end_tokens, model_config, tokenizer_of
from meshwright.config.sections import Config
from meshwright.data.chat_template import Broken, ChatTemplate, load_template, named_template
from meshwright.data.token_file import read_metadata
from meshwright.errors import UserError
from meshwright.launch.launch import start

EXAMPLES = """example:
  meshwright chat runs/tuned
  meshwright chat models/llama-8b --system "Answer in one sentence." --temperature 0
  printf 'Hello\\n/reset\\nAnd again\\n' | meshwright chat runs/tuned --json

Each line is a message. /reset forgets the conversation, /system TEXT begins a new one with other instructions, and
Ctrl-D ends; Ctrl-C ends an answer early."""

CUT = "\N{REPLACEMENT CHARACTER}"  # a character of which only the first tokens are there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]|HF-FOLDER")
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    parser.add_argument("--tokenizer", metavar="T", help="another tokenizer than the one beside the model")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of an answer (default 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest token (default 0.7)")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the likeliest tokens that hold this share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1, help="cut the model over this many tensor-parallel ranks")


def run(args: argparse.Namespace) -> int:
    if min(args.nproc, args.max_tokens) < 1:
        raise UserError("--nproc and --max-tokens must be at least 1")
    check_drawing(args)
    config = model_config(args)
    if config.model.kind_facts.is_encoder_decoder or config.objective_facts.fills_blanks:
        raise UserError(f"{args.source} is no model that continues a text: use meshwright generate")
    args.rendered = template_of(args, config)
    replace(args.rendered).render([{"role": "user", "content": "?"}], begins=True)  # tells mistakes before ranks start
    if tokenizer_of(args, config) is None:
        raise UserError("no tokenizer is known for this model: name one with --tokenizer")
    args.parent = os.getpid()
    return start(args.nproc, chat_rank, args)


def template_of(args: argparse.Namespace, config: Config) -> ChatTemplate:
    """Returns the template that was named, the one beside the model, or the one that the run's data were made with."""
    folder = Path(args.source)
    if args.template:
        return named_template(args.template, folder)
    try:
        return load_template(folder)
    except UserError:
        told = [(read_metadata(prefix) or {}).get("template") for prefix in config.data.prefixes]
        if not (told and isinstance(told[0], str) and told[0]):
            raise
        return ChatTemplate(told[0])


class Talk:
    """A conversation and where its next message comes from."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any, vocab: int, seq: int) -> None:
        self.args, self.tokenizer, self.vocab, self.seq = args, tokenizer, vocab, seq
        self.template: ChatTemplate = args.rendered
        self.lines = _lines(args)
        self.messages: list[dict[str, Any]] = []
        self.reset(args.system)

    def reset(self, system: str) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def next_ids(self) -> list[int]:
        """Returns the tokens that the next answer follows; none at the end."""
        for line in self.lines:
            word, _, rest = line.strip().partition(" ")
            if word in ("/reset", "/system"):
                self.reset(rest.strip() if word == "/system" else self.system)
            elif line.strip():
                self.messages.append({"role": "user", "content": line.strip()})
                ids = self._ids()
                if ids:
                    return ids
                self.messages.pop()
        return []

    def _ids(self) -> list[int]:
        """Returns the tokens of the conversation so far; none if that can't be answered."""
        try:
            ids: list[int] = self.tokenizer.encode(self.template.render(self.messages, begins=True))
        except Broken as error:
            print(f"({error})", file=sys.stderr, flush=True)
            return []
        if max(ids) >= self.vocab:
            beyond = f"beyond the model's {self.vocab}: the tokenizer is another model's"
            raise UserError(f"the conversation has token {max(ids)}, {beyond}")
        if len(ids) > self.seq:
            print(f"(the conversation's {len(ids)} tokens are more than the model's {self.seq}: /reset forgets them)",
                  file=sys.stderr, flush=True)  # fmt: skip
            return []
        return ids

    def ends(self, known: set[int]) -> set[int]:
        """Returns the tokens that end an answer: those that end a text, and the one that the template puts there."""
        mark, after = "ANSWER", []
        with contextlib.suppress(Broken):
            text = self.template.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}])
            after = self.tokenizer.encode(text.rpartition(mark)[2].lstrip())
        return known | ({after[0]} if after and not self.tokenizer.decode(after[:1]) else set())

    def answered(self, tokens: Iterator[int], ends: set[int]) -> None:
        """Shows an answer while it is written, and keeps it."""
        ids: list[int] = []
        shown = 0
        try:
            for token in tokens:
                ids += [] if token in ends else [token]
                text = self.tokenizer.decode(ids).rstrip(CUT)
                if not self.args.json:
                    print(text[shown:], end="", flush=True)
                shown = max(shown, len(text))
        except KeyboardInterrupt:
            if self.args.nproc > 1:
                raise
        text = self.tokenizer.decode(ids)
        self.messages.append({"role": "assistant", "content": text.strip()})
        print(json.dumps({"text": text, "tokens": ids}) if self.args.json else text[shown:], flush=True)


def _lines(args: argparse.Namespace) -> Iterator[str]:
    """Yields the messages: on a terminal after a mark, and with the keys that edit a line."""
    if args.nproc > 1:  # a rank that was started has no input of its own
        given: IO[str] = open(f"/proc/{args.parent}/fd/0", encoding="utf-8", errors="replace")  # noqa: SIM115
        yield from given
        return
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401

    print("(/reset forgets the conversation, /system TEXT begins another, Ctrl-D ends)", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def chat_rank(args: argparse.Namespace) -> None:
    from meshwright.comm.announce import Announcements
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.generate import generate, generator_of

    def use(ctx: Any, modules: Any, place: Any) -> None:
        model, tokenizer = ctx.config.model, tokenizer_of(args, ctx.config)
        talk = Talk(args, tokenizer, model.vocab, model.seq)
        ends = talk.ends(end_tokens(Path(args.source), tokenizer))
        announced = None if place.world == 1 else Announcements(place.rank)
        while ids := _shared(announced, [] if place.rank else talk.next_ids()):
            generator, most = generator_of(modules[0], model, len(ids), args.max_tokens)
            answer = generate(generator, ids, most, args.temperature, args.top_p, args.seed, ends)
            if place.rank:
                list(answer)
            else:
                talk.answered(answer, ends)

    with_model(args.source, args.sections, use)


def _shared(announced: Any, ids: list[int]) -> list[int]:
    """Send rank 0's tokens to all ranks. The others may wait for hours until somebody types a line."""
    if announced is None:
        return ids
    found: list[int] = json.loads(announced.next(json.dumps([int(token) for token in ids])))
    return found
