"""A trained model on its own: loaded from a checkpoint into any layout, without an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import WeightSource, load_weights
from meshwright.checkpoint.merged import open_weights
from meshwright.checkpoint.planned_files import PlannedFolder
from meshwright.comm.watchdog import watched
from meshwright.config.load import merged
from meshwright.config.rules import READING_RULES, check
from meshwright.config.sections import Config
from meshwright.engine.batches import Dataset, MicroBatches, Picked
from meshwright.engine.context import Context, build_context
from meshwright.engine.executor import Executor
from meshwright.engine.output import LOSS
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import fields_of, mean_loss, validation_unit
from meshwright.errors import UserError
from meshwright.interop.hf import config_of
from meshwright.launch.processes import Place, enter, find_place, leave
from meshwright.models.stage import stage_of
from meshwright.models.wrapped.sections import is_described
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.record.run_folder import own_config
from meshwright.run.pretrain import build_modules
from meshwright.spec.model.hf.family import model_section
from meshwright.spec.model.hf.folder import has_weights

ONLY_TRAINING = ("zero", "recompute", "optimizer", "loss_scale", "lr")  # sections


def open_model(source: str) -> tuple[WeightSource, dict[str, Any]]:
    """The weights that PATH[@STEP] or a Hugging Face folder holds, and the config that says of which model."""
    if (Path(source) / "config.json").is_file():
        if is_described(source):
            folder = HFFolder(Path(source))
            return folder, config_of(folder.model)
        return PlannedFolder(Path(source)), config_of(model_section({"hf": source, "kind": "hf"}))
    weights = open_weights(find_checkpoint(source))
    return weights, weights.index.config


def config_with(found: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Config:
    """A checkpoint's config, some keys changed; foreign sections are left out, and what only training uses."""
    raw = {name: dict(keys) for name, keys in found.items() if name not in ONLY_TRAINING}
    for key in ("grad_dtype", "local", "server"):
        raw.get("train", {}).pop(key, None)
    return own_config(merged(raw, sections))


def with_model(
    source: str, sections: dict[str, dict[str, Any]], use: Callable[[Context, list[nn.Module], Place], Any]
) -> Any:
    """Joins the world, loads the model that `source` names, and calls `use` with it."""
    weights, found = open_model(source)
    place = find_place()
    config = config_with(found, sections)
    check(config, place.world, READING_RULES)
    device, joined = enter(place, config.run.device, config.comm.backend, config.comm.timeout)
    ctx = build_context(config, place.rank, place.world, device, place.local_world)
    with watched(ctx.mesh, config.comm.timeout, device, joined):
        modules = build_modules(ctx, model_provider)
        load_weights(modules, weights)
        if config.model.kind_facts.is_foreign and has_weights(Path(config.model.hf)):
            PlannedFolder(Path(config.model.hf)).fill_buffers(modules)
        result = use(ctx, modules, place)
    if joined:  # after an error the process ends, and leaving could wait for peers that are gone
        leave()
    return result


def evaluate(ctx: Context, modules: list[nn.Module], dataset: Dataset, samples: int) -> dict[str, Any]:
    """Mean loss and perplexity over the first `samples` samples, on however many data-parallel ranks."""
    executor = Executor(modules, ctx.mesh.pp, partial(forward_step, ctx), ctx.parallel.streams)
    unit = validation_unit(ctx)
    batches = MicroBatches(ctx, Picked(dataset, range(samples)), fields_of(modules), ThreadPoolExecutor(1))
    declared = stage_of(modules[0]).loss_counts
    terms = (LOSS,) if declared is None else tuple(declared(dataset.sample(0)))
    found = mean_loss(executor, batches, -(-samples // unit) * unit, terms=terms)
    if not found.tokens:
        raise UserError("no token of the data counts in the loss: check data.mask_eod and data.eod")
    perplexity, tokens = math.exp(min(found.losses.get(LOSS, found.loss), 700.0)), math.ceil(found.tokens)
    line = {"loss": found.loss, "perplexity": perplexity, "tokens": tokens, "samples": samples}
    return line | ({"losses": found.losses} if found.losses else {})
