"""The memory that one rank of a job allocates on a GPU, compared with the answer of `meshwright memory`.

The cases are single ranks, and ranks of worlds whose other ranks do not exist. Blocks are not compiled, and the result
is the largest amount of allocated memory in the second and third step.

    python benchmarks/gpu_memory.py              # all cases
    python benchmarks/gpu_memory.py neox-20b     # one case
    python benchmarks/gpu_memory.py --compiled   # also with compiled blocks
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from common import BenchParser, finish, gpu_or_leave

from meshwright.config.load import config_from
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.plan.job import job_of
from meshwright.plan.memory import rank_memory

LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False}
LLAMA_1B = LLAMA | {
    "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "seq": 4096,
}  # fmt: skip
LLAMA_3B = LLAMA_1B | {"layers": 28, "hidden": 3072, "heads": 24}
NEOX = {
    "layers": 44, "hidden": 6144, "heads": 64, "vocab": 50432, "seq": 2048, "position": "rope", "rotary_fraction": 0.25,
    "parallel_residual": True, "tied_embeddings": False,
}  # fmt: skip
OPT = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50272, "seq": 2048, "mlp": "relu"}
GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "seq": 2048}

# name: model, layout and the rest, micro-batch, micro-batches, world, rank
CASES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], int, int, int, int]] = {
    "llama-1b": (LLAMA_1B, {}, 2, 1, 1, 0),
    "llama-1b, selective, 2 micro-batches": (LLAMA_1B, {"recompute": {"mode": "selective"}}, 2, 2, 1, 0),
    "llama-3b": (LLAMA_3B, {}, 2, 1, 1, 0),
    "llama-3b, full recomputation": (LLAMA_3B, {"recompute": {"mode": "full"}}, 8, 1, 1, 0),
    "llama-3b, tp 2 sp, stage 2 over 4": (
        LLAMA_3B, {"layout": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 2}}, 4, 2, 8, 0),
    "gpt-neox-20b, tp 2 pp 4 dp 12, stage 1, first stage": (
        NEOX, {"layout": {"tp": 2, "pp": 4}, "zero": {"stage": 1}}, 4, 8, 96, 0),
    "gpt-neox-20b, last stage": (NEOX, {"layout": {"tp": 2, "pp": 4}, "zero": {"stage": 1}}, 4, 8, 96, 95),
    "opt-175b, tp 8, stage 3 over 124": (
        OPT, {"layout": {"tp": 8}, "zero": {"stage": 3}, "recompute": {"mode": "full"}}, 8, 1, 992, 0),
    "gpt3-175b, tp 8 pp 16 sp, middle stage": (
        GPT3, {"layout": {"tp": 8, "pp": 16, "sequence_parallel": True}, "recompute": {"mode": "full"}},
        1, 32, 1024, 512),
}  # fmt: skip


def config_of(name: str, compiled: bool) -> tuple[Config, int, int]:
    model, sections, micro_batch, micro_batches, world, rank = CASES[name]
    layout = sections.get("layout", {})
    dp = world // (layout.get("tp", 1) * layout.get("pp", 1))
    train = {
        "precision": "bf16", "micro_batch": micro_batch, "global_batch": micro_batch * micro_batches * dp,
        "compile": str(compiled).lower(), "steps": 100,
    }  # fmt: skip
    raw = {"model": model, "data": {"prefixes": ["none"]}, "train": train, "comm": {"bucket_mib": 100}, **sections}
    return config_from(raw), world, rank


def measure(name: str, compiled: bool = False) -> dict[str, Any]:
    config, world, rank = config_of(name, compiled)
    check(config, world)
    job = job_of(config, world)
    said = rank_memory(job, job.layout.coordinate(rank)["pp"])
    device = Device.choose("cuda")
    begin = time.perf_counter()
    try:
        ran = run_rank(config, world, rank, device)
    except torch.OutOfMemoryError as error:
        return {"case": name, "said_gib": said.peak / 2**30, "error": str(error).splitlines()[0]}
    real, states = ran.most["peak"], ran.states["master"] + ran.states["optimizer"]
    return {
        "case": name, "measured_gib": real / 2**30, "said_gib": said.peak / 2**30, "ratio": said.peak / real,
        "activations_gib": said.activations / 2**30, "buffers_gib": said.buffers / 2**30, "states_gib": states / 2**30,
        "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def in_a_process(work: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run `work` in a separate process, whose memory is released when it ends."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *args).result()


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("cases", nargs="*", help="words of the cases' names (default: all)")
    parser.add_argument("--compiled", action="store_true", help="measure compiled blocks too")
    args = parser.parse(cases=["llama-1b"])
    gpu_or_leave(args)
    rows = []
    for name in CASES:
        if args.cases and not any(word in name for word in args.cases):
            continue
        found = in_a_process(measure, name)
        if args.compiled and "error" not in found:
            again = in_a_process(measure, name, True)
            found |= {f"compiled_{key}": again.get(key, float("nan")) for key in ("measured_gib", "said_gib", "ratio")}
        rows.append(found)
    finish(args, rows, rows=rows)


if __name__ == "__main__":
    main()
