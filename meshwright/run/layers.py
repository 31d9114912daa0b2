"""A hook that records gradient norms, weight norms and update ratios by layer, every `run.layers_every` steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.engine.hooks import Hook
from meshwright.engine.monitor import gather_bytes
from meshwright.engine.sharding.buffers import PARAM, Bucket, Slot, State
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.engine.step import StepResult, Trainer
from meshwright.record.run_folder import RunFolder

# Weight and update norms are estimated from about this many evenly spaced elements of each parameter on each rank.
SAMPLED_ELEMENTS = 4096


def layer_of(name: str) -> str:
    """Return the part of a parameter's global name that identifies its layer: `blocks.3` for `blocks.3.mlp.up.weight`.

    For a name without a layer number it is the first part.
    """
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.split(".")[0]


def natural(name: str) -> list[Any]:
    """Return a key that sorts names with numbers by value: `blocks.9` before `blocks.10`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class ParameterRange(NamedTuple):
    """The elements of one parameter that this rank contributes to the sums: `low` to `high` of its slot."""

    layer: str
    bucket: Bucket
    state: State
    slot: Slot
    low: int
    high: int

    @property
    def grads(self) -> Tensor:
        """The gradients of these elements. Their memory may exist only from backward until the next step."""
        offset = self.slot.start - self.bucket.share[0]
        return self.bucket.own_grads[offset + self.low : offset + self.high]

    @property
    def stride(self) -> int:
        return max(1, (self.high - self.low) // SAMPLED_ELEMENTS)

    def sample(self) -> Tensor:
        """Return a copy of every `stride`-th master weight as float64."""
        values = self.state.values(self.slot, self.low, self.high)[:: self.stride]
        return as_tensor(values).detach().to(torch.float64, copy=True)


class LayerNorms(Hook):
    """Writes layers.jsonl.

    Gradient norms are exact. Weight and update norms are estimated from a sample of each parameter: exact update norms
    would need a copy of the model.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder | None) -> None:
        self.trainer, self.folder, self.every = trainer, folder, trainer.ctx.config.run.layers_every
        self.pieces = list(_pieces(trainer)) if self.every else []
        self.names: Sequence[str] = ()
        self.before_update: list[Tensor] = []

    def _is_due(self, step: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or step == min(2, self.trainer.ctx.config.train.steps))

    def pauses(self, step: int) -> bool:
        return self._is_due(step) or self._is_due(step + 1)

    def before(self, step: int) -> None:
        if self._is_due(step):
            self.before_update = [piece.sample() for piece in self.pieces]

    @torch.no_grad()
    def after(self, result: StepResult, last: bool) -> None:
        if not self._is_due(result.step):
            return
        ctx = self.trainer.ctx
        with ctx.ledger.phase("metrics"):
            if not self.names:
                local = json.dumps(sorted({piece.layer for piece in self.pieces})).encode()
                by_rank = [json.loads(text) for text in gather_bytes(ctx.mesh.world, local, ctx)]
                self.names = sorted({name for names in by_rank for name in names}, key=natural)
            # Every replica counts all parameters, so the sum over the world has each as often as there are replicas.
            sums = self._sums() / ctx.layout.replicas
            ctx.mesh.world.all_reduce(sums)
        self.before_update = []
        if self.folder and not result.skipped:
            self.folder.layers(line_of(result, self.names, sums.tolist()))

    def _sums(self) -> Tensor:
        """Return the sums of squares of this rank's gradients, weights and updates. Shape: [layers, 3]."""
        rows = {name: number for number, name in enumerate(self.names)}
        sums = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.trainer.ctx.device.torch)
        for piece, before in zip(self.pieces, self.before_update, strict=True):
            now = piece.sample()
            row = sums[rows[piece.layer]]
            # Each sampled element stands for `stride` elements.
            row[0] += torch.linalg.vector_norm(piece.grads, dtype=torch.float64).square()
            row[1] += piece.stride * now.square().sum().to(sums.device)
            row[2] += piece.stride * (now - before).square().sum().to(sums.device)
        return sums


def _pieces(trainer: Trainer) -> Iterator[ParameterRange]:
    parallel = trainer.data_parallel
    for state in trainer.optimizer.tensors():
        if not isinstance(state, State) or state.name != PARAM or not state.buffer.key.trained:
            continue
        for slot in state.buffer.slots:
            low, high = state.holds(slot)
            if low < high and parallel.counts(state.buffer, slot):
                yield ParameterRange(
                    layer_of(slot.record.name), state.buffer.buckets[slot.bucket], state, slot, low, high
                )


def line_of(result: StepResult, names: Sequence[str], sums: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a line of layers.jsonl.

    Gradients are stored with a common factor. Scaling the layers' norms so that together they make the step's gradient
    norm removes it.
    """
    total = math.fsum(row[0] for row in sums)
    scale = result.grad_norm / math.sqrt(total) if total > 0 else 0.0
    return {
        "step": result.step, "time": result.time, "layers": list(names),
        "grad_norm": [scale * math.sqrt(row[0]) for row in sums],
        "weight_norm": [math.sqrt(row[1]) for row in sums],
        "update_ratio": [math.sqrt(row[2] / row[1]) if row[1] > 0 else 0.0 for row in sums],
    }  # fmt: skip
