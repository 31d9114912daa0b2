"""`meshwright bench step`: time a training step on one device and compare it with a lower bound on that time."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from meshwright.bench.models import BENCH_MODELS, MICRO_BATCH, bench_config, products_in_pieces, ranks_of
from meshwright.config.grid import grid_numbers
from meshwright.config.numbers import count_argument, length_argument
from meshwright.config.sections import Config
from meshwright.device_kinds import device_names
from meshwright.errors import UserError, nearest, plural
from meshwright.show.units import percent

# The most tokens of a micro-batch. At this size one activation of the smallest model already takes tens of GB.
MAX_TOKENS = 1 << 24
# The number of measurements of each config when two are compared; the median is reported.
ROUNDS = 3
EXAMPLES = """example:
  meshwright bench step --model 3b
  meshwright bench step --model 1b --micro-batches 8 --json
  meshwright bench step --model 3b --precision fp8
  meshwright bench step --model 3b --tp 8 --overlap both (what splitting products costs, without any link)
  meshwright bench step --model 3b --tp 8 --overlap both --piece-gflop 0    (the same, with all products split)
  meshwright bench step --model 3b --tp 2                (one rank's share, sequence parallel; no other rank is started)
  meshwright bench step --model 3b --tp 4 --tp-grid 2x2  (one rank's share of a grid)
  meshwright bench step --model 3b --micro-batch 1 --seq 131072 --cp 8 --context ring

tflops counts 6 operations per token and weight of a matrix product, plus 6 x layers x hidden x seq per token for causal
attention; mfu divides by the vendor's dense bf16 rate, mfu_measured by the rate of a large product measured here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["step"], help="what to measure: the training step")
    parser.add_argument("--model", default="1b", help=f"{', '.join(BENCH_MODELS)} (default: 1b)")
    parser.add_argument("--precision", default="bf16", help="train.precision (default: bf16)")
    sequences = f"sequences of a micro-batch (default: {MICRO_BATCH})"
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help=sequences)
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches of a step (default: 1)")
    parser.add_argument("--tp", type=int, default=1, help="measure one rank's share of this many tp ranks (default: 1)")
    parser.add_argument("--tp-grid", default="", metavar="RxC[xD]", help="layout.tp_grid of these ranks, e.g. 2x2")
    parser.add_argument("--tp-kind", default="", choices=["2d", "2.5d", "3d"], help="layout.tp_kind of three numbers")
    parser.add_argument("--cp", type=int, default=1, help="measure one rank's share of this many cp ranks (default: 1)")
    parser.add_argument("--context", default="auto", help="context.kind of cp ranks (default: auto)")
    parser.add_argument("--seq", type=length_argument, default=0, help="tokens of a sequence (default: the model's)")
    parser.add_argument("--documents", action="store_true", help="attention within documents of about 2048 tokens")
    parser.add_argument("--recompute", default="none", help="recompute.mode (default: none)")
    parser.add_argument("--offload", action="store_true", help="recompute.offload: inputs of blocks in host memory")
    parser.add_argument("--pieces", type=int, default=1, help="recompute.pieces of MLPs (default: 1)")
    overlap = "comm.overlap.tensor: products over tp in pieces; both: without and with it, in turns (default: off)"
    parser.add_argument("--overlap", default="off", choices=["off", "on", "both"], help=overlap)
    least = "comm.overlap.piece_gflop: which products are cut (default: 60; 0: all)"
    parser.add_argument("--piece-gflop", type=float, default=60.0, help=least)
    parser.add_argument("--pp", type=int, default=1, help="measure the first of this many stages (default: 1)")
    timed = "steps to time after the warm-up (default: 10)"
    parser.add_argument("--steps", type=count_argument, default=10, help=timed)
    parser.add_argument("--compile", default="auto", choices=["auto", "true", "false"], help="train.compile")
    parser.add_argument("--device", default="auto", choices=device_names(), help="run.device")


def run(args: argparse.Namespace) -> None:
    if args.model not in BENCH_MODELS:
        choices = ", ".join(BENCH_MODELS)
        raise UserError(f"unknown model '{args.model}'{nearest(args.model, BENCH_MODELS)}: choose {choices}")
    for name in ("micro_batch", "micro_batches", "steps", "tp", "cp", "pp"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    configs = [_config(args, overlap) for overlap in {"off": [False], "on": [True]}.get(args.overlap, [False, True])]
    seq = configs[0].model.seq
    if seq > MAX_TOKENS:
        raise UserError(f"--seq {seq} is more than a device holds of one sequence: use --seq {MAX_TOKENS} at most")
    if (tokens := args.micro_batch * seq) > MAX_TOKENS:
        raise UserError(
            f"--micro-batch {args.micro_batch} has {tokens:,} tokens, which no device holds at once: use "
            f"--micro-batch {MAX_TOKENS // seq} at most"
        )
    from meshwright.bench import floor, step
    from meshwright.device import PRECISION_DTYPES, Device
    from meshwright.dryrun.stand_ins import fake_world

    device = Device.choose(args.device)
    device.check_precision(args.precision)
    print(f"measuring {args.model} on {device.name}", file=sys.stderr, flush=True)
    # The configs are measured in turns, because a device slows down as it gets warm: measured one after the other, the
    # second config would look slower than it is.
    rounds: list[list[dict[str, Any]]] = [[] for _ in configs]
    for _ in range(ROUNDS if len(configs) > 1 else 1):
        for config, measured in zip(configs, rounds, strict=True):
            with fake_world(0, ranks_of(config)):
                measured.append(step.measure(step.make_trainer(config, device), args.steps))
            device.empty_cache()
    least = floor.measure(configs[0], device, PRECISION_DTYPES[args.precision])
    results = []
    for config, measured in zip(configs, rounds, strict=True):
        median = sorted(measured, key=lambda result: result["step_ms"])[len(measured) // 2]
        overlap = config.comm.overlap.tensor
        about = {"model": args.model, "overlap": overlap, "in_pieces": products_in_pieces(config)}
        results.append(about | step.as_json(config, device, median, least))
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results))
        return
    print("\n\n".join(map(report, results)))
    if len(results) > 1:
        without, pieces = (result["step_ms"] for result in results)
        cut = [name for name, is_cut in results[1]["in_pieces"].items() if is_cut]
        print(f"\nwith products in pieces ({', '.join(cut) or 'none is long enough'}) the step takes "
              f"{percent(pieces / without - 1)} longer")  # fmt: skip


def _config(args: argparse.Namespace, overlap: bool) -> Config:
    """Return the config to measure, with or without splitting products over tp (`comm.overlap.tensor`)."""
    return bench_config(
        args.model, args.precision, args.micro_batches, args.micro_batch, args.seq,
        train={"compile": args.compile}, run={"device": args.device},
        layout={
            "tp": args.tp, "cp": args.cp, "pp": args.pp, "sequence_parallel": args.tp > 1 and not args.tp_grid,
            "tp_grid": list(grid_numbers("--tp-grid", args.tp_grid)), "tp_kind": args.tp_kind,
        },
        context={"kind": args.context}, comm={"overlap": {"tensor": overlap, "piece_gflop": args.piece_gflop}},
        data={"prefixes": ["made"], "reset_attention": args.documents},
        recompute={"mode": args.recompute, "offload": args.offload, "pieces": args.pieces},
    )  # fmt: skip


def tflops(rate: float) -> str:
    return f"{rate:.1f} TFLOP/s" if rate >= 1 else f"{rate:.2g} TFLOP/s"


def report(result: dict[str, Any]) -> str:
    """Return one result of the bench as text. The floor is the lower bound on the step's time."""
    low = result["floor"]
    datasheet_mfu = f"{result['mfu']:.3f} of the datasheet, " if result["mfu"] else ""
    rows = [
        ("step", f"{result['step_ms']:.1f} ms   {result['tokens_per_s']:,.0f} tokens/s"),
        ("model", f"{tflops(result['tflops'])}   MFU {datasheet_mfu}"
         f"{result['mfu_measured']:.3f} of {tflops(low['product_tflops'])} measured"),
        ("memory", "-" if result["peak_gib"] is None else f"{result['peak_gib']:.1f} GiB at most"),
        ("floor", f"{result['floor_ms']:.1f} ms: the step reaches {result['of_floor']:.3f} of it"),
        ("", f"products {low['products_ms']:.1f} (back to back {low['products_loaded_ms']:.1f}), attention "
         f"{low['attention_ms']:.1f} per micro-batch (both back to back {low['loaded_ms']:.1f}, "
         f"each after a rest {low['rested_ms']:.1f}), "
         f"optimizer {low['optimizer_ms']:.1f} per step"),
        ("by kind", ", ".join(f"{kind} {ms:.1f}" for kind, ms in result["kinds_ms"].items()) or "-"),
    ]  # fmt: skip
    tp, cp, pp = (result[axis] for axis in ("tp", "cp", "pp"))
    share = "products in pieces, " if result["overlap"] else ""
    share += f"tp={tp} cp={cp} pp={pp}, " if tp * cp * pp > 1 else ""
    share += f"grid {result['grid']}, " if result["grid"] else ""
    share += plural(result["micro_batches"], "micro-batch")
    title = f"{result['model']} {result['precision']}, seq={result['seq']}, {share}, {result['device']}"
    return "\n".join([title, *(f"  {name:<8} {text}" for name, text in rows)])
