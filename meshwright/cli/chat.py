"""`meshwright chat`: talk to a model in the terminal, or through a pipe from another program."""

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

from meshwright.cli.generate import model_config, tokenizer_of
from meshwright.config.sections import Config
from meshwright.data.chat_template import ChatTemplate, TemplateError, load_template, named_template
from meshwright.data.token_file import read_metadata
from meshwright.data.tokenizers import INCOMPLETE
from meshwright.errors import UserError
from meshwright.infer.reading import add_ema
from meshwright.infer.texts import check_drawing, end_tokens
from meshwright.launch.launch import start
from meshwright.outside import read_json

EXAMPLES = """example:
  meshwright chat runs/tuned
  meshwright chat models/llama-8b --system "Answer in one sentence." --temperature 0
  printf 'Hello\\n/reset\\nAnd again\\n' | meshwright chat runs/tuned --json

Each line is a message. /reset forgets the conversation, /system TEXT begins a new one with other instructions, and
Ctrl-D ends; Ctrl-C ends an answer early."""

TEMPERATURE, TOP_P = 0.7, 0.9
HELP = "(/reset forgets the conversation, /system TEXT begins another, /help prints this, Ctrl-D ends)"



def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT[@STEP]|HF-FOLDER")
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions that precede the conversation")
    parser.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    parser.add_argument("--tokenizer", metavar="T", help="use another tokenizer than the one beside the model")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="length of an answer (default 512)")
    own = "(default: the model's generation_config.json"
    parser.add_argument("--temperature", type=float, help=f"0 takes the likeliest token {own}, or {TEMPERATURE})")
    parser.add_argument("--top-p", type=float, help=f"draw from the likeliest tokens of this share {own}, or {TOP_P})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nproc", type=int, default=1, help="split the model over this many tensor-parallel ranks")
    add_ema(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.nproc, args.max_tokens) < 1:
        raise UserError("--nproc and --max-tokens must be at least 1")
    config = model_config(args)
    args.temperature, args.top_p = drawing_of(args)
    check_drawing(args.temperature, args.top_p, args.seed)
    if config.model.kind_facts.is_encoder_decoder or config.objective_facts.fills_blanks:
        raise UserError(f"{args.source} is not a model that continues text: use meshwright generate")
    args.rendered = template_of(args, config)
    # A template with a mistake should fail here, before any rank starts.
    replace(args.rendered).render([{"role": "user", "content": "?"}], begins=True)
    if tokenizer_of(args, config) is None:
        raise UserError("no tokenizer is known for this model: name one with --tokenizer")
    args.parent = os.getpid()
    return start(args.nproc, chat_rank, args)


def drawing_of(args: argparse.Namespace) -> tuple[float, float]:
    """Return the temperature and top-p: those given, else those that the model's makers name, else the usual ones."""
    found: Any = {}
    # The file is optional.
    with contextlib.suppress(OSError, ValueError):
        found = read_json(Path(args.source) / "generation_config.json")
    own = found if isinstance(found, dict) else {}
    drawn = (("temperature", args.temperature, TEMPERATURE), ("top_p", args.top_p, TOP_P))
    named = {key: own[key] if isinstance(own.get(key), int | float) else usual for key, _, usual in drawn}
    temperature, top_p = (float(named[key] if given is None else given) for key, given, _ in drawn)
    if args.temperature is None and own.get("do_sample") is False:
        temperature = 0.0
    return temperature, top_p


def template_of(args: argparse.Namespace, config: Config) -> ChatTemplate:
    """Return the template given by --template, else the one beside the model, else the one the run's data were made
    with."""
    folder = Path(args.source)
    if args.template:
        return named_template(args.template, folder)
    try:
        return load_template(folder)
    except UserError:
        recorded = [(read_metadata(prefix) or {}).get("template") for prefix in config.data.prefixes]
        if not (recorded and isinstance(recorded[0], str) and recorded[0]):
            raise
        return ChatTemplate(recorded[0])


class Talk:
    """A conversation, with the input that its next messages are read from."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any, vocab: int, seq: int) -> None:
        self.args, self.tokenizer, self.vocab, self.seq = args, tokenizer, vocab, seq
        self.template: ChatTemplate = args.rendered
        self.lines = _lines(args)
        self.messages: list[dict[str, Any]] = []
        self.reset(args.system)

    def reset(self, system: str) -> None:
        """Forget the conversation and begin a new one with the given system message, if there is one."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def next_ids(self) -> list[int]:
        """Read the next message and return the tokens of the conversation up to it; none at the end of the input."""
        for line in self.lines:
            word, _, rest = line.strip().partition(" ")
            if word in ("/reset", "/system"):
                self.reset(rest.strip() if word == "/system" else self.system)
            elif word == "/help":
                print(HELP, file=sys.stderr, flush=True)
            elif line.strip():
                self.messages.append({"role": "user", "content": line.strip()})
                ids = self._ids()
                if ids:
                    return ids
                # The message can't be answered: without it the conversation is as before, and the user may try again.
                self.messages.pop()
        return []

    def _ids(self) -> list[int]:
        """Return the tokens of the conversation so far. If it can't be answered, print why and return none."""
        try:
            ids: list[int] = self.tokenizer.encode(self.template.render(self.messages, begins=True))
        except TemplateError as error:
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

    def print_answer(self, tokens: Iterator[int], ends: set[int]) -> None:
        """Print an answer while it is generated, and add it to the conversation."""
        ids: list[int] = []
        shown = 0
        try:
            for token in tokens:
                ids += [] if token in ends else [token]
                # All tokens are decoded each time, since several tokens may make up one character.
                text = self.tokenizer.decode(ids).rstrip(INCOMPLETE)
                if not self.args.json:
                    print(text[shown:], end="", flush=True)
                shown = max(shown, len(text))
        except KeyboardInterrupt:
            # A single process keeps the shortened answer. Several ranks could not all stop at the same token.
            if self.args.nproc > 1:
                raise
        text = self.tokenizer.decode(ids)
        self.messages.append({"role": "assistant", "content": text.strip()})
        print(json.dumps({"text": text, "tokens": ids}) if self.args.json else text[shown:], flush=True)


def _lines(args: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that the user writes; on a terminal, after a prompt and with line editing."""
    if args.nproc > 1:
        # A started rank has no standard input, so this one opens that of the process that started it.
        given: IO[str] = open(f"/proc/{args.parent}/fd/0", encoding="utf-8", errors="replace")  # noqa: SIM115
        yield from given
        return
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    # Importing readline is what gives `input` its line editing.
    import readline  # noqa: F401

    drawn = f"drawn with --temperature {args.temperature:g} --top-p {args.top_p:g}" if args.temperature else "likeliest"
    print(f"{HELP}\n(answers: {drawn} tokens)", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return


def answer_ends(template: ChatTemplate, tokenizer: Any, known: set[int]) -> set[int]:
    """Return the tokens that end an answer: the `known` ones, which end a text, and the one that the template puts
    after an answer."""
    mark, after = "ANSWER", []
    with contextlib.suppress(TemplateError):
        text = template.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}])
        after = tokenizer.encode(text.rpartition(mark)[2].lstrip())
    # A special token decodes to nothing. Any other first token is ordinary text, which answers may contain.
    return known | ({after[0]} if after and not tokenizer.decode(after[:1]) else set())


def chat_rank(args: argparse.Namespace) -> None:
    """Run one rank of a chat. Rank 0 reads messages and prints answers; all ranks generate every token together."""
    from meshwright.comm.announce import Announcements
    from meshwright.infer.evaluate import with_model
    from meshwright.infer.generate import generate, generator_of

    def use(ctx: Any, modules: Any, place: Any) -> None:
        model = ctx.config.model
        tokenizer = tokenizer_of(args, ctx.config)
        talk = Talk(args, tokenizer, model.vocab, model.seq)
        ends = answer_ends(args.rendered, tokenizer, end_tokens(Path(args.source), tokenizer))
        announced = None if place.world == 1 else Announcements(place.rank)
        while ids := _broadcast_tokens(announced, [] if place.rank else talk.next_ids()):
            generator, most = generator_of(modules[0], model, len(ids), args.max_tokens)
            answer = generate(generator, ids, most, args.temperature, args.top_p, args.seed, ends)
            if place.rank:
                list(answer)
            else:
                talk.print_answer(answer, ends)

    with_model(args.source, args.sections, use, args.ema)


def _broadcast_tokens(announced: Any, ids: list[int]) -> list[int]:
    """Send rank 0's tokens to all ranks and return them.

    The others may wait for hours until the user types a line. Inside a broadcast that would be taken for a hang."""
    if announced is None:
        return ids
    shared: list[int] = json.loads(announced.next(json.dumps([int(token) for token in ids])))
    return shared
