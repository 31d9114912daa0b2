"""`meshwright tune`: fine-tune a Hugging Face model on conversations in one command.

It chooses settings and runs other commands: what `data chat` does with the conversations, then `train`. Everything lies
in one folder, OUT, which is the run's too, so the same command continues after any interruption.
"""

from __future__ import annotations

import argparse
import math
import shlex
import zlib
from pathlib import Path
from typing import Any

from meshwright.cli.data import show_samples, tell_conversations
from meshwright.cli.main import run as run_command
from meshwright.config.load import config_from, load_config, set_key
from meshwright.config.rules import check, features_fit
from meshwright.config.sections import Config
from meshwright.config.yaml_text import dump_yaml
from meshwright.data.chat_prepare import ChatSummary, measure_packing, prepare_chat
from meshwright.data.packed import CHAT, KINDS, length_words
from meshwright.disk import check_writable, hub_hint, refusal
from meshwright.errors import UserError, notice, plural
from meshwright.outside import read_json
from meshwright.record.checkpoint_format import is_hf_folder, write_json, write_whole
from meshwright.record.run_folder import complete_step, read_run
from meshwright.spec.model.description import describe
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.model.hf.folder import has_weights

EXAMPLES = """example:
  meshwright tune models/llama-8b talks.jsonl --lora
  meshwright tune models/qwen3-600m talks.jsonl --out runs/mine train.steps=200 optimizer.lr=1e-5
  meshwright tune models/llama-8b pairs.jsonl --lora              (pairs of a better and a worse answer: DPO)

Each line of talks.jsonl is a conversation: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]}; `meshwright data chat --help` lists the other forms. The same command continues a run that was
stopped. Any key of docs/config.md can be set as key=value. OUT/tune.yaml has the settings, for `meshwright train`."""

OWN_JSON = True
EPOCHS = 3.0
SHOWN = 3  # samples that are printed
FEWEST = 40  # With fewer conversations, none are kept back for validation.
KEPT_BACK = 0.05
MOST_BATCH, UPDATES_AN_EPOCH = 32, 16  # A step takes few samples of little data, so that there are enough updates.
CONFIG, MADE_FROM = "tune.yaml", "made-from.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="a folder that transformers saved a chat model in")
    parser.add_argument("data", metavar="DATA.jsonl", help="conversations, pairs of answers or judged answers")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys, e.g. train.steps=100")
    lora = "train low-rank adapters over frozen weights, which takes a fraction of the memory (default: all weights)"
    parser.add_argument("--lora", action="store_true", help=lora)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/MODEL-DATA)")
    parser.add_argument("--epochs", type=float, default=EPOCHS, metavar="N", help="passes over the data (default: 3)")
    parser.add_argument("--template", default="", metavar="FILE.jinja", help="another chat template than the model's")
    parser.add_argument("--nproc", type=int, help="local ranks to start (default: the number of GPUs, or 1)")


def run(args: argparse.Namespace) -> int:
    """Prepare the data and the settings unless an earlier call did, then train and say what can be done next."""
    source = source_of(args)
    out = args.out or Path(f"runs/{Path(args.model).resolve().name}-{Path(args.data).stem}{'-lora' * args.lora}")
    if not (out / "run.json").exists():
        # Until a run has begun, nothing is lost by starting anew, with other settings if these are given.
        prepare(args, out, source)
    elif not (out / MADE_FROM).is_file():
        raise UserError(f"{out} holds another run: name a new folder with --out")
    made = read_json(out / MADE_FROM)
    if changed := [key for key in source if made["source"].get(key) != source[key]]:
        was = ", ".join(f"{key} (there {made['source'].get(key)}, here {source[key]})" for key in changed)
        raise UserError(f"{out} was made with another {was}: repeat that command to continue, or name another --out")
    words = list(args.overrides)
    config = load_config(out / CONFIG, words)
    if complete_step(config) is not None:
        notice(f"{out} is complete at step {config.train.steps}: a higher train.steps continues it")
    else:
        command = ["train", str(out / CONFIG), "--nproc", str(args.nproc or made["ranks"]), *words]
        notice(f"\ntraining: {shlex.join(['meshwright', *command])}")
        code = run_command(command)
        if code or complete_step(config) is None:
            notice("the same `meshwright tune` command continues")
            return code
    tell_results(config, out, args)
    return 0


def source_of(args: argparse.Namespace) -> dict[str, Any]:
    """Check the model and the data, and return a description of both that changes when they do."""
    if (Path(args.model) / "run.json").is_file():
        raise UserError(f"{args.model} is a run: write its model with `meshwright export {args.model} --to DIR` first")
    if not is_hf_folder(args.model) or not has_weights(Path(args.model)):
        lacks = "weights" if is_hf_folder(args.model) else f"config.json{hub_hint(args.model)}"
        raise UserError(f"{args.model} has no {lacks}: name a folder that transformers saved a model in")
    if not args.epochs > 0 or (args.nproc is not None and args.nproc < 1):
        raise UserError("--epochs must be above 0 and --nproc at least 1")
    try:
        content = Path(args.data).read_bytes()
    except OSError as error:
        raise refusal(f"{args.data} can't be read", error, args.data, "a .jsonl file of conversations") from None
    text = f"{args.data} (checksum {zlib.crc32(content):08x})"
    kept = {"--lora": args.lora, "--epochs": args.epochs, "--template": args.template}
    return {"model": str(Path(args.model).resolve()), "data": text, **kept}


def prepare(args: argparse.Namespace, out: Path, source: dict[str, Any]) -> None:
    """Write the token files, the config and, last, the note that says what all of it was made from."""
    check_writable(out, f"--out {out}", "another --out")
    prefix = str(out / "data" / Path(args.data).stem)
    # A mistake in the given keys is found here, before the data are prepared.
    check(config_from(first_sections(args, out, prefix)), 1, [features_fit])
    notice(f"data: {args.data} through the chat template of {args.template or args.model}")
    summary, tokenizer, lengths = prepare_chat([args.data], prefix, args.model, args.template, force=True)
    show_samples(summary, tokenizer, SHOWN * summary.facts.unit)
    tell_conversations(summary)
    raw, ranks, why = sections_of(args, out, summary, lengths)
    print(length_words([prefix], config_from(raw).model.seq), flush=True)
    notice(f"settings in {out / CONFIG}: {why}")
    write_whole(out / CONFIG, f"# Written by: {args.command}\n# {why}\n{dump_yaml(raw, width=120)}".encode())
    write_json(out / MADE_FROM, {"source": source, "ranks": ranks})


def first_sections(
    args: argparse.Namespace, out: Path, prefix: str, kind: str = "chat", keeps: bool = True
) -> dict[str, Any]:
    """Return the sections that hold for conversations of this kind, with the given keys in them.

    `keeps`: some conversations are kept for validation."""
    raw: dict[str, Any] = {
        "model": {"hf": args.model},
        "tune": {"kind": "lora" if args.lora else "full"} | ({"loss": "kto"} if KINDS[kind].judged else {}),
        "data": {"prefixes": [prefix], "objective": "chat" if kind == CHAT else "preference",
                 "split": [1 - KEPT_BACK, KEPT_BACK, 0.0] if keeps else [1.0, 0.0, 0.0]},
        "train": {}, "optimizer": {}, "lr": {"warmup": "3%"}, "run": {"dir": str(out), "eval_first": keeps},
    }  # fmt: skip
    for word in args.overrides:
        set_key(raw, word)
    return raw


def sections_of(
    args: argparse.Namespace, out: Path, summary: ChatSummary, lengths: list[int]
) -> tuple[dict[str, Any], int, str]:
    """Return the sections of the run's config, the number of ranks, and the reasons for the main numbers.

    Given keys stay as they are, and defaults follow from them: the steps from the batch, the batch from the length.
    """
    from meshwright.launch.launch import local_devices
    from meshwright.launch.this_machine import layout_words, on_cpu

    unit = summary.facts.unit
    keeps = len(lengths) // unit >= FEWEST
    raw = first_sections(args, out, summary.prefix, summary.kind, keeps)

    def with_default(key: str, value: Any) -> Config:
        section, _, name = key.partition(".")
        raw[section].setdefault(name, value)
        return config_from(raw)

    config = config_from(raw)
    if config.compares and not config.tune.adapts:
        raise UserError(
            f"{args.data} holds {summary.facts.words}, whose loss compares with the frozen model: add --lora"
        )
    ranks = args.nproc or local_devices(config.run.device, least=1)
    config = with_default("model.seq", config.model.seq)
    config = with_default("train.precision", "fp32" if on_cpu(config) else "bf16")
    trained = max(1, round(measure_packing(lengths, config.model.seq, unit)[0] * config.data.split[0]))
    # The batch is a power of two times the ranks, so that any division among them fits.
    wanted = min(MOST_BATCH, trained // UPDATES_AN_EPOCH) // ranks
    config = with_default("train.global_batch", ranks * 2 ** max(0, wanted.bit_length() - 1))
    config = with_default("train.steps", math.ceil(args.epochs * trained / config.train.global_batch))
    config = with_default("optimizer.lr", learning_rate_for(parameter_count(describe(config.model)), args.lora))
    with_default("lr.min", float(f"{config.optimizer.lr / 10:.2g}"))
    config = with_default("run.eval_every", max(1, config.train.steps // 4))
    for word in layout_words(config, args.overrides, ranks):
        set_key(raw, word)
    c = config_from(raw).train
    kept = "5 % of the conversations are kept for validation" if keeps else "they are too few to validate with some"
    return raw, ranks, (
        f"{plural(trained, 'sample')}, {args.epochs:g} times, {c.global_batch} a step make {plural(c.steps, 'step')}; "
        f"learning rate {config.optimizer.lr:g}; {kept}"
    )  # fmt: skip


def learning_rate_for(parameters: int, adapts: bool) -> float:
    """Return a usual peak learning rate: 2e-5 for a billion parameters, more for smaller models, ten times as much for
    adapters."""
    full = min(1e-3, max(1e-5, 2e-5 * math.sqrt(1e9 / parameters)))
    return float(f"{10 * full if adapts else full:.1g}")


def tell_results(config: Config, out: Path, args: argparse.Namespace) -> None:
    """Print the losses on the conversations that were kept back, and commands that use or continue the run."""
    measured = read_run(out).validations
    if measured:
        first, last = measured[0], measured[-1]
        since = "before" if not first["step"] else f"after step {first['step']}"
        losses = f"loss {first['loss']:.4f} {since}, {last['loss']:.4f} at step {last['step']}"
        notice(f"\nevaluation on the conversations that were kept: {losses}")
    whole, folder = ("merge", "merged") if config.tune.adapts else ("export", "exported")
    again = ["tune", args.model, args.data, *["--lora"] * args.lora, "--out", str(out)]
    rows = {
        "chat": ["chat", str(out)],
        "export": [whole, str(out), "--to", f"{out}/{folder}"],
        "continue": [*again, f"train.steps={2 * config.train.steps}"],
    }
    for name, command in rows.items():
        notice(f"{name + ':':<10} {shlex.join(['meshwright', *command])}")
