"""Load a trained model from a checkpoint into any layout, without an optimizer, and evaluate it."""

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
from meshwright.comm.watchdog import watchdog_for
from meshwright.config.load import merge_sections
from meshwright.config.rules import READING_RULES, check
from meshwright.config.sections import Config
from meshwright.engine.batches import Dataset, MicroBatches, SampleSubset
from meshwright.engine.context import Context, build_context
from meshwright.engine.executor import Executor
from meshwright.engine.output import LOSS
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import fields_of, mean_loss, validation_unit
from meshwright.errors import UserError
from meshwright.interop.hf import config_of
from meshwright.launch.processes import ProcessPlace, enter, find_place, leave
from meshwright.models.stage import stage_of
from meshwright.models.wrapped.sections import is_described
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.record.run_folder import own_config
from meshwright.run.pretrain import build_modules
from meshwright.spec.model.hf.family import model_section
from meshwright.spec.model.hf.folder import has_weights

# The config sections that only training uses.
ONLY_TRAINING = ("zero", "recompute", "optimizer", "loss_scale", "lr")


def open_model(source: str, average: bool = False) -> tuple[WeightSource, dict[str, Any]]:
    """Return the weights of a checkpoint (PATH[@STEP]) or a Hugging Face folder, and the config of their model.

    With `average` they are the moving average of a checkpoint's weights.
    """
    if (Path(source) / "config.json").is_file():
        if average:
            raise UserError(f"--ema reads the averaged weights of a checkpoint, and {source} has none: omit it")
        if is_described(source):
            folder = HFFolder(Path(source))
            return folder, config_of(folder.model)
        return PlannedFolder(Path(source)), config_of(model_section({"hf": source, "kind": "hf"}))
    weights = open_weights(find_checkpoint(source), average)
    return weights, weights.index.config


def config_with(found: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Config:
    """Return a checkpoint's config with the keys of `sections` changed. Sections that another program added, and keys
    that only training uses, are omitted."""
    raw = {name: dict(keys) for name, keys in found.items() if name not in ONLY_TRAINING}
    for key in ("grad_dtype", "local", "server"):
        raw.get("train", {}).pop(key, None)
    return own_config(merge_sections(raw, sections))


def with_model(
    source: str, sections: dict[str, dict[str, Any]], use: Callable[[Context, list[nn.Module], ProcessPlace], Any],
    average: bool = False,
) -> Any:  # fmt: skip
    """Join the world, load the model that `source` names, and return the result of `use` with it."""
    weights, raw_config = open_model(source, average)
    place = find_place()
    config = config_with(raw_config, sections)
    check(config, place.world, READING_RULES)
    device, joined = enter(place, config.run.device, config.comm.backend, config.comm.timeout)
    ctx = build_context(config, place.rank, place.world, device, place.local_world)
    with watchdog_for(ctx.mesh, config.comm.timeout, device, joined):
        result = use(ctx, modules_with(ctx, weights), place)
    # Not in a `finally`: after an error the process ends, and leaving could wait for peers that are gone.
    if joined:
        leave()
    return result


def modules_with(ctx: Context, weights: WeightSource) -> list[nn.Module]:
    """Build this rank's chunks and fill them with weights."""
    modules = build_modules(ctx, model_provider)
    model = ctx.config.model
    load_weights(modules, weights)
    if model.kind_facts.is_foreign and has_weights(Path(model.hf)):
        PlannedFolder(Path(model.hf)).fill_buffers(modules)
    return modules


def evaluate(ctx: Context, modules: list[nn.Module], dataset: Dataset, samples: int) -> dict[str, Any]:
    """Return the mean loss and perplexity over the first `samples` samples, on any number of data-parallel ranks."""
    executor = Executor(modules, ctx.mesh.pp, partial(forward_step, ctx), ctx.parallel.streams)
    unit = validation_unit(ctx)
    batches = MicroBatches(ctx, SampleSubset(dataset, range(samples)), fields_of(modules), ThreadPoolExecutor(1))
    declared = stage_of(modules[0]).loss_counts
    terms = (LOSS,) if declared is None else tuple(declared(dataset.sample(0)))
    mean = mean_loss(executor, batches, -(-samples // unit) * unit, terms=terms)
    if not mean.tokens:
        raise UserError("no token of the data counts in the loss: check data.mask_eod and data.eod")
    # exp overflows a float64 above 709.
    perplexity = math.exp(min(mean.losses.get(LOSS, mean.loss), 700.0))
    tokens = math.ceil(mean.tokens)
    line = {"loss": mean.loss, "perplexity": perplexity, "tokens": tokens, "samples": samples}
    return line | ({"losses": mean.losses} if mean.losses else {})
