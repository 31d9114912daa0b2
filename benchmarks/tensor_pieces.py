"""The host's work for a block whose products over tp run in pieces (`comm.overlap.tensor`), and without pieces.

    python benchmarks/tensor_pieces.py [--tp 2 4 8]

One rank of a world that does not exist runs on the CPU. Its products are so small that only the host's time remains: a
device must be busy for longer than that, or it waits for the host. The result has, per block and micro-batch, forward
and backward together: microseconds, calls of Python functions, ATen operators, and calls over tp.
"""

from __future__ import annotations

import cProfile
import pstats
import time

import torch
from common import BenchParser, finish

from meshwright.bench.models import LLAMA_ARCHITECTURE, ranks_of
from meshwright.bench.step import make_trainer
from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.dryrun.stand_ins import fake_world, release

LAYERS = (2, 10)  # the difference is that of eight blocks
STEPS = 10


def figures(tp: int, pieces: bool, layers: int, least: float) -> tuple[float, int, int, int]:
    overlap = {"tensor": pieces, "piece_gflop": least}
    shape = {"layers": layers, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 128, "vocab": 64, "seq": 64}
    sections = {
        "model": LLAMA_ARCHITECTURE | shape, "layout": {"tp": tp, "sequence_parallel": True}, "run": {"device": "cpu"},
        "train": {"precision": "fp32", "micro_batch": 1, "global_batch": 1, "compile": "false"},
        "comm": {"overlap": overlap}, "data": {"prefixes": ["made"]},
    }  # fmt: skip
    config = config_from(sections)
    with fake_world(0, ranks_of(config)):
        trainer = make_trainer(config, Device("cpu"))
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            trainer.step()
            times.append(time.perf_counter() - begin)
        entries = trainer.ctx.ledger.entries.items()
        calls = sum(tally.calls for entry, tally in entries if entry.axis == "tp")
        profile = cProfile.Profile()
        profile.runcall(trainer.step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
            trainer.step()
        aten = sum(event.name.startswith("aten::") for event in operators.events() or ())
        release(trainer)
    return 1e6 * min(times), pstats.Stats(profile).total_calls, aten, calls  # type: ignore[attr-defined]


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--piece-gflop", type=float, default=0.0, help="comm.overlap.piece_gflop (default: 0, cut all)")
    args = parser.parse(tp=[2])
    print(f"{'':<22}{'host us':>9}{'Python':>9}{'ATen':>7}{'over tp':>9}")
    rows = []
    for tp in args.tp:
        for pieces in (False, True):
            few, many = (figures(tp, pieces, layers, args.piece_gflop) for layers in LAYERS)
            host, python, aten, calls = ((b - a) / (LAYERS[1] - LAYERS[0]) for a, b in zip(few, many, strict=True))
            print(f"tp {tp}, {'in pieces' if pieces else 'at once':<16}{host:9.0f}{python:9.0f}{aten:7.0f}{calls:9.0f}")
            rows.append({"tp": tp, "pieces": pieces, "host_us": host, "python": python, "aten": aten, "calls": calls})
    finish(args, rows)


if __name__ == "__main__":
    main()
