"""The training step of an encoder and of an encoder-decoder on one GPU beside a plain compiled PyTorch loop of the same
model, and beside its products timed alone, in one run.

    python benchmarks/gpu_encoders.py                          # BERT-large and T5-large
    python benchmarks/gpu_encoders.py --cases bert-large:64    # preset:micro-batch

Every case prints one line of JSON. There is no dropout, since neither loop would be compiled with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from plain_encoders import plain_step  # noqa: E402

from meshwright.bench import floor, step  # noqa: E402
from meshwright.bench.models import parameters, products  # noqa: E402
from meshwright.bench.timing import copy_gb_s, median_ms  # noqa: E402
from meshwright.config.load import config_from  # noqa: E402
from meshwright.config.sections import Config  # noqa: E402
from meshwright.device import Device  # noqa: E402
from meshwright.dryrun.stand_ins import fake_world  # noqa: E402

CASES = ["bert-large:32", "t5-large:32"]


def clean(device: Device) -> None:
    torch._dynamo.reset()
    gc.collect()
    device.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def config_of(case: str) -> Config:
    preset, batch = case.split(":")
    train = {"precision": "bf16", "micro_batch": int(batch), "global_batch": int(batch), "steps": 10**6}
    model = {"preset": preset, "dropout": 0.0}
    data = {"prefixes": ["made"]}
    return config_from({"model": model, "train": train, "data": data, "lr": {"schedule": "constant"}})


def floor_ms(config: Config, device: Device) -> float:
    """Every product timed alone, and the optimizer's bytes at the speed of a copy; without attention, a tenth of it."""
    speed = copy_gb_s(device, 1 << 30, lambda copy: median_ms(device, copy) / 1e3)
    calls = floor.product_calls(products(config), device, torch.bfloat16)
    return floor.alone(device, calls) + parameters(config) * floor.OPTIMIZER_BYTES / speed / 1e6


def run(case: str, device: Device, steps: int) -> dict[str, Any]:
    config = config_of(case)
    clean(device)
    work = plain_step(config.model, config.train.micro_batch, device.torch)
    plain = {"plain_ms": median_ms(device, work, steps, warm=4)}
    plain["plain_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del work
    clean(device)
    with fake_world(0, 1):
        ours = step.measure(step.make_trainer(config, device), steps)
    clean(device)
    least = floor_ms(config, device)
    told = {key: ours[key] for key in ("step_ms", "peak_gib", "kinds_ms", "losses")}
    ratios = {"speedup": plain["plain_ms"] / ours["step_ms"], "floor_ms": least, "of_floor": least / ours["step_ms"]}
    return {"case": case, **told, **plain, **ratios, "kernels": ours["kernels"][:25]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = Device.choose("cuda")
    for case in args.cases:
        print(json.dumps(run(case, device, args.steps)), flush=True)


if __name__ == "__main__":
    main()
