"""The training step of an encoder and of an encoder-decoder on one GPU.

It is compared, in one run, with a plain compiled PyTorch loop of the same model, and with its products timed alone.

    python benchmarks/gpu_encoders.py                          # BERT-large and T5-large
    python benchmarks/gpu_encoders.py --cases bert-large:64    # preset:micro-batch
    python benchmarks/gpu_encoders.py --device cpu --tiny --steps 2    # the same calls without a GPU, of tiny models

There is no dropout, since neither loop would be compiled with it. `host_ms` is the time that the host takes to launch
one of our steps: if it exceeds the sum of the kernels, the device waits.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from typing import Any

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import BenchParser, finish, gpu_or_leave  # noqa: E402
from plain_encoders import plain_step  # noqa: E402

from meshwright.bench import floor, step  # noqa: E402
from meshwright.bench.models import parameters, products  # noqa: E402
from meshwright.bench.timing import copy_gb_s, median_ms  # noqa: E402
from meshwright.config.load import config_from  # noqa: E402
from meshwright.config.sections import Config  # noqa: E402
from meshwright.device import Device  # noqa: E402
from meshwright.dryrun.stand_ins import fake_world  # noqa: E402
from meshwright.engine.step import LaunchedStep, Trainer  # noqa: E402

CASES = ["bert-large:32", "t5-large:32"]
TINY = {"layers": 4, "hidden": 32, "heads": 2, "head_dim": 16, "ffn": 64, "vocab": 64, "seq": 16}


def clean(device: Device) -> None:
    torch._dynamo.reset()
    gc.collect()
    device.empty_cache()
    device.reset_peak()


def config_of(case: str, device: str, tiny: bool, together: str) -> Config:
    preset, batch = case.split(":")
    train = {"precision": "bf16", "micro_batch": int(batch), "global_batch": int(batch), "steps": 10**6}
    model: dict[str, Any] = {"preset": preset, "dropout": 0.0}
    if tiny:
        own = {"t5": {"encoder_layers": 2, "decoder_seq": 8}} if preset.startswith("t5") else {"predictions": 4}
        model |= TINY | own
    train |= {"compile": "true", "compile_together": together if together == "auto" else int(together)}
    config = {"model": model, "train": train, "data": {"prefixes": ["made"]}}
    return config_from(config | {"lr": {"schedule": "constant"}, "run": {"device": device}})


class Launches:
    """A timer of the host's part of a trainer's steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.seconds: list[float] = []
        self._real = trainer.launch
        trainer.launch = self._timed  # type: ignore[method-assign, assignment]

    def _timed(self, *given: Any) -> LaunchedStep:
        begin = time.perf_counter()
        found = self._real(*given)
        self.seconds.append(time.perf_counter() - begin)
        return found


def peak_gib(device: Device) -> float | None:
    peak = device.peak_bytes()
    return None if peak is None else peak / 2**30


def floor_ms(config: Config, device: Device, elements: int) -> float:
    """Return the time of all products alone plus that of the optimizer's bytes at the speed of a copy.

    Attention, about a tenth of this time, is not included.
    """
    speed = copy_gb_s(device, elements, lambda copy: median_ms(device, copy) / 1e3)
    calls = floor.product_calls(products(config), device, torch.bfloat16)
    return floor.alone(device, calls) + parameters(config) * floor.OPTIMIZER_BYTES / speed / 1e6


def run(case: str, device: Device, steps: int, tiny: bool, together: str) -> dict[str, Any]:
    config = config_of(case, device.kind, tiny, together)
    clean(device)
    work = plain_step(config.model, config.train.micro_batch, device.torch)
    plain = {"plain_ms": median_ms(device, work, steps, warm=4), "plain_gib": peak_gib(device)}
    del work
    clean(device)
    with fake_world(0, 1):
        trainer = step.make_trainer(config, device)
        launches = Launches(trainer)
        ours = step.measure(trainer, steps)
    clean(device)
    least = floor_ms(config, device, 1 << (20 if tiny else 30))
    figures = {key: ours[key] for key in ("step_ms", "peak_gib", "kinds_ms", "losses")}
    figures["host_ms"] = 1e3 * statistics.median(launches.seconds)
    ratios = {"speedup": plain["plain_ms"] / ours["step_ms"], "floor_ms": least, "of_floor": least / ours["step_ms"]}
    return {"case": case, **figures, **plain, **ratios, "kernels": ours["kernels"][:25]}


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--together", default="auto", help="train.compile_together (default: auto)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the calls")
    args = parser.parse(device="cpu", tiny=True, steps=1)
    if args.quick:
        gpu_or_leave(args)  # compiling both loops on a CPU takes minutes
    torch.set_float32_matmul_precision("high")
    device = Device.choose(args.device)
    rows = [run(case, device, args.steps, args.tiny, args.together) for case in args.cases]
    finish(args, rows, rows=rows)


if __name__ == "__main__":
    main()
