"""Our training step on one GPU, compared in one run with a plain compiled PyTorch loop and with the floor.

    python benchmarks/gpu_step.py                              # the table of docs/performance.md
    python benchmarks/gpu_step.py --cases 1b:bf16:1 3b:fp8:1   # model:precision:micro-batches per step
    python benchmarks/gpu_step.py --no-plain --cases 3b:bf16:1:tp2 3b:bf16:4:pp2   # the first rank's share

Every case has the result of `meshwright bench step`, and the plain loop's step_ms and memory. The plain loop runs in
bf16 autocast, once for each model and number of micro-batches.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish, gpu_or_leave  # noqa: E402
from plain_llama import plain_step  # noqa: E402

from meshwright.bench import floor, step  # noqa: E402
from meshwright.bench.models import bench_config  # noqa: E402
from meshwright.bench.timing import median_ms  # noqa: E402
from meshwright.config.sections import Config  # noqa: E402
from meshwright.device import Device  # noqa: E402
from meshwright.dryrun.stand_ins import fake_world  # noqa: E402

CASES = ["1b:bf16:1", "3b:bf16:1", "3b:fp8:1", "3b:bf16:8", "3b:bf16:1:tp2", "3b:bf16:4:pp2"]


def clean(device: Device) -> None:
    torch._dynamo.reset()
    gc.collect()
    device.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def plain(model: str, micro_batches: int, device: Device, steps: int) -> dict[str, float]:
    clean(device)
    config = bench_config(model)
    work = plain_step(config.model, config.train.micro_batch, micro_batches, device.torch)
    ms = median_ms(device, work, steps, warm=4)
    return {"plain_ms": ms, "plain_gib": torch.cuda.max_memory_allocated() / 2**30}


def ours(config: Config, device: Device, steps: int, floors: dict[Any, floor.Floor]) -> dict[str, Any]:
    clean(device)
    with fake_world(0, config.layout.tp * config.layout.pp):
        measured = step.measure(step.make_trainer(config, device), steps)
    clean(device)
    key = (config.model, config.layout)
    if key not in floors:
        floors[key] = floor.measure(config, device, torch.bfloat16)
    return step.as_json(config, device, measured, floors[key])


def case_config(case: str) -> Config:
    model, precision, count, *rest = case.split(":")
    layout: dict[str, Any] = {part[:2]: int(part[2:]) for part in rest}
    return bench_config(model, precision, int(count), layout=layout | {"sequence_parallel": "tp" in layout})


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-plain", action="store_true")
    args = parser.parse(cases=["1b:bf16:1"], steps=1)
    torch.set_float32_matmul_precision("high")
    gpu_or_leave(args)
    device, rows = Device.choose("cuda"), []
    others: dict[tuple[str, int], dict[str, float]] = {}
    floors: dict[Any, floor.Floor] = {}
    for case in args.cases:
        config, begin = case_config(case), time.time()
        key = case.split(":")[0], config.train.global_batch // config.train.micro_batch
        whole = config.layout.tp * config.layout.pp == 1
        if whole and not args.no_plain and key not in others:
            others[key] = plain(*key, device, args.steps)
        found = ours(config, device, args.steps, floors) | (others.get(key, {}) if whole else {})
        if "plain_ms" in found:
            found["speedup"] = found["plain_ms"] / found["step_ms"]
        rows.append({"case": case, "seconds": time.time() - begin} | found)
    finish(args, rows, rows=rows)


if __name__ == "__main__":
    main()
