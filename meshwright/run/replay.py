"""Computes past steps of a run again from an earlier checkpoint, on any layout, without touching the run's folder.

A step is a function of the weights, the seed and the number of samples consumed, and a checkpoint holds all of them. So
on the same layout a replayed step gives the recorded numbers bit for bit, unless something went wrong then or now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.base import begin_with_folder, read_base
from meshwright.checkpoint.resume import load_checkpoint
from meshwright.comm.watchdog import watchdog_for
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

Lines = Mapping[int, Mapping[str, Any]]  # The lines of metrics.jsonl by step.


def replay(config: Config, step: int, checkpoint: Path | None, source: str | None, recorded: Lines) -> list[StepResult]:
    """Compute the steps after `checkpoint` up to `step` again, as one rank of the job. Return their results.

    Without a checkpoint, start a new run; `source` is the checkpoint from which the original run took its weights, if
    any. `config.run.dir` must not be the run's folder.
    """
    place, comm = find_place(), config.comm
    check(config, place.world, TRAINING_RULES)
    device, joined = enter(place, config.run.device, comm.backend, comm.timeout, config.train.precision)
    ctx = build_context(config, place.rank, place.world, device, place.local_world, trains=True)
    results = []
    with watchdog_for(ctx.mesh, comm.timeout, device, joined):
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
            start = checkpoint or find_checkpoint(str(source))
            load_checkpoint(trainer, start, model_only=checkpoint is None)
        while trainer.step_number < step:
            follow(trainer, recorded.get(trainer.step_number + 1, {}))
            results.append(trainer.step())
        trainer.data_parallel.weights.wait_for_gathers()
    if joined:
        leave()
    return results


def follow(trainer: Trainer, line: Mapping[str, Any]) -> None:
    """Make the trainer's next step repeat the decisions that the run recorded in this step's line.

    A run that went back to a checkpoint may have left out a batch of samples. A run may also have skipped the update of
    a step whose finite loss or norm stood out. A step that is not finite never makes an update, so it needs nothing.
    """
    consumed, gate = line.get("consumed"), trainer.gate
    if isinstance(consumed, int) and consumed >= 0:
        trainer.consumed = consumed
    finite = all(isinstance(line.get(name), float) for name in ("loss", "grad_norm"))
    gate.release()
    gate.active = line.get("skipped") is True and finite
    # Any loss is above this bound, so an active gate always holds the step.
    gate.loss_bound = -math.inf
