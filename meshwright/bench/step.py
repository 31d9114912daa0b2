"""The step of `meshwright train` on one device, timed as its loop runs it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.bench.fake import stand_in
from meshwright.bench.floor import Floor
from meshwright.bench.models import DATASHEET, flops
from meshwright.bench.timing import by_kind
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.nn.parallel import record_of
from meshwright.train.ahead import Ahead
from meshwright.train.context import build_context
from meshwright.train.gpt import forward_step, model_provider
from meshwright.train.pretrain import build_modules
from meshwright.train.step import Trainer


class RandomTokens:
    """Of the ids from `first` on. `fields` are further ones that a sample has, each counting up from 0."""

    def __init__(self, vocab: int, seq: int, first: int = 0, fields: Sequence[str] = ()) -> None:
        self.vocab, self.seq, self.first, self.fields = vocab, seq, first, fields

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        ids = np.random.default_rng(n).integers(self.first, self.first + self.vocab, self.seq + 1)
        found = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": np.ones(self.seq, dtype=np.int64)}
        return found | {name: np.arange(self.seq, dtype=np.int64) for name in self.fields}


@dataclass
class Measured:
    step_ms: float
    peak_gib: float | None
    losses: list[float]
    kinds: dict[str, float]
    kernels: list[tuple[str, float, float]]


@torch.no_grad()
def draw_on_device(module: nn.Module, seed: int) -> None:
    """Weights like a real start's, drawn by the device: a bench need not be the same on every layout."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        record = record_of(parameter)
        if record is not None and record.init.kind == "normal":
            parameter.normal_(0.0, record.init.std)
        else:
            parameter.fill_(1.0 if record is not None and record.init.kind == "ones" else 0.0)


def make_trainer(config: Config, device: Device) -> Trainer:
    """Of the first rank of a job without data parallelism (`fake_world` stands for the others)."""
    world = config.layout.tp * config.layout.pp
    check(config, world)
    ctx = build_context(config, 0, world, device)
    stand_in(ctx.mesh)
    # Only tokens whose embeddings this rank holds: those of absent ranks would be rows of zeros, which norms blow up.
    data = RandomTokens(config.model.vocab // config.layout.tp, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, data)


def measure(trainer: Trainer, steps: int, warm: int = 3) -> Measured:
    """Times `steps` steps after the warm-up and profiles two more; the trainer can't be used after."""
    ahead = Ahead(trainer, lambda step: step in (warm, warm + steps))
    losses = [ahead.next(False).loss for _ in range(warm)]
    results = [ahead.next(False) for _ in range(steps)]
    kinds, kernels = by_kind(trainer.ctx.device, lambda: two_steps(trainer), 2)
    peak = trainer.ctx.device.peak_bytes()
    release(trainer)
    return Measured(
        1e3 * statistics.median(r.step_time_s for r in results), None if peak is None else peak / 2**30,
        losses + [r.loss for r in results], kinds, kernels,
    )  # fmt: skip


def release(trainer: Trainer) -> None:
    """Gives a measured trainer's memory back: autograd's hooks keep its buffers, and they each other, alive."""
    tensors = [share for _, _, shares in trainer.states() for share in shares]
    for buffer in trainer.data_parallel.buffers:
        tensors += [buffer.params, buffer.grads]
        tensors += [memory.tensor for bucket in buffer.buckets for memory in (bucket.params, bucket.grads)]
    for storage in (tensor.untyped_storage() for tensor in tensors):
        if storage.resizable():  # host memory of states that live there is the system's own
            storage.resize_(0)


def two_steps(trainer: Trainer) -> None:
    """The second is launched before the first is read, as in a run."""
    for launched in [trainer.launch() for _ in range(2)]:
        trainer.read(launched)


def facts(config: Config, device: Device, measured: Measured, floor: Floor) -> dict[str, Any]:
    """What the command prints as JSON."""
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
        "floor": floor.facts(), "kinds_ms": measured.kinds,
        "kernels": [{"name": n, "calls": c, "ms": ms} for n, c, ms in measured.kernels[:40]],
        "losses": measured.losses,
    }  # fmt: skip
