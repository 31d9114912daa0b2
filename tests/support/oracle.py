"""One process is the oracle: gradients, losses and parameters of any layout against those of a single process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from meshwright.config.load import config_from
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.train.context import Context, build_context
from meshwright.train.gpt import forward_step, model_provider
from meshwright.train.pretrain import build_modules
from meshwright.train.step import Trainer


class Made:
    """Random token samples, a pure function of n; with `holes` a part of each is masked, and not the same part."""

    def __init__(self, vocab: int, seq: int, holes: bool = True, segments: bool = False) -> None:
        self.vocab, self.seq, self.holes, self.segments = vocab, seq, holes, segments

    def sample(self, n: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([7, n])
        ids = random.integers(0, self.vocab, self.seq + 1)
        mask = np.ones(self.seq, dtype=np.int64)
        if self.holes:
            mask[: 1 + n % (self.seq // 2)] = 0
        out = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}
        if self.segments:
            cut = 1 + n % (self.seq - 1)
            at = np.arange(self.seq)
            out["segments"] = (at >= cut).astype(np.int64)
            out["positions"] = np.where(at >= cut, at - cut, at)
        return out


def small_config(**sections: dict[str, Any]) -> Config:
    """A tiny model in float64; sections are merged key by key."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16},
        "data": {"prefixes": ["made"]},
        "train": {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": 20, "compile": False},
        "comm": {"bucket_mib": 0.02},
    }
    for name, keys in sections.items():
        base[name] = base.get(name, {}) | keys
    return config_from(base)


def make_trainer(config: Config, rank: int = 0, world: int = 1, data: Any = None) -> Trainer:
    check(config, world)
    ctx: Context = build_context(config, rank, world, Device("cpu"))
    data = data or Made(config.model.vocab, config.model.seq)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data, data)


def true_gradients(trainer: Trainer) -> list[tuple[Any, torch.Tensor]]:
    """(record, gradient) of every local parameter after one forward and backward, as the true mean over tokens."""
    totals, weight = trainer.gradients()
    _, tokens, _ = trainer._sum_over_world(totals, torch.zeros((), dtype=torch.float64))
    pairs = []
    for buffer in trainer.data_parallel.buffers:
        for slot in buffer.slots:
            pairs.append((slot.record, buffer.grad_of(slot).double() / (weight * tokens)))
    return pairs


def gather_global(pairs: list[tuple[Any, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Global tensors from one process's local ones."""
    whole: dict[str, np.ndarray] = {}
    for record, local in pairs:
        target = whole.setdefault(record.name, np.zeros(record.shape))
        for box in record.boxes:
            target[_at(box.start, box.shape)] = local[_at(box.local_start, box.shape)].numpy()
    return whole


def _at(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def worst(pairs: list[tuple[Any, torch.Tensor]], whole: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest error by the trunk's measure: |a-b| / max(max|b| of the parameter, 1e-6 x the largest of all)."""
    largest = max(float(np.abs(b).max()) for b in whole.values())
    result, name = 0.0, ""
    for record, local in pairs:
        reference = whole[record.name]
        scale = max(float(np.abs(reference).max()), 1e-6 * largest)
        for box in record.boxes:
            a = local[_at(box.local_start, box.shape)].numpy()
            error = float(np.abs(a - reference[_at(box.start, box.shape)]).max()) / scale
            if not error <= result:
                result, name = error, record.name
    return result, name
