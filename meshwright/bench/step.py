"""Time the step of `meshwright train` on one device, run as the training loop runs it."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from meshwright.bench.floor import Floor
from meshwright.bench.models import DATASHEET, flops, ranks_of
from meshwright.bench.timing import by_kind
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.run_rank import make_rank
from meshwright.dryrun.stand_ins import documents_of, release
from meshwright.engine.step import Trainer
from meshwright.run.loop import LaunchAhead


def make_trainer(config: Config, device: Device) -> Trainer:
    """Build the trainer of the first rank of a job without data parallelism, inside a `fake_world` of the others."""
    world = ranks_of(config)
    check(config, world)
    return make_rank(config, world, 0, device)


def measure(trainer: Trainer, steps: int, warm: int = 3) -> dict[str, Any]:
    """Time `steps` steps after `warm` steps, then profile two more. Return the measured part of the command's output.
    The trainer can't be used afterwards."""
    ahead = LaunchAhead(trainer, lambda step: step in (warm, warm + steps))
    losses = [ahead.next(False).loss for _ in range(warm)]
    results = [ahead.next(False) for _ in range(steps)]

    def two_steps() -> None:
        # As in a run, the second step is launched before the first one's results are read.
        for launched in [trainer.launch(), trainer.launch()]:
            trainer.read(launched)

    kinds, kernels = by_kind(trainer.ctx.device, two_steps, 2)
    peak = trainer.ctx.device.peak_bytes()
    release(trainer)
    return {
        "step_ms": 1e3 * statistics.median(r.step_time_s for r in results),
        "peak_gib": None if peak is None else peak / 2**30, "kinds_ms": kinds,
        "kernels": [{"name": name, "calls": calls, "ms": ms} for name, calls, ms in kernels[:40]],
        "losses": losses + [r.loss for r in results],
    }  # fmt: skip


def visible_share(config: Config) -> float:
    """Return the share of causal attention's pairs that lie within a document."""
    if not config.data.reset_attention:
        return 1.0
    lengths = np.bincount(documents_of(config.model.seq)).astype(float)
    return float((lengths * (lengths + 1)).sum() / (config.model.seq * (config.model.seq + 1.0)))


def as_json(config: Config, device: Device, measured: dict[str, Any], floor: Floor) -> dict[str, Any]:
    """Return the output of the command as JSON values."""
    tokens = config.train.global_batch * config.model.seq // config.layout.cp
    seconds = measured["step_ms"] / 1e3
    tflops = flops(config, config.train.global_batch * config.model.seq, visible_share(config)) / seconds / 1e12
    sheet = next((rate for part, rate in DATASHEET.items() if part in device.name), None)
    count = config.train.global_batch // config.train.micro_batch
    return {
        "device": device.name, "torch": torch.__version__, "precision": config.train.precision, "micro_batches": count,
        "tp": config.layout.tp, "cp": config.layout.cp, "pp": config.layout.pp, "seq": config.model.seq,
        "grid": str(config.layout.grid or ""),
        "tokens_per_s": tokens / seconds, "tflops": tflops,
        "mfu": tflops / sheet if sheet else None, "mfu_measured": tflops / floor.product_tflops,
        "floor_ms": floor.step_ms(count), "floor_loaded_ms": floor.step_ms(count, loaded=True),
        "of_floor": floor.step_ms(count) / measured["step_ms"], "floor": asdict(floor), **measured,
    }  # fmt: skip
