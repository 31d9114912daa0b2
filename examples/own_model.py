"""Bring your own model and data: a little recurrent network, split over the pipeline by layers, on made-up sequences.

The program uses none of Meshwright's model code. It uses the mesh, the schedule, the data-parallel buffers, the
optimizer, the metrics and the run folder. The extra config section `gru` belongs to the user.

    python examples/own_model.py [RUN_FOLDER [STEPS]]           # one process
    torchrun --nproc_per_node 4 examples/own_model.py           # dp=2 x pp=2
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import meshwright
from meshwright.config.load import config_from


@dataclass(frozen=True)
class GRUConfig:
    width: int = 48
    period: int = 7


def drawn(seed: int, module: Callable[..., nn.Module], *args: Any, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    return module(*args, **more)


class GRUStage(nn.Module):
    """Some of the layers. The first stage embeds, and the last one predicts.

    Each part is drawn from a separate seed, so that every layout starts from the same weights.
    """

    def __init__(self, ctx: Any, stage: Any) -> None:
        super().__init__()
        model, own = ctx.config.model, ctx.config.extra["gru"]
        self.stage = stage
        self.embed = drawn(1, nn.Embedding, model.vocab, own.width) if stage.first else None
        self.layers = nn.ModuleList(
            drawn(100 + n, nn.GRU, own.width, own.width, batch_first=True) for n in stage.layers
        )
        self.head = drawn(2, nn.Linear, own.width, model.vocab) if stage.last else None
        shape = (ctx.config.train.micro_batch, model.seq, own.width)
        self.receives = {} if stage.first else {"state": (shape, torch.float32)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers:
            x = x + layer(x)[0]
        return x if self.head is None else self.head(x)


class Periodic:
    """A dataset whose sample n is a sequence that repeats with a period. It is a pure function of n."""

    def __init__(self, vocab: int, seq: int, period: int) -> None:
        self.vocab, self.seq, self.period = vocab, seq, period

    def sample(self, n: int) -> dict[str, np.ndarray]:
        motif = np.random.default_rng(n).integers(0, self.vocab, self.period)
        ids = np.resize(motif, self.seq + 1)
        return {"tokens": ids[:-1], "labels": ids[1:]}


def model_provider(ctx: Any, stage: Any) -> nn.Module:
    return GRUStage(ctx, stage)


def datasets_provider(ctx: Any, samples: Any) -> tuple[Periodic, Periodic, None]:
    model, own = ctx.config.model, ctx.config.extra["gru"]
    data = Periodic(model.vocab, model.seq, own.period)
    return data, data, None


def forward_step(ctx: Any, module: Any, batch: Any, received: Any) -> Any:
    out = module(batch["tokens"] if module.stage.first else received["state"])
    if not module.stage.last:
        return {"state": out}
    labels = batch["labels"]
    loss = nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum")
    hits = (out.argmax(-1) == labels).double().mean()
    return loss, labels.numel(), {"accuracy": hits}


class Printed:
    """A watcher, which is called on the rank that writes the run."""

    def started(self, ctx: Any) -> None:
        print(f"{ctx.layout.world} ranks: dp={ctx.layout.dp} pp={ctx.layout.pp}")

    def stepped(self, result: Any) -> None:
        if result.step % 20 == 0:
            print(f"step {result.step:4d}  loss {result.loss:.3f}  accuracy {result.monitored['accuracy']:.3f}")

    def validated(self, line: Any) -> None:
        print(f"validation loss {line['loss']:.3f}")

    def finished(self) -> None:
        print("done")


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/own-model"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    config = config_from(
        {
            "model": {"layers": 2, "hidden": 48, "heads": 1, "vocab": 16, "seq": 32, "tied_embeddings": False},
            "layout": {"pp": 2 if world > 1 else 1},
            "train": {"steps": steps, "global_batch": 16, "micro_batch": 4},
            "optimizer": {"lr": 1e-2},
            "data": {"prefixes": ["made"]},
            "run": {"dir": folder, "tensorboard": False, "device": "cpu"},
            "gru": {"period": 7},
        },
        sections={"gru": GRUConfig},
    )
    meshwright.pretrain(config, model_provider, datasets_provider, forward_step, watcher=Printed())


if __name__ == "__main__":
    main()
