"""Models that a user's program brings: the checks on them, their precision, and their complete weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn

from meshwright.config.load import GivenConfig, config_from, merge_sections, read_sections
from meshwright.config.precision import PRECISIONS
from meshwright.config.sections import Config
from meshwright.device import PRECISION_DTYPES
from meshwright.engine.context import Context
from meshwright.errors import UserError
from meshwright.models.stage import stage_of
from meshwright.nn.parallel import record_of
from meshwright.spec.layout.params import DATA_AXES, Init

if TYPE_CHECKING:
    from meshwright.engine.step import ForwardStep, Trainer

# Values for the sections that a program may leave out: its module defines the model, and it provides the data.
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "hidden": 1, "heads": 1, "vocab": 1, "seq": 1, "position": "none"},
    "data": {"prefixes": ["given"]},
}
PRESET_INIT = Init("given")  # the init in the records that a foreign model's parameters get
AUTOCAST = ("bf16", "fp16")  # the precisions in which torch.autocast can compute a model with float32 weights


def config_of_program(given: GivenConfig, sections: Mapping[str, type] | None = None) -> Config:
    """Return the config of a program that brings its model and data. Sizes of models and files of data that it
    does not state get values without an effect, with one block for each stage of the pipeline."""
    if isinstance(given, Config):
        return given
    raw = {name: section or {} for name, section in read_sections(given).items()}
    model, layout = raw.get("model", {}), raw.get("layout", {})
    defaults = OWN_DEFAULTS
    if isinstance(model, Mapping) and isinstance(layout, Mapping):
        stages = [layout.get(key, 1) for key in ("pp", "chunks")]
        blocks = math.prod(count for count in stages if isinstance(count, int))
        defaults = merge_sections(OWN_DEFAULTS, {"model": {"layers": max(1, blocks)}})
        if {"preset", "hf"} & model.keys():
            defaults = defaults | {"model": {}}
    return config_from(merge_sections(defaults, raw), sections)


def own_facts(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the class and the number of parameters of a user's model on this rank; empty for other models."""
    own = [module for module in modules if is_own(module)]
    # With zero.stage=3 a parameter holds no elements between its uses; its record keeps the whole shape.
    elements = {
        id(value): record.numel if (record := record_of(value)) else value.numel()
        for module in own for value in module.parameters()
    }  # fmt: skip
    return {"name": type(own[0]).__name__, "parameters": sum(elements.values())} if own else {}


def is_own(module: nn.Module) -> bool:
    """Return True if no parameter has a record of how it is sharded, so that every rank computes the whole module."""
    records = [record_of(parameter) for parameter in module.parameters()]
    return bool(records) and all(record is None or record.init == PRESET_INIT for record in records)


def check_own(ctx: Context, module: nn.Module) -> None:
    """Refuse settings that would silently have no effect on a user's model, or repeat its work on several ranks."""
    config = ctx.config
    name = type(module).__name__
    for axis in ("tp", "cp"):
        if (ranks := getattr(config.layout, axis)) > 1:
            raise UserError(
                f"layout.{axis}={ranks} would have every rank compute all of {name}, whose parameters have no records: "
                f"set layout.{axis}=1, or give them records (meshwright.spec.layout.params)"
            )
    if not _is_cast(ctx, module) and (
        config.train.precision not in AUTOCAST or config.layout.pp * config.layout.chunks > 1
    ):
        raise UserError(
            f"train.precision={config.train.precision} can't be applied to {name}, whose parameters have "
            "another dtype: convert it in the model provider (module.to(...), and what it receives), or set "
            "train.precision=fp32"
        )
    named = module.named_parameters()
    kinds = [(key, list(value.shape), str(value.dtype), value.requires_grad) for key, value in named]
    if ctx.mesh.group(DATA_AXES).unlike_first(crc32(repr(kinds).encode()), ctx.device.torch):
        # The ranks gather shards by their position alone, so shards of different weights would be mixed up silently.
        raise UserError(
            f"the ranks that train copies of {name} built it with other parameters (by name, shape, dtype or "
            "requires_grad): let the model provider build the same on all of them"
        )


def _is_cast(ctx: Context, module: nn.Module) -> bool:
    """Return True if a module needs no cast to the config's precision. With fp32 the user's own dtypes are used."""
    precision = ctx.config.train.precision
    floats = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    fits = floats <= {PRECISION_DTYPES[precision]} and not PRECISIONS[precision].scales_products
    return PRECISION_DTYPES[precision] == torch.float32 or fits


def in_precision(ctx: Context, modules: Sequence[nn.Module], forward_step: ForwardStep) -> ForwardStep:
    """Return a forward step that computes users' models under torch.autocast if their weights need a cast."""
    foreign = [module for module in modules if is_own(module) or stage_of(module).foreign]
    if all(_is_cast(ctx, module) for module in foreign):
        return forward_step

    def cast(ctx: Context, module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]) -> Any:
        with torch.autocast(ctx.device.torch.type, PRECISION_DTYPES[ctx.config.train.precision]):
            return forward_step(ctx, module, batch, received)

    return cast


def state_dicts(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Return the complete weights of this rank's chunks on the CPU, under the names of the modules.

    All ranks must call it together: with zero.stage=3 a module holds its weights only while it uses them, and they are
    gathered here unit by unit. With layout.tp, sharded weights stay this rank's slices.
    """
    weights, copies = trainer.data_parallel.weights, {}
    weights.wait_for_gathers()
    for unit in weights.units:
        weights.open(unit)
        # Copied before `close`, which may free the weights. Names are looked up later, by object: two may be tied.
        for parameter in unit.module.parameters():
            copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
        weights.close(unit)

    def whole(module: nn.Module) -> dict[str, Tensor]:
        state = module.state_dict(keep_vars=True)
        rest = {id(value): value.detach().to("cpu", copy=True) for value in state.values() if id(value) not in copies}
        return {name: (copies | rest)[id(value)] for name, value in state.items()}

    return [whole(module) for module in trainer.modules]
