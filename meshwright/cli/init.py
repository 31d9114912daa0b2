"""`meshwright init`: write a commented config from a few answers or flags, with a layout that the planner chooses. No
torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config.load import config_from, load_config, to_mapping
from meshwright.config.numbers import count_argument
from meshwright.config.presets import PRESETS
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.data.token_file import read_metadata
from meshwright.disk import refusal
from meshwright.engine.datasets import VOCAB_MULTIPLE
from meshwright.errors import UserError, nearest, notice
from meshwright.launch.this_machine import MARGIN, best_layout
from meshwright.plan.account import SHARDED, plain_words
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.measured import HOST
from meshwright.plan.memory import largest
from meshwright.plan.search import Candidate
from meshwright.show.units import count, seconds, size
from meshwright.spec.model.graph import parameter_count

EXAMPLES = """example:
  meshwright init                                             (asks for what it needs)
  meshwright init --model tiny --data data/text --devices 2 --out first.yaml
  meshwright init --model 1b --data data/text --cluster h100-80g-dgx --devices 8 --global-batch 512

MODEL is a size (tiny, 30m, 125m, 350m, 1b: decoders like Llama's) or a preset of `meshwright plan`."""

# The models by size: layers, hidden, heads, tokens of a sequence, peak learning rate.
SIZES = {
    "tiny": (4, 128, 4, 128, 3e-3), "30m": (8, 512, 8, 512, 1e-3), "125m": (12, 768, 12, 1024, 6e-4),
    "350m": (24, 1024, 16, 2048, 3e-4), "1b": (16, 2048, 16, 4096, 3e-4),
}  # fmt: skip
SHAPE = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False}
# The tokens of a step by size, and those for larger models and presets.
TOKENS_A_STEP = {"tiny": 2_048, "30m": 32_768, "125m": 262_144, "350m": 524_288}
DEFAULT_BATCH_TOKENS = 1_048_576
DEFAULT_VOCAB = 32_000

TEMPLATE = """# {parameters} parameters on {devices} x {device}: {layout}.
# {time} a step and {memory} in tensors on a rank at the peak, predicted (`meshwright memory {out}`, `meshwright plan`).
# Every key is explained in docs/config.md.
# Train with: meshwright train {out}{nproc}      Any key can be changed there: train.steps=50
model:
{model}
data:
  prefixes: {prefixes}   # token files of `meshwright data prepare`, without .bin
  split: [0.99, 0.01, 0.0]   # shares of the documents: train, validation, test
layout:   # how ranks share the work; dp takes the remaining ranks
{layout_keys}
train:
  steps: {steps}   # {tokens} tokens in all
  global_batch: {global_batch}   # sequences of a step, over all ranks
  micro_batch: {micro_batch}   # sequences that go through the model at once: more is faster and needs more memory
  precision: {precision}
optimizer:
  lr: {lr}   # the peak
lr:
  schedule: cosine
  warmup: {warmup}   # to the peak: steps, or a share of train.steps
  min: {min_lr}
checkpoint:
  every: auto   # about every 15 minutes; a run that is started again continues from the newest
run:
  dir: {run_dir}   # everything of the run: `meshwright watch {run_dir}` shows it
  eval_every: {eval_every}   # steps between validations
  device: {kind}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help=f"{', '.join(SIZES)}, or a preset such as llama3-8b")
    parser.add_argument("--data", nargs="+", metavar="PREFIX", help="token files, without .bin")
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices (or of CPU ranks)")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="the kind of devices (default: this machine's CPUs)")
    parser.add_argument("--global-batch", type=count_argument, metavar="B", help="sequences of a step")
    steps = "steps to train (default: 20 tokens per parameter)"
    parser.add_argument("--steps", type=count_argument, metavar="N", help=steps)
    out = "the file to write; the run is named after it (default: MODEL.yaml)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)


def run(args: argparse.Namespace) -> None:
    asks = sys.stdin.isatty() and not args.json
    model = args.model or _answer("--model", "Which model? (tiny, 30m, 125m, 350m, 1b, or a preset)", "tiny", asks)
    if model not in PRESETS and model not in SIZES:
        known = [*SIZES, *PRESETS]
        raise UserError(f"there is no model '{model}'{nearest(model, known)}: the models are {', '.join(known)}")
    args.out = args.out or Path(f"{model}.yaml")
    if args.out.exists():
        raise UserError(f"{args.out} already exists: give another --out, or remove it first")
    files = "Token files of `meshwright data prepare`, without .bin?"
    data = args.data or _answer("--data", files, _data_here(), asks).split()
    devices = args.devices or _whole("--devices", _answer("--devices", "How many devices (or CPU ranks)?", "1", asks))
    cluster = load_cluster(args.cluster or HOST)
    if cluster.device.units == 1 and devices > 1:
        from meshwright.device import cores_of_rank

        if not cores_of_rank(devices):
            notice(f"{devices} ranks are more than this machine has cores: fewer ranks would not be slower")
    raw, lr = _model(model, data)
    config = _config(raw, data, model, args, cluster, devices)
    best = best_layout(config, devices, cluster, MARGIN * cluster.device.memory_gib)
    text = written(best, config, lr, args, data)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise refusal(f"{args.out} can't be written", error, args.out, "another --out") from None
    # The file is read back and checked, so that a config that `train` would refuse is reported here.
    check(load_config(args.out), devices, TRAINING_RULES)
    nproc = f" --nproc {devices}" if devices > 1 else ""
    if args.json:
        print(json.dumps({"file": str(args.out), "config": to_mapping(load_config(args.out))}))
        return
    words = plain_words(best.job.config, devices)
    notice(f"wrote {args.out}, predicted at {seconds(best.cost.step_s)} a step: {words}")
    preparing = [line for prefix in data for line in _preparation_command(prefix, best.job.config)]
    train = f"meshwright train {args.out}{nproc}      (everything of the run will be in {_run_dir(args.out)})"
    for first, line in zip(("next", *["then"] * len(preparing)), [*preparing, train], strict=True):
        notice(f"{first}: {line}")


def _preparation_command(prefix: str, config: Config) -> list[str]:
    """Return the command that makes token files, or nothing if they exist. If they don't, print a line that says so."""
    if Path(f"{prefix}.idx").is_file():
        return []
    there = [str(path.with_suffix("")) for path in sorted(Path(prefix).parent.glob("*.idx"))]
    notice(f"{prefix} is not there yet{nearest(prefix, there)}: the model takes a vocabulary of {config.model.vocab}")
    tokenizer = "PATH/tokenizer.json" if config.model.preset else f"train:{config.model.vocab}"
    return [f"meshwright data prepare YOUR-TEXT --out {prefix} --tokenizer {tokenizer}"]


def _data_here() -> str:
    """Return the token files in data/ if there are one pair, else the usual name."""
    there = sorted(Path("data").glob("*.idx"))
    return str(there[0].with_suffix("")) if len(there) == 1 else "data/text"


def _answer(flag: str, question: str, usual: str, asks: bool) -> str:
    """Ask the user a question and return the answer. Without a terminal, raise an error that names the missing flag."""
    if not asks:
        raise UserError(f"give {flag}: {question[0].lower()}{question[1:]}")
    return input(f"{question} [{usual}] ").strip() or usual


def _whole(flag: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"{flag} {text} must be a whole number of at least 1")
    return int(text)


def _model(name: str, data: list[str]) -> tuple[dict[str, Any], float]:
    """Return the model section and a peak learning rate. The vocabulary is that of the data, if their files say it."""
    for prefix in data:
        if prefix.endswith((".bin", ".idx")):
            raise UserError(f"--data {prefix} is one of the two files: name them without their ending, {prefix[:-4]}")
    if name in PRESETS:
        return {"preset": name}, 3e-4
    layers, hidden, heads, seq, lr = SIZES[name]
    vocab = max(int((read_metadata(prefix) or {}).get("vocab_size") or 0) for prefix in data)
    # Rounded up to the multiple that `train` regards as usual (see `unused_tokens`).
    vocab = -(-(vocab or DEFAULT_VOCAB) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "seq": seq, **SHAPE}, lr


def _config(
    raw: Mapping[str, Any], data: list[str], model: str, args: argparse.Namespace, cluster: Cluster, devices: int
) -> Config:
    """Return the config from which the search for a layout starts."""
    host = cluster.device.units == 1
    shape = config_from({"model": dict(raw), "data": {"prefixes": data}}).model
    batch = args.global_batch
    if batch is None:
        # A multiple of the devices leaves the search free to use all of them for data parallelism.
        wanted = TOKENS_A_STEP.get(model, DEFAULT_BATCH_TOKENS) / shape.seq
        batch = max(devices, round(wanted / devices) * devices)
    elif batch < 1:
        raise UserError(f"--global-batch {batch} must be at least 1")
    precision = "bf16" if not host and "bf16" in cluster.device.peak else "fp32"
    train = {"global_batch": batch, "precision": precision, "steps": args.steps or 100}
    run_ = {"device": "cpu" if host else "auto"}
    return config_from({"model": dict(raw), "data": {"prefixes": data}, "train": train, "run": run_})


def written(best: Candidate, config: Config, lr: float, args: argparse.Namespace, data: list[str]) -> str:
    """Return the text of the config file. Keys of the layout that keep their defaults are left out."""
    job, c = best.job, best.job.config
    parameters = parameter_count(job.model)
    tokens_a_step = c.train.global_batch * c.model.seq
    # 20 tokens per parameter, as --help says.
    steps = args.steps or max(100, round(20 * parameters / tokens_a_step))
    keys = {"tp": c.layout.tp, "pp": c.layout.pp, "cp": c.layout.cp, "ep": c.layout.ep, "chunks": c.layout.chunks}
    layout = {key: value for key, value in keys.items() if value > 1 or key in ("tp", "pp")}
    extra = [f"  {key}: {value}" for key, value in layout.items()]
    extra += ["  sequence_parallel: true"] if c.layout.sequence_parallel else []
    extra += [f"  order: {c.layout.order}"] if c.layout.order != config.layout.order else []
    if c.layout.pp > 1:
        extra += ["pipeline:", f"  schedule: {c.pipeline.schedule}"]
        extra += [f"  split: {list(c.pipeline.split)}"] if c.pipeline.split else []
    extra += ["zero:", f"  stage: {c.zero.stage}   # dp ranks divide {SHARDED[c.zero.stage]}"] if c.zero.stage else []
    if c.recompute != config.recompute:
        settings = to_mapping(c)["recompute"]
        extra += ["recompute:", *(f"  {key}: {_yaml_scalar(value)}" for key, value in settings.items())]
    raw = {"preset": c.model.preset} if c.model.preset else {
        key: to_mapping(c)["model"][key] for key in ("layers", "hidden", "heads", "vocab", "seq", *SHAPE)
    }  # fmt: skip
    return TEMPLATE.format(
        parameters=count(parameters), devices=job.world, device=best.cost.cluster.device.name,
        layout=plain_words(c, job.world), time=seconds(best.cost.step_s), memory=size(largest(job).peak),
        out=args.out, nproc=f" --nproc {job.world}" if job.world > 1 else "", prefixes=json.dumps(data),
        model="\n".join(f"  {key}: {_yaml_scalar(value)}" for key, value in raw.items()), layout_keys="\n".join(extra),
        steps=steps, tokens=count(steps * tokens_a_step), global_batch=c.train.global_batch,
        micro_batch=c.train.micro_batch, precision=c.train.precision, lr=lr, warmup="2%" if steps <= 100_000 else 2000,
        min_lr=f"{lr / 10:g}", run_dir=_run_dir(args.out), kind=c.run.device,
        eval_every=max(10, min(500, steps // 20)),
    )  # fmt: skip


def _run_dir(out: Path) -> str:
    return f"runs/{out.stem}"


def _yaml_scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
