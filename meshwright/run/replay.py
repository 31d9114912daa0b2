"""Past steps, computed again: from a checkpoint before them, on any layout, without touching the run's folder.

A step is a function of the weights, the seed and the number of samples consumed, all of which a checkpoint holds. So on
the same layout a replayed step gives the recorded numbers bit for bit, unless something went wrong then or now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.base import begin_with_folder, read_base
from meshwright.checkpoint.resume import load_checkpoint
from meshwright.comm.watchdog import watched
from meshwright.config.rules import TRAINING_RULES, check
from meshwright.config.sections import Config
from meshwright.engine.context import build_context
from meshwright.engine.own_models import in_precision
from meshwright.engine.providers import datasets_provider, forward_step, model_provider
from meshwright.engine.result import StepResult
from meshwright.engine.step import Trainer
from meshwright.launch.processes import enter, find_place, leave
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.run.pretrain import agree, build_modules

Lines = Mapping[int, Mapping[str, Any]]  # what a run has recorded of its steps


def replay(config: Config, step: int, checkpoint: Path | None, source: str | None, recorded: Lines) -> list[StepResult]:
    """The steps from the checkpoint's next one to this one, as one rank of all. Without a checkpoint the run begins
    anew, with the weights of `source` if it did so then. `config.run.dir` must not be the run's folder."""
    place, comm = find_place(), config.comm
    check(config, place.world, TRAINING_RULES)
    device, joined = enter(place, config.run.device, comm.backend, comm.timeout, config.train.precision)
    ctx = build_context(config, place.rank, place.world, device, place.local_world, trains=True)
    results = []
    with watched(ctx.mesh, comm.timeout, device, joined):
        modules = build_modules(ctx, model_provider)
        data, valid, _ = datasets_provider(ctx, (0, 0, 0))
        trainer = Trainer(ctx, modules, in_precision(ctx, modules, forward_step), data, valid)
        if config.tune.adapts:
            agree(ctx, lambda: read_base(trainer))
            trainer.publish()
        if config.model.hf:
            fresh = checkpoint is None and source is None
            agree(ctx, lambda: begin_with_folder(trainer, modules, fresh))
            trainer.publish()
        if checkpoint is not None or source is not None:
            found = checkpoint or find_checkpoint(str(source))
            load_checkpoint(trainer, found, model_only=checkpoint is None)
        while trainer.step_number < step:
            follow(trainer, recorded.get(trainer.step_number + 1, {}))
            results.append(trainer.step())
        trainer.data_parallel.weights.wait_for_gathers()
    if joined:
        leave()
    return results


def follow(trainer: Trainer, line: Mapping[str, Any]) -> None:
    """Has the next step be what the run made of it: a run that went back may have left out a batch, and may have made
    no update from a step that stood out. (From one that is not finite none is made anyway.)"""
    consumed, gate = line.get("consumed"), trainer.gate
    if isinstance(consumed, int) and consumed >= 0:
        trainer.consumed = consumed
    finite = all(isinstance(line.get(name), float) for name in ("loss", "grad_norm"))
    gate.release()
    gate.active = line.get("skipped") is True and finite
    gate.loss_bound = -math.inf
