"""What an adapter to a Hugging Face family is: tables of keys and names, read in both directions. No torch.

A family says which of our model keys stand under which of its config's, which values of the others it can express, and
under which names its files hold our tensors. Rows of our tensors are rows of theirs, in runs; `Mapped` lists the runs,
so that import and export copy any part of any tensor without holding a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from meshwright.config.load import config_from
from meshwright.config.sections import TRAINING_KEYS, ModelConfig
from meshwright.errors import UserError
from meshwright.models.description import describe
from meshwright.parts.part import ALONE

HFConfig = dict[str, Any]

# The values of these keys that a family can express unless its `allows` says otherwise; an empty tuple means any value.
UNLESS_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": (False,), "qkv_bias": (False,), "qk_norm": (False,), "parallel_residual": (False,),
    "embedding_norm": (False,), "position_offset": (0,), "rotary_fraction": (1.0,), "rope_scaling": ((),),
}  # fmt: skip

# Keys of config.json whose null means "none"; a null under any other key is treated as missing.
NONE_IF_NULL = ("num_key_value_heads", "sliding_window")


@dataclass(frozen=True)
class SourceRows:
    """Rows [start, start + count) of our tensor, which their tensor `source` holds from row `source_start` on."""

    start: int
    count: int
    source: str
    source_start: int


@dataclass(frozen=True)
class Mapped:
    """One of our global tensors in their names; with `transposed`, its rows are columns of theirs."""

    shape: tuple[int, ...]
    runs: tuple[SourceRows, ...]
    transposed: bool = False

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        rows: dict[str, int] = {}
        for run in self.runs:
            rows[run.source] = rows.get(run.source, 0) + run.count
        shapes = {name: (count, *self.shape[1:]) for name, count in rows.items()}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _no_window(_: HFConfig) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """The tables of one family. `#` in a stem stands for the layer's number; the tensors of a tuple of stems are
    stacked by rows into one of ours."""

    model_type: str
    architecture: str
    keys: Mapping[str, str]  # of our model section -> of config.json
    allows: Mapping[str, tuple[Any, ...]]  # values of our keys that it can express, where not any
    stems: Mapping[str, str | tuple[str, ...]]
    head: str  # the output layer's stem, which files of tied models leave out
    prefix: str  # of their names, which some files leave out
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)  # theirs -> model.mlp
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json's keys, as transformers' class has them
    demands: Mapping[str, Any] = field(default_factory=dict)  # config.json's keys and the one value that we have
    by_head: frozenset[str] = frozenset()  # our stems whose rows lie head by head there: query, key, value
    transposed: frozenset[str] = frozenset()  # our stems whose weights are transposed there
    buffers: str = r"(?!)"  # tensors in their files that are not weights
    square: bool = True  # heads x head_dim = hidden, and as many key-value heads as heads
    dropouts: tuple[str, ...] = ()
    read: Callable[[HFConfig], dict[str, Any]] = _nothing  # our keys that need more than a table
    write: Callable[[ModelConfig], dict[str, Any]] = _nothing  # and theirs
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names that its config.json may use
    window: Callable[[HFConfig], int | None] = _no_window  # how far back attention looks at most

    def model_of(self, config: HFConfig, seq: int = 0) -> ModelConfig:
        """Returns the model section of a config.json; `seq` replaces its context length."""
        config = self._completed(config)
        for key, value in self.demands.items():
            if config.get(key, value) != value:
                raise UserError(
                    f"{key}={config[key]} in config.json can't be imported: of {self.model_type} only models with "
                    f"{key}={value} can"
                )
        for key in ("layers", "hidden", "heads", "vocab"):
            if self.keys[key] not in config:
                raise UserError(f"config.json lacks {self.keys[key]}, which every {self.model_type} has: add it")
        theirs = config.get(self.activation_key)
        if self.activations and str(theirs) not in self.activations:
            known = ", ".join(self.activations)
            raise UserError(
                f"{self.activation_key}={theirs} in config.json can't be imported: use a model with {known}"
            )
        found = {key: values[0] for key, values in (UNLESS_ALLOWED | dict(self.allows)).items() if len(values) == 1}
        found |= {ours: config[name] for ours, name in self.keys.items() if name in config}
        if self.activations:
            found["mlp"] = self.activations[str(theirs)]
        found |= self.read(config)
        if seq:
            if found["position"] == "learned" and seq != found["seq"]:
                raise UserError(f"--seq {seq} can't change a table of {found['seq']} learned positions: leave it out")
            found["seq"] = seq
        model = model_section(found)
        window = self.window(config)
        if window is not None and model.seq > window:
            raise UserError(
                f"attention of this model looks back {window} tokens, and over its context of {model.seq} that "
                f"can't be computed here: import it with --seq {window} or less"
            )
        return model

    def _completed(self, config: HFConfig) -> HFConfig:
        """Returns a config.json with one name for each key, the defaults of the keys that it lacks, and no nulls."""
        given = {
            self.aliases.get(key, key): value
            for key, value in config.items()
            if value is not None or key in NONE_IF_NULL
        }
        return {key: value for key, value in {**self.defaults, **given}.items() if value is not None}

    def misfits(self, model: ModelConfig) -> list[str]:
        """Returns what this family can't express of a model, as `key=value` words."""
        found = []
        allows = UNLESS_ALLOWED | dict(self.allows)
        for key, values in allows.items():
            value = getattr(model, key)
            if key == "qkv_bias" and model.bias:
                continue
            if values and value not in values:
                found.append(f"{key}={list(value) if isinstance(value, tuple) else value}")
        if self.activations and model.mlp not in self.activations.values():
            found.append(f"mlp={model.mlp}")
        if self.square and model.kv_heads != model.heads:
            found.append(f"kv_heads={model.kv_heads}")
        if self.square and model.head_dim * model.heads != model.hidden:
            found.append(f"head_dim={model.head_dim}")
        if "ffn" not in self.keys and model.ffn != 4 * model.hidden:
            found.append(f"ffn={model.ffn}")
        return found

    def config_of(self, model: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """Returns a config.json for a model that fits. What `base`, the one that the model may come from, says is kept
        where it still holds."""
        if base is not None and same_function(self._model_or_none(base), model):
            return dict(base)
        names = {ours: theirs for theirs, ours in reversed(list(self.activations.items()))}
        written = {theirs: getattr(model, ours) for ours, theirs in self.keys.items()}
        written |= dict(self.demands) | self.write(model)
        if self.activations:
            written[self.activation_key] = names[model.mlp]
        if base is not None:
            return {key: value for key, value in base.items() if key != "rope_parameters"} | written
        written |= dict.fromkeys(self.dropouts, model.dropout)
        return {"architectures": [self.architecture], "model_type": self.model_type, "use_cache": True, **written}

    def _model_or_none(self, config: HFConfig) -> ModelConfig | None:
        try:
            return self.model_of(config)
        except UserError:
            return None

    def tensors(self, model: ModelConfig) -> dict[str, Mapped]:
        """Returns every global tensor of a model, by our name."""
        found: dict[str, Mapped] = {}
        for record in describe(model).records(ALONE).values():
            found[record.name] = self._mapped(model, record.name, record.shape)
        return found

    def _mapped(self, model: ModelConfig, name: str, shape: tuple[int, ...]) -> Mapped:
        stem, _, kind = name.rpartition(".")
        layer = re.search(r"\.(\d+)\.", f".{stem}.")
        ours = re.sub(r"(?<=layers\.)\d+", "#", stem)
        theirs = self.stems[ours]
        names = theirs if isinstance(theirs, tuple) else (theirs,)
        full = [f"{each.replace('#', layer[1] if layer else '')}.{kind}" for each in names]
        transposed = ours in self.transposed and len(shape) == 2
        if ours in self.by_head:
            return Mapped(shape, tuple(by_head(model, full[0])), transposed)
        runs, start = [], 0
        for source, count in zip(full, part_rows(model, ours, shape[0], len(full)), strict=True):
            runs.append(SourceRows(start, count, source, 0))
            start += count
        return Mapped(shape, tuple(runs), transposed)


def part_rows(model: ModelConfig, stem: str, rows: int, parts: int) -> list[int]:
    """Returns the rows of each of the tensors that are stacked into one of ours."""
    if stem.endswith(".qkv") and parts == 3:
        return [model.heads * model.head_dim, *[model.kv_heads * model.head_dim] * 2]
    return [rows // parts] * parts


def by_head(model: ModelConfig, source: str) -> list[SourceRows]:
    """Maps our rows, which are all queries, all keys and all values, to theirs: query, key and value of head 0, of head
    1, ..."""
    heads, d = model.heads, model.head_dim
    return [
        SourceRows((part * heads + head) * d, d, source, (head * 3 + part) * d)
        for part in range(3)
        for head in range(heads)
    ]


def model_section(values: Mapping[str, Any]) -> ModelConfig:
    """Builds a model section from plain values and checks every key."""
    return config_from({"model": dict(values), "data": {"prefixes": ["none"]}}).model


def same_function(a: ModelConfig | None, b: ModelConfig) -> bool:
    keys = [f.name for f in fields(ModelConfig) if f.name not in TRAINING_KEYS]
    return a is not None and all(getattr(a, key) == getattr(b, key) for key in keys)
