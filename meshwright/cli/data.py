"""`meshwright data`: turn text or conversations into token files, join such files, and look at a sample."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from meshwright.config.data import BLANK_SPECIALS, SPECIALS
from meshwright.config.load import load_config
from meshwright.config.numbers import length_argument
from meshwright.config.rules import READING_RULES, check
from meshwright.data.chat_prepare import ChatSummary, measure_packing, prepare_chat
from meshwright.data.merge import merge
from meshwright.data.packed import KINDS, cut_of, fitting_length, is_chat, sizes_of
from meshwright.data.prepare import prepare
from meshwright.data.selection import Selection
from meshwright.data.stream import SPLIT_NAMES
from meshwright.disk import tell_files
from meshwright.errors import UserError, plural
from meshwright.outside import LARGEST
from meshwright.record.companions import tokenizer_of_data
from meshwright.show.progress import progress
from meshwright.show.sample_view import MARKS_LEGEND, conversation_text, conversations_of, conversations_summary
from meshwright.show.terminal import console_for, has_colour, say_next, show
from meshwright.show.units import percent

EXAMPLES = """example:
  meshwright data prepare stdlib --out data/python --tokenizer train:8192
  meshwright data prepare books/ news.jsonl --out data/text --tokenizer gpt2/tokenizer.json --workers 8
  meshwright data prepare crawl/ --out data/crawl --min-chars 200 --dedup --tokenizer gpt2/tokenizer.json
  meshwright data merge data/all data/text data/crawl
  meshwright data chat talks.jsonl --model models/llama-8b --out data/talks --seq 4096
  meshwright data show examples/demo.yaml --sample 3"""

SHOWN_KINDS = 4  # kinds of files that were left out, named in the summary

PREPARE = """Write PREFIX.bin and PREFIX.idx (Megatron's format) and PREFIX.json (how they were made).

INPUT is a .txt file (one document), a .jsonl file (one JSON object per line), either of them compressed (.gz, .zst), a
.parquet file (one document per row), a folder of these, or the word stdlib: the source text of Python's own standard
library. Every document ends with the end token."""

MERGE = """Write OUT.bin, OUT.idx and OUT.json with the documents of several token files, in order.

All of them must have been made with the same tokenizer."""

CHAT = """Write PREFIX.bin and PREFIX.idx, one conversation per document, and PREFIX.mask.bin and .idx, which mark the
tokens that are learned. Then print five conversations: learned text is green (bad answers: red) and the rest dim; in a
file it is put in « » (bad answers: ‹ ›).

INPUT is a .jsonl file (or a .json list) of objects with: messages (role, content); conversations (from, value:
sharegpt); prompt and completion; instruction, input and output (alpaca); prompt, chosen and rejected (preference
pairs); or prompt, completion and label (judged answers). The chat template and the tokenizer are those of the
model's folder."""

SHOW = """Print sample N of the data that a config names, as a model gets it.

A token to predict is shown after what the model sees in its place: {[MASK]=word} is masked, {other=word} was changed
into another token and {word} stays as it is. In causal data, tokens without a loss are dim. In conversations, learned
tokens are green (bad answers: red); without colours they are put in « » (bad answers: ‹ ›). Where spans were taken out,
<0>, <1> and so on replace them in the input, and precede them in the target. With blanks, the source comes first and
then the spans that fill them, each after [sop] with the position of its first token in the source."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=intermixed_parser(parser)
    )
    options = add_action(actions, "prepare", "tokenise text into PREFIX.bin and PREFIX.idx", PREPARE)
    inputs = ".txt, .jsonl (also .gz, .zst), .parquet, a folder, or stdlib"
    options.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs)
    options.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without a suffix")
    tokenizers = "bytes (default), PATH/tokenizer.json, PATH.model (SentencePiece), or train:SIZE"
    options.add_argument("--tokenizer", default="bytes", metavar="T", help=tokenizers)
    options.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    options.add_argument("--eod", metavar="TOKEN|ID", help="the end-of-document token or its id, if it isn't found")
    options.add_argument("--field", default="text", help="the .jsonl field or parquet column (default: text)")
    glob = "in folders, take the files with such names instead, e.g. '*.md'; other kinds than above are text"
    options.add_argument("--glob", action="append", default=[], metavar="PATTERN", help=glob)
    options.add_argument("--min-chars", type=int, default=0, metavar="N", help="leave out shorter documents")
    options.add_argument("--max-chars", type=int, default=0, metavar="N", help="leave out longer documents")
    duplicates = "keep only one copy of equal documents (takes about 100 bytes of memory per document)"
    options.add_argument("--dedup", action="store_true", help=duplicates)
    options.add_argument("--sentences", action="store_true", help="record where sentences begin, for masked data")
    add_output_options(options)
    add_merge_arguments(actions)
    add_chat_arguments(actions)
    shown = add_action(actions, "show", "print a sample of a run's data", SHOW)
    shown.add_argument("config", metavar="CONFIG.yaml")
    shown.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change")
    shown.add_argument("--sample", type=int, default=0, metavar="N", help="its number in the run (default: 0)")
    shown.add_argument("--split", choices=SPLIT_NAMES, default="train", help="the part of the data (default: train)")
    shown.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print all fields as JSON")


def add_action(actions: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """Add an action such as `prepare` to the command and return its parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=description, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    return parser


def add_output_options(options: argparse.ArgumentParser) -> None:
    """Add the options of every action that writes token files."""
    options.add_argument("--force", action="store_true", help="overwrite existing output")
    # The command itself has --json too. A default here would undo a --json that was given before the action's name.
    options.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the summary as JSON")


def intermixed_parser(parser: argparse.ArgumentParser) -> type[argparse.ArgumentParser]:
    """Return a subclass of the command's parser for its actions, which takes words and options in any order.

    argparse supports this order only for parsers without actions, so each action's parser has to do it by itself."""

    class Mixed(type(parser)):  # type: ignore[misc]
        # parse_known_intermixed_args calls parse_known_args itself, which would recurse without end.
        inside = False

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            if self.inside:
                return super().parse_known_args(args, namespace)
            self.inside = True
            try:
                return self.parse_known_intermixed_args(args, namespace)
            finally:
                self.inside = False

    return Mixed


def run(args: argparse.Namespace) -> None:
    actions = {"show": show_sample, "chat": prepare_conversations, "merge": merge_files, "prepare": prepare_files}
    actions[args.action](args)


def show_sample(args: argparse.Namespace) -> None:
    """Print one sample of a run's data as a model gets it."""
    from meshwright.engine.datasets import blanks_of, datasets_of, masking_of, spans_of
    from meshwright.show.sample_view import sample_summary, sample_text

    config = load_config(args.config, args.overrides)
    check(config, config.layout.least_world, READING_RULES)
    if args.sample < 0:
        raise UserError(f"--sample {args.sample} must not be negative: the first is 0")
    data = dict(zip(SPLIT_NAMES, datasets_of(config), strict=True))[args.split]
    if data is None:
        raise UserError(f"data.split={list(config.data.split)} leaves no {args.split} data: choose another --split")
    sample = data.sample(args.sample)
    if args.json:
        print(json.dumps({name: value.tolist() for name, value in sample.items()}))
        return
    tokenizer = tokenizer_of_data(config.data.prefixes)
    if config.objective_facts.packed and tokenizer is not None:
        _show_conversations(args, sample, tokenizer, KINDS[is_chat(config.data.prefixes[0])].is_pairs)
        return
    # The ids that stand for no text are shown by name: the tokenizer may not know them.
    special: dict[int, str] = {}
    if config.objective == "masked":
        named = zip(masking_of(config).specials, SPECIALS, strict=True)
        special = {token: f"[{name.upper()}]" for token, name in named}
    elif config.objective_facts.fills_blanks:
        special = dict(zip(blanks_of(config).specials, (f"[{name}]" for name in BLANK_SPECIALS), strict=True))
    elif config.objective == "spans":
        spans = spans_of(config)
        special = {spans.sentinel - n: f"<{n}>" for n in range(spans.spans)} | {spans.eod: "[END]"}
    elif tokenizer is not None:
        special = {tokenizer.eod: "[END]"}
    spelling = (lambda token: f"{token} ") if tokenizer is None else (lambda token: tokenizer.decode([token]))
    from rich.text import Text

    heading = f"sample {args.sample:,} of {args.split}: {sample_summary(sample, special)}"
    show(console_for(sys.stdout), Text(heading), sample_text(sample, spelling, special))


def _show_conversations(args: argparse.Namespace, sample: Mapping[str, Any], tokenizer: Any, pairs: bool) -> None:
    """Print a packed sample, one conversation after the other, with its learned tokens marked."""
    from rich.text import Text

    colour = has_colour(sys.stdout)
    talks = list(conversations_of(sample, pairs))
    heading = f"sample {args.sample:,} of {args.split}: {conversations_summary(sample, len(talks))}"
    drawn = [conversation_text(n, tokens, mask, tokenizer, colour) for n, (tokens, mask) in enumerate(talks, start=1)]
    show(console_for(sys.stdout), Text(heading), *drawn)
    if not colour:
        print(MARKS_LEGEND)


def prepare_files(args: argparse.Namespace) -> None:
    """Turn text into token files and print a summary."""
    selection = Selection(args.field, args.min_chars, args.max_chars, args.dedup, args.sentences)
    summary = prepare(
        args.inputs, args.out, tokenizer=args.tokenizer, workers=args.workers, eod=args.eod, selection=selection,
        globs=args.glob, force=args.force, progress=progress,
    )  # fmt: skip
    if summary.replaced:
        what = "document holds" if summary.replaced == 1 else "documents hold"
        bad = f"{summary.replaced:,} {what} bytes that are not UTF-8, replaced by U+FFFD"
        print(f"meshwright: warning: {bad}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(summary)))
        return
    counts = ((summary.empty, "empty"), (summary.filtered, "too short or long"), (summary.duplicates, "seen before"))
    words = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    dropped = f" ({words} left out)" if words else ""
    print(f"documents   {summary.documents:,}{dropped} from {plural(summary.input_files, 'file')}")
    if summary.left_out:
        kinds = sorted(summary.left_out.items(), key=lambda kind: -kind[1])
        named = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds[:SHOWN_KINDS])
        more = ", ..." if len(kinds) > SHOWN_KINDS else ""
        many = plural(sum(summary.left_out.values()), "file")
        print(f"left out    {many} of other kinds ({named}{more}): --glob '*{kinds[0][0]}' takes such files as text")
    if args.sentences:
        print(f"sentences   {summary.sequences:,}")
    print(f"tokens      {summary.tokens:,} as {summary.dtype}")
    print(f"vocabulary  {summary.vocab_size:,}, documents end with token {summary.eod} ({summary.tokenizer})")
    print(
        f"time        {summary.seconds:.1f} s for {summary.input_bytes / 1e6:,.1f} MB, "
        f"{summary.mb_per_s:.1f} MB/s, workers {summary.workers}"
    )
    tell_files(summary.files)
    say_next(f"meshwright init --data {shlex.quote(args.out)}")


def add_merge_arguments(actions: Any) -> None:
    """Add the action `merge` and its arguments."""
    options = add_action(actions, "merge", "join token files", MERGE)
    options.add_argument("out", metavar="OUT", help="where to write, without a suffix")
    options.add_argument("prefixes", nargs="+", metavar="PREFIX", help="the token files to join")
    add_output_options(options)


def merge_files(args: argparse.Namespace) -> None:
    """Join token files and print a summary."""
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
    say_next(f"meshwright init --data {shlex.quote(args.out)}")


def add_chat_arguments(actions: Any) -> None:
    """Add the action `chat` and its arguments."""
    options = add_action(actions, "chat", "turn conversations into token files with a loss mask", CHAT)
    options.add_argument("inputs", nargs="+", metavar="INPUT.jsonl")
    options.add_argument("--model", required=True, metavar="DIR", help="the model's folder: tokenizer, chat template")
    options.add_argument("--out", required=True, metavar="PREFIX", help="where to write, without a suffix")
    options.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    packed = "the length of a run's samples (model.seq): also report how they are filled and what they cut"
    options.add_argument("--seq", type=length_argument, default=0, metavar="N", help=packed)
    add_output_options(options)


def prepare_conversations(args: argparse.Namespace) -> None:
    """Turn conversations into token files with a loss mask, and print a summary and the first conversations."""
    if args.seq < 0:
        raise UserError(f"--seq {args.seq} must be greater than zero")
    files = (args.inputs, args.out, args.model, args.template, args.force)
    summary, tokenizer, lengths = prepare_chat(*files, seq=args.seq)
    packed = measure_packing(lengths, args.seq, summary.facts.unit) if args.seq else None
    cut = cut_of([args.out], args.seq) if args.seq else None
    if cut and cut.hurts:
        better = fitting_length(*sizes_of([args.out]), LARGEST)
        print(f"meshwright: warning: {cut.words()}: --seq {better} would hold them", file=sys.stderr)
    if args.json:
        names = ("prefix", "kind", "conversations", "tokens", "learned", "longest", "files")
        document = {name: getattr(summary, name) for name in names} | {"share": summary.share}
        if packed and cut:
            document |= {"samples": packed[0], "cut": packed[1], "filled": packed[2]}
            document |= {"learned_kept": cut.kept, "nothing_learned": cut.empty}
        print(json.dumps(document))
        return
    show_samples(summary, tokenizer, len(summary.samples))
    tell_conversations(summary)
    if packed and cut:
        made = f"{plural(packed[0], 'sample')} of {args.seq:,} tokens, {percent(packed[2])} filled"
        print(f"packed         {made}; {cut.words()}")
    tell_files(summary.files, column=15)
    if len(args.inputs) == 1:
        say_next(shlex.join(["meshwright", "tune", args.model, *args.inputs]))


def show_samples(summary: ChatSummary, tokenizer: Any, count: int) -> None:
    """Print the first `count` conversations with their learned tokens marked."""
    console = console_for(sys.stdout)
    for number, masked in enumerate(summary.samples[:count], start=1):
        # The files store the two answers of a pair one after the other and in the same way. The second is the bad one,
        # which `conversation_text` marks where the mask is 2.
        is_bad = summary.facts.is_pairs and number % 2 == 0
        mask = [2 * learned for learned in masked.mask] if is_bad else masked.mask
        show(console, conversation_text(number, masked.tokens, mask, tokenizer, has_colour(sys.stdout)))
    if not has_colour(sys.stdout):
        print(MARKS_LEGEND)


def tell_conversations(summary: ChatSummary) -> None:
    """Print how many conversations and tokens there are."""
    pairs = plural(summary.conversations // 2, "pair")
    count = pairs if summary.facts.is_pairs else f"{summary.conversations:,} ({summary.kind})"
    print(f"conversations  {count}, the longest of {summary.longest:,} tokens")
    print(f"tokens         {summary.tokens:,}, of which {summary.learned:,} are learned ({percent(summary.share)})")
