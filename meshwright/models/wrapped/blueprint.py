"""Reads the structure of a transformers model from the module itself, built on the `meta` device.

The structure says which parameters come before, in and after the blocks, and which style of the tp plan shards each.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import UserError
from meshwright.models.wrapped.activations import SavedElements, saved_elements
from meshwright.models.wrapped.calls import Plan, style_of
from meshwright.outside import read_file
from meshwright.spec.model.graph import HIDDEN, Node, Stream, stack_nodes
from meshwright.spec.model.part import NamedPart, Unit
from meshwright.spec.model.wrapped.families import with_added_styles
from meshwright.spec.model.wrapped.parts import (
    STYLES,
    PlannedBlock,
    PlannedCall,
    PlannedModel,
    PlannedParameter,
    PlannedPart,
)


@dataclass(frozen=True)
class Blueprint:
    """A transformers model, its tp plan, and the names of the parameters before and after its blocks."""

    model: PlannedModel
    plan: dict[str, str]
    before: tuple[str, ...]
    after: tuple[str, ...]


def transformers() -> Any:
    """Import and return the transformers library, which is an optional dependency."""
    try:
        import transformers as library
    except ImportError:
        raise UserError("model.hf builds transformers' own module: run `pip install transformers`") from None
    return library


# `text`, the contents of config.json, is part of the cache's key: a file that changes is read again.
@lru_cache(maxsize=16)
def _read(folder: str, text: str) -> Any:
    library = transformers()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{folder}/config.json is of no model that transformers has: {why}") from None


def read_config(folder: str) -> Any:
    """Return the transformers config of a folder."""
    path = Path(folder) / "config.json"
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, ValueError):
        raise UserError(f"model.hf={folder} has no config.json that can be read: name a folder of a model") from None
    return _read(folder, text)


def of_blocks(text: Any, key: str) -> list[Any]:
    """Return the distinct values of a config's key over all blocks: one, or several if blocks differ in it."""
    differ = getattr(text, "is_heterogeneous", False)
    configs = [text.per_layer_config[n] for n in range(text.num_hidden_layers)] if differ else [text]
    return list(dict.fromkeys(getattr(config, key, None) for config in configs))


def config_at(config: Any, name: str) -> Any:
    """Return the config that applies to a module of this name: that of its block if blocks differ."""
    text = config.get_text_config()
    number = re.search(r"\.(\d+)\.", name)
    if number is None or not getattr(text, "is_heterogeneous", False):
        return text
    return text.per_layer_config[int(number.group(1))]


def rotary_elements(config: Any, name: str) -> int:
    """Return the number of trailing output elements that are rotary, for a module of the style `mla_kv_a_proj`."""
    return int(getattr(config_at(config, name), "qk_rope_head_dim", 0))


def skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the unmodified module without memory for its parameters, whose values are set later.

    Its buffers are made by the module's own program.
    """
    classes = transformers().AutoModelForCausalLM._model_mapping
    if type(config) not in classes:
        raise UserError(
            f"transformers has no causal language model of the family {config.model_type}: use another model"
        )
    config.use_cache = False
    # torch has no grouped matrix product for float64, so experts are computed one by one.
    if dtype == torch.float64:
        config._experts_implementation = "eager"
    with without_memory():
        module: nn.Module = classes[type(config)]._from_config(config, dtype=dtype)
    # transformers initialises no module that carries this flag, and these modules get their values only later.
    for each in module.modules():
        each._is_hf_initialized = False  # type: ignore[assignment]
    return in_double(module) if dtype == torch.float64 else module


@contextmanager
def without_memory() -> Iterator[None]:
    """Put the parameters of modules that are built inside the context on the `meta` device.

    Buffers keep their values, which `torch.device("meta")` would discard.
    """
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def in_double(module: nn.Module) -> nn.Module:
    """Convert every parameter to float64, including those that a model always keeps in float32."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    return module


@lru_cache(maxsize=16)
def _blueprint(folder: str, text: str) -> Blueprint:
    config = _read(folder, text)
    return draw(skeleton(config, torch.float32), config)


def blueprint(folder: str) -> Blueprint:
    """Return the blueprint of a folder's model."""
    read_config(folder)
    return _blueprint(folder, (Path(folder) / "config.json").read_text(encoding="utf-8"))


def blocks_path(module: nn.Module) -> str:
    """Return the name of the module list that holds the most parameters or, among equals, of the outermost one."""
    lists = {
        name: sum(p.numel() for p in each.parameters())
        for name, each in module.named_modules() if isinstance(each, nn.ModuleList)
    }  # fmt: skip
    if not lists:
        raise UserError(f"{type(module).__name__} has no list of blocks: it can't be divided here")
    return max(lists, key=lambda name: (lists[name], -name.count(".")))


def draw(module: nn.Module, config: Any) -> Blueprint:
    """Derive the blueprint of a model from its skeleton and its config."""
    text = config.get_text_config()
    path = blocks_path(module)
    plan = with_added_styles(config.model_type, dict(getattr(module, "tp_plan", None) or {}))

    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {name: all_of[0] for all_of in names.values() if len(all_of) > 1 for name in all_of}
    styles = {name: style_of(name, plan) for all_of in names.values() for name in all_of}
    # Tied parameters are one tensor, which can be sharded in one way only. If their styles disagree, it is replicated.
    for all_of in names.values():
        shape = tuple(module.get_parameter(all_of[0]).shape)
        if len({PlannedParameter(name, shape, styles[name]).dim for name in all_of}) > 1:
            for name in all_of:
                plan[name.rpartition(".")[0]], styles[name] = "replicate", ""

    def unit(prefix: str, wanted: list[str]) -> PlannedPart:
        held = tuple(
            PlannedParameter(
                name.removeprefix(prefix), tuple(module.get_parameter(name).shape), styles[name], tied.get(name, "")
            )
            for name in wanted
        )
        used = max(count or 1 for count in of_blocks(text, "num_experts_per_tok"))
        return PlannedPart(held, tuple(calls_of(module, prefix, wanted, plan, config)), used=used)

    every = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    outer = [name for name in every if not name.startswith(f"{path}.")]
    after = [name for name in outer if _follows(module, name, path)]
    before = [name for name in outer if name not in after]
    first_table = module.get_input_embeddings()  # type: ignore[operator]
    table = next((name for name, each in module.named_modules() if each is first_table), "")
    beside = [name for name in before if not name.startswith(f"{table}.")]

    hidden, count = text.hidden_size, len(module.get_submodule(path))  # type: ignore[arg-type]
    kept = saved_elements(type(module), copy.deepcopy(config), path) or [SavedElements()] * count
    prefixes = [f"{path}.{n}." for n in range(count)]
    parts = [
        replace(unit(prefix, [name for name in every if name.startswith(prefix)]), kept_whole=whole, kept_cut=cut)
        for prefix, (whole, cut) in zip(prefixes, kept, strict=True)
    ]
    blocks = [PlannedBlock((NamedPart("", "", part),), hidden=hidden) for part in parts]
    first = Unit((NamedPart("", "", unit("", before)),))
    last = Unit((NamedPart("", "", replace(unit("", after), logits=text.vocab_size)),))

    # Every stage builds its masks and positions from the ids, so every node reads these fields.
    fields = ("tokens", "positions")
    nodes = (
        Node("embedding", first, writes=HIDDEN, fields=fields),
        *stack_nodes(blocks, prefix=path, fields=fields),
        Node("head", last, (HIDDEN,), fields=("labels", "loss_mask", *fields)),
    )
    ends_tied = any(name in tied for name in before) and any(name in tied for name in after)
    more = {"path": path, "family": config.model_type, "beside": tuple(beside)}
    model = PlannedModel(nodes, (Stream(HIDDEN, hidden, by_sample=True),), ends_tied, **more)
    return Blueprint(model, plan, tuple(before), tuple(after))


def _follows(module: nn.Module, name: str, path: str) -> bool:
    """Return True if a parameter is used after the blocks.

    That holds for parameters outside of the base model and for those of modules that the pipeline plan lists after the
    blocks. Without a pipeline plan, the order of definition decides.
    """
    base, _, last = path.rpartition(".")
    # The head is outside of the base model.
    if not name.startswith(f"{base}." if base else ""):
        return True
    planned = list(getattr(module, "pp_plan", None) or ())
    if path in planned:
        return any(name.startswith(f"{each}.") for each in planned[planned.index(path) + 1 :])
    children = [key for key, _ in module.get_submodule(base).named_children()]
    own = name.removeprefix(f"{base}.").split(".")[0]
    return own in children and children.index(own) > children.index(last)


def calls_of(module: nn.Module, prefix: str, wanted: list[str], plan: Plan, config: Any) -> list[PlannedCall]:
    """Return the tp collectives per token of a unit's modules, according to their styles."""
    calls: list[PlannedCall] = []
    owners = list(dict.fromkeys(owner for name in wanted for owner in _owners(name)))
    for name in owners:
        style = style_of(name, plan, parameter=False)
        if not style or (prefix and not f"{name}.".startswith(prefix)):
            continue
        calls += _calls(module.get_submodule(name), style, config_at(config, name))
    return calls


def _owners(name: str) -> list[str]:
    """Return the names of all modules that contain a parameter, from the outermost to the innermost."""
    words = name.split(".")[:-1]
    return [".".join(words[: n + 1]) for n in range(len(words))]


def _calls(module: nn.Module, style: str, text: Any) -> list[PlannedCall]:
    _, before, after, _, _ = STYLES[style]
    wide, out = (getattr(module, key, text.hidden_size) for key in ("in_features", "out_features"))
    out = getattr(module, "embedding_dim", out)
    calls = {
        "copy": [PlannedCall("backward", "all_reduce", wide)], "slice": [PlannedCall("backward", "all_gather", wide)],
        "experts": [PlannedCall("backward", "all_reduce", width)
                    for width in (text.hidden_size, getattr(text, "num_experts_per_tok", 1))],
        "sum": [PlannedCall("forward", "all_reduce", out)], "gather": [PlannedCall("forward", "all_gather", out)],
        "rotary": [PlannedCall("backward", "all_reduce", getattr(text, "qk_rope_head_dim", 0))],
    }  # fmt: skip
    return calls.get(after, []) + calls.get(before, [])
