"""Runs of `pretrain` with a planted fault: a wrong activation or gradient on one rank, or a flipped bit in a weight."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.engine.hooks import Hook
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.errors import UserError
from meshwright.run.pretrain import pretrain
from tests.support.oracle import made_for, small_config

TIMES = ("step_time_s", "tokens_per_s", "phases", "time", "tflops", "mfu", "exposed_s", "ranks", "comm")


@dataclass(frozen=True)
class Fault:
    """A fault planted in the output of one module, or with `backward` in the gradient of that output.

    It occurs in the first micro-batch of `step` (0: of every step from the fifth on), on `rank` (-1: on all), and at
    most `times` times per step. One element becomes `factor` times the largest magnitude in the tensor. With `whole`
    the whole tensor is multiplied by `factor` instead. Each occurrence is `growth` times as large as the one before.
    """

    step: int
    rank: int = 0
    module: str = "blocks.1.mlp"
    factor: float = float("nan")
    backward: bool = False
    times: int = 1
    whole: bool = False
    growth: float = 1.0


def plant(ctx: Any, module: nn.Module, fault: Fault) -> None:
    occurrences = Counter[int]()  # occurrences so far, by step

    def due() -> bool:
        step, micro_batch, _ = ctx.parallel.streams.where
        now = step == fault.step or (not fault.step and step >= 5)
        if fault.rank not in (-1, ctx.rank) or micro_batch or not now or occurrences[step] == fault.times:
            return False
        occurrences[step] += 1
        return True

    def wrong(x: torch.Tensor) -> torch.Tensor:
        factor = fault.factor * fault.growth ** occurrences.total()
        if fault.whole:
            return x * factor
        at = torch.arange(x.numel(), device=x.device).view(x.shape) == 3
        return torch.where(at, factor * (1 + x.detach().abs().max()), x)

    part = module.get_submodule(fault.module)
    real = part.forward

    def forward(*given: Any) -> Any:
        result = real(*given)
        x = result[-1] if isinstance(result, tuple) else result
        if fault.backward:
            if x.requires_grad:
                x.register_hook(lambda grad: wrong(grad) if due() else grad)
        elif due():
            x = wrong(x)
        return (*result[:-1], x) if isinstance(result, tuple) else x

    part.forward = forward  # type: ignore[method-assign]


class Flip(Hook):
    """A hook that flips one bit of a parameter, or of its optimizer state, on one rank just before a step."""

    def __init__(self, rank: int, step: int, name: str, state: str = "param", bit: int = 7) -> None:
        self.rank, self.step, self.name, self.state, self.bit = rank, step, name, state, bit
        self.trainer: Any = None

    def before(self, step: int) -> None:
        trainer = self.trainer
        if step != self.step or trainer.ctx.rank != self.rank:
            return
        for state in trainer.optimizer.tensors():
            for slot in state.buffer.slots:
                if state.name == self.state and slot.record.name == self.name:
                    low, high = state.holds(slot)
                    tensors_of(state.values(slot, low, high))[0].view(torch.int32)[:1].bitwise_xor_(1 << self.bit)


def run(folder: Path, fault: Fault | None = None, hooks: tuple[Hook, ...] = (), **sections: Any) -> Any:
    """Run `pretrain` and return the trainer, or the message of the error that ended the run."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 3, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8},
        "train": {"precision": "fp32", "global_batch": 8, "micro_batch": 2, "steps": 12},
        "optimizer": {"lr": 1e-3}, "checkpoint": {"every": 0},
        "run": {"dir": str(folder), "tensorboard": False, "device": "cpu", "eval_samples": 8},
        "faults": {"window": 8},
    }  # fmt: skip
    config = small_config(**{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})
    made = made_for(config)

    def model(ctx: Any, stage: Any) -> nn.Module:
        module = model_provider(ctx, stage)
        if fault is not None and fault.module in dict(module.named_modules()):
            plant(ctx, module, fault)
        return module

    try:
        return pretrain(config, model, lambda ctx, n: (made, None, None), forward_step, hooks=hooks)
    except UserError as error:
        return str(error)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics without timings. Two equal runs must agree in these bit for bit."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines(folder)]


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in lines(folder, "events.jsonl") if line["kind"] in kinds]
