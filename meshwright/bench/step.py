"""The step of `meshwright train` on one device, timed as its loop runs it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.bench.floor import Floor
from meshwright.bench.models import DATASHEET, flops
from meshwright.bench.timing import by_kind
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens, draw_on_device, release, stand_in
from meshwright.train.ahead import Ahead
from meshwright.train.context import build_context
from meshwright.train.gpt import forward_step, model_provider
from meshwright.train.pretrain import build_modules
from meshwright.train.step import Trainer


@dataclass
class StepTimes:
    step_ms: float
    peak_gib: float | None
    losses: list[float]
    kinds: dict[str, float]
    kernels: list[tuple[str, float, float]]


def make_trainer(config: Config, device: Device) -> Trainer:
    """Builds the trainer of the first rank of a job without data parallelism (`fake_world` stands in for the other
    ranks)."""
    world = config.layout.tp * config.layout.pp
    check(config, world)
    ctx = build_context(config, 0, world, device)
    stand_in(ctx.mesh)
    # Only tokens whose embeddings this rank holds: for the others it sees rows of zeros, which norms blow up.
    data = RandomTokens(config.model.vocab // config.layout.tp, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, data)


def measure(trainer: Trainer, steps: int, warm: int = 3) -> StepTimes:
    """Times `steps` steps after the warm-up and profiles two more; the trainer can't be used afterwards."""
    ahead = Ahead(trainer, lambda step: step in (warm, warm + steps))
    losses = [ahead.next(False).loss for _ in range(warm)]
    results = [ahead.next(False) for _ in range(steps)]
    kinds, kernels = by_kind(trainer.ctx.device, lambda: two_steps(trainer), 2)
    peak = trainer.ctx.device.peak_bytes()
    release(trainer)
    return StepTimes(
        1e3 * statistics.median(r.step_time_s for r in results), None if peak is None else peak / 2**30,
        losses + [r.loss for r in results], kinds, kernels,
    )  # fmt: skip


def two_steps(trainer: Trainer) -> None:
    """Runs two steps; the second is launched before the first one's results are read, as in a run."""
    for launched in [trainer.launch() for _ in range(2)]:
        trainer.read(launched)


def as_json(config: Config, device: Device, measured: StepTimes, floor: Floor) -> dict[str, Any]:
    """Returns what the command prints as JSON."""
    tokens = config.train.global_batch * config.model.seq
    seconds = measured.step_ms / 1e3
    tflops = flops(config, tokens) / seconds / 1e12
    name = device.name
    sheet = next((rate for part, rate in DATASHEET.items() if part in name), None)
    count = config.train.global_batch // config.train.micro_batch
    return {
        "device": name, "torch": torch.__version__, "precision": config.train.precision, "micro_batches": count,
        "tp": config.layout.tp, "pp": config.layout.pp,
        "step_ms": measured.step_ms, "tokens_per_s": tokens / seconds, "tflops": tflops,
        "mfu": tflops / sheet if sheet else None, "mfu_measured": tflops / floor.product_tflops,
        "peak_gib": measured.peak_gib, "floor_ms": floor.step_ms(count),
        "floor_loaded_ms": floor.step_ms(count, loaded=True), "of_floor": floor.step_ms(count) / measured.step_ms,
        "floor": floor.as_json(), "kinds_ms": measured.kinds,
        "kernels": [{"name": n, "calls": c, "ms": ms} for n, c, ms in measured.kernels[:40]],
        "losses": measured.losses,
    }  # fmt: skip
