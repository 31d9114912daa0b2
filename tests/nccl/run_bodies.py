"""The bodies that ranks run for stories: whole runs with `pretrain`, and trained models that other layouts read."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from meshwright.engine.hooks import Hook
from meshwright.engine.providers import forward_step, model_provider
from meshwright.infer.evaluate import evaluate, with_model
from meshwright.infer.generate import generate_all
from meshwright.run import pretrain as pretraining
from tests.faults.planted import Fault, Flip, run
from tests.support.oracle import made_for, small_config

Sections = dict[str, dict[str, Any]]


class StopAt(Hook):
    """A hook that asks for a stop as a scheduler does, by a signal to one rank."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def before(self, step: int) -> None:
        if step == self.step and self.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train_some(rank: int, world: int, sections: Sections, stop: int = 0) -> int:
    """Train, or resume from the run's folder. Return the step at which training ended."""
    config = small_config(**sections)
    made = made_for(config)
    trainer = pretraining.pretrain(
        config, model_provider, lambda ctx, n: (made, made, None), forward_step, hooks=(StopAt(rank, stop),)
    )
    return int(trainer.step_number)


def write_texts(
    rank: int, world: int, source: str, layout: dict[str, int], device: str, prompts: list[list[int]]
) -> list[list[int]]:
    """Return the most likely tokens after each prompt."""

    def use(ctx: Any, modules: Any, place: Any) -> list[list[int]]:
        found: list[list[int]] = generate_all(modules[0], ctx.config.model, prompts, 32, 0.0, 1.0, 0, set(), 4)
        return found

    return with_model(source, {"layout": layout, "run": {"device": device}}, use)  # type: ignore[no-any-return]


def find_loss(rank: int, world: int, source: str, layout: dict[str, Any], device: str) -> float:
    """Return the mean loss over some samples."""
    context = {"context": {"kind": layout.pop("kind")}} if "kind" in layout else {}

    def use(ctx: Any, modules: Any, place: Any) -> float:
        return float(evaluate(ctx, modules, made_for(ctx.config), 8)["loss"])

    return with_model(source, {"layout": layout, "run": {"device": device}, **context}, use)  # type: ignore[no-any-return]


def train_with(
    rank: int, world: int, folder: str, device: str, fault: Fault | None, flip: Flip | None, sections: Sections
) -> int | str:
    """Train with a planted wrong number. Return the last step, or the sentence with which the run ended."""
    real = pretraining.train

    def train(trainer: Any, hooks: Any, *more: Any) -> None:
        for hook in hooks:
            if isinstance(hook, Flip):
                hook.trainer = trainer
        real(trainer, hooks, *more)

    where = {"dir": folder, "tensorboard": False, "device": device, "eval_samples": 8}
    with mock.patch.object(pretraining, "train", train):
        end = run(Path(folder), fault, (flip,) if flip else (), **sections, run=where)
    return end if isinstance(end, str) else int(end.step_number)
