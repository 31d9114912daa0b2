"""What a transformers model is made of, read from the module itself on the `meta` device: which parameters stand before
its blocks, in them and after them, and which style of its plan places each."""

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
from meshwright.models.wrapped.activations import KeptElements, kept_elements
from meshwright.models.wrapped.calls import Plan, style_of
from meshwright.outside import read_file
from meshwright.spec.model.graph import HIDDEN, Node, Stream, stack_nodes
from meshwright.spec.model.part import NamedPart, Unit
from meshwright.spec.model.wrapped.families import mended
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
    """A transformers model, its plan, and the names of the parameters that stand before and after its blocks."""

    model: PlannedModel
    plan: dict[str, str]
    before: tuple[str, ...]
    after: tuple[str, ...]


def transformers() -> Any:
    try:
        import transformers as found
    except ImportError:
        raise UserError("model.hf builds transformers' own module: run `pip install transformers`") from None
    return found


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
    """Returns the transformers config of a folder; that of its text, where the model has more."""
    path = Path(folder) / "config.json"
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, ValueError):
        raise UserError(f"model.hf={folder} has no config.json that can be read: name a folder of a model") from None
    return _read(folder, text)


def of_blocks(text: Any, key: str) -> list[Any]:
    """The values that a key of a config has: one or, where blocks differ in it, several."""
    differ = getattr(text, "is_heterogeneous", False)
    configs = [text.per_layer_config[n] for n in range(text.num_hidden_layers)] if differ else [text]
    return list(dict.fromkeys(getattr(each, key, None) for each in configs))


def config_at(config: Any, name: str) -> Any:
    """The config of a module of this name: that of its block, where blocks differ."""
    text, number = config.get_text_config(), re.search(r"\.(\d+)\.", name)
    if number is None or not getattr(text, "is_heterogeneous", False):
        return text
    return text.per_layer_config[int(number.group(1))]


def rotary_elements(config: Any, name: str) -> int:
    """How many last elements a module means whose style is `mla_kv_a_proj`."""
    return int(getattr(config_at(config, name), "qk_rope_head_dim", 0))


def skeleton(config: Any, dtype: torch.dtype) -> nn.Module:
    """Builds the unmodified module without memory for its parameters, whose values others will set; its buffers are as
    its own program makes them. Experts are computed plainly in float64, for which torch has no grouped product."""
    classes = transformers().AutoModelForCausalLM._model_mapping
    if type(config) not in classes:
        raise UserError(
            f"transformers has no causal language model of the family {config.model_type}: use another model"
        )
    config.use_cache = False
    if dtype == torch.float64:
        config._experts_implementation = "eager"
    with without_memory():
        module: nn.Module = classes[type(config)]._from_config(config, dtype=dtype)
    for each in module.modules():
        each._is_hf_initialized = False  # type: ignore[assignment]
    return in_double(module) if dtype == torch.float64 else module


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are built inside get parameters on the `meta` device."""
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
    """Makes every parameter float64, also those that a model keeps in float32 whatever the others are."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.double()
    return module


@lru_cache(maxsize=16)
def _blueprint(folder: str, text: str) -> Blueprint:
    config = _read(folder, text)
    return draw(skeleton(config, torch.float32), config)


def blueprint(folder: str) -> Blueprint:
    """Returns the blueprint of a folder's model."""
    read_config(folder)
    return _blueprint(folder, (Path(folder) / "config.json").read_text(encoding="utf-8"))


def blocks_path(module: nn.Module) -> str:
    """Returns the name of the list of modules that holds most of the parameters: the outermost one, in doubt."""
    lists = {
        name: sum(p.numel() for p in each.parameters())
        for name, each in module.named_modules() if isinstance(each, nn.ModuleList)
    }  # fmt: skip
    if not lists:
        raise UserError(f"{type(module).__name__} has no list of blocks: it can't be divided here")
    return max(lists, key=lambda name: (lists[name], -name.count(".")))


def draw(module: nn.Module, config: Any) -> Blueprint:
    """Reads a skeleton."""
    text = config.get_text_config()
    path = blocks_path(module)
    plan = mended(config.model_type, dict(getattr(module, "tp_plan", None) or {}))
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {name: all_of[0] for all_of in names.values() if len(all_of) > 1 for name in all_of}
    styles = {name: style_of(name, plan) for all_of in names.values() for name in all_of}
    for all_of in names.values():  # one tensor has one place
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
        used = max(each or 1 for each in of_blocks(text, "num_experts_per_tok"))
        return PlannedPart(held, tuple(calls_of(module, prefix, wanted, plan, config)), used=used)

    every = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    outer = [name for name in every if not name.startswith(f"{path}.")]
    after = [name for name in outer if _follows(module, name, path)]
    before = [name for name in outer if name not in after]
    first_table = module.get_input_embeddings()  # type: ignore[operator]
    table = next((name for name, each in module.named_modules() if each is first_table), "")
    beside = [name for name in before if not name.startswith(f"{table}.")]
    hidden, count = text.hidden_size, len(module.get_submodule(path))  # type: ignore[arg-type]
    kept = kept_elements(type(module), copy.deepcopy(config), path) or [KeptElements()] * count
    heads = [f"{path}.{n}." for n in range(count)]
    parts = [
        replace(unit(head, [name for name in every if name.startswith(head)]), kept_whole=whole, kept_cut=cut)
        for head, (whole, cut) in zip(heads, kept, strict=True)
    ]
    blocks = [PlannedBlock((NamedPart("", "", part),), hidden=hidden) for part in parts]
    first = Unit((NamedPart("", "", unit("", before)),))
    last = Unit((NamedPart("", "", replace(unit("", after), logits=text.vocab_size)),))
    # Every stage builds its masks and positions itself, from the ids.
    fields = ("tokens", "positions")
    nodes = (
        Node("embedding", first, writes=HIDDEN, fields=fields),
        *stack_nodes(blocks, prefix=path, fields=fields),
        Node("head", last, (HIDDEN,), fields=("labels", "loss_mask", *fields)),
    )
    ends = any(name in tied for name in before) and any(name in tied for name in after)
    more = {"path": path, "family": config.model_type, "beside": tuple(beside)}
    model = PlannedModel(nodes, (Stream(HIDDEN, hidden, by_sample=True),), ends, **more)
    return Blueprint(model, plan, tuple(before), tuple(after))


def _follows(module: nn.Module, name: str, path: str) -> bool:
    """Whether a parameter is used after the blocks: outside of the base model, or by a module that the pipeline plan
    names after them. Where there is no such plan, by one that is defined after them."""
    base, _, last = path.rpartition(".")
    if not name.startswith(f"{base}." if base else ""):
        return True  # the head, outside of the base model
    planned = list(getattr(module, "pp_plan", None) or ())
    if path in planned:
        return any(name.startswith(f"{each}.") for each in planned[planned.index(path) + 1 :])
    children = [key for key, _ in module.get_submodule(base).named_children()]
    own = name.removeprefix(f"{base}.").split(".")[0]
    return own in children and children.index(own) > children.index(last)


def calls_of(module: nn.Module, prefix: str, wanted: list[str], plan: Plan, config: Any) -> list[PlannedCall]:
    """What the modules of a unit communicate over tp for each token, by their styles."""
    found: list[PlannedCall] = []
    seen = list(dict.fromkeys(owner for name in wanted for owner in _owners(name)))
    for name in seen:
        style = style_of(name, plan, parameter=False)
        if not style or (prefix and not f"{name}.".startswith(prefix)):
            continue
        found += _calls(module.get_submodule(name), style, config_at(config, name))
    return found


def _owners(name: str) -> list[str]:
    words = name.split(".")[:-1]
    return [".".join(words[: n + 1]) for n in range(len(words))]


def _calls(module: nn.Module, style: str, text: Any) -> list[PlannedCall]:
    _, before, after, _, _ = STYLES[style]
    wide, out = (getattr(module, key, text.hidden_size) for key in ("in_features", "out_features"))
    out = getattr(module, "embedding_dim", out)
    calls = {
        "copy": [PlannedCall("backward", "all_reduce", wide)], "slice": [PlannedCall("backward", "all_gather", wide)],
        "experts": [PlannedCall("backward", "all_reduce", text.hidden_size)],
        "sum": [PlannedCall("forward", "all_reduce", out)], "gather": [PlannedCall("forward", "all_gather", out)],
    }  # fmt: skip
    if after == "rotary":
        calls["rotary"] = [PlannedCall("backward", "all_reduce", text.qk_rope_head_dim)]
    if before == "experts":
        calls["experts"].append(PlannedCall("backward", "all_reduce", getattr(text, "num_experts_per_tok", 1)))
    return calls.get(after, []) + calls.get(before, [])
