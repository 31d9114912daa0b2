"""What an adapter to a Hugging Face family is: the tables of families.yaml, read in both directions. No torch.

A family says which of our model keys stand under which of its config's, which values of the others it can express, and
under which names its files hold our tensors. Rows of our tensors are rows of theirs, in runs; `Mapped` lists the runs,
so that import and export copy any part of any tensor without holding a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from meshwright.config.load import config_from
from meshwright.config.sections import TRAINING_KEYS, ModelConfig
from meshwright.errors import UserError
from meshwright.models.description import describe
from meshwright.models.hf.rotary import PART, read_length, read_rotary, write_rotary
from meshwright.parts.part import ALONE

HFConfig = dict[str, Any]

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


@dataclass(frozen=True)
class Family:
    """One entry of families.yaml, which says what each field means."""

    model_type: str
    architecture: str
    keys: Mapping[str, Sequence[str]]
    allows: Mapping[str, Sequence[Any]]
    names: Mapping[str, Sequence[str]]
    prefix: str
    differing: Mapping[str, str] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    demands: Mapping[str, Any] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    window: str = ""
    window_switch: str = ""
    dropouts: Sequence[str] = ()
    by_head: Sequence[str] = ()
    transposed: Sequence[str] = ()
    buffers: str = r"(?!)"  # matches nothing

    @property
    def head(self) -> str:
        """The output layer's weight, which files of tied models leave out."""
        return f"{self.names['head'][0]}.weight"

    def model_of(self, config: HFConfig, seq: int = 0) -> ModelConfig:
        """Returns the model section of a config.json; `seq` replaces its context length."""
        config = self._completed(config)
        self._check(config)
        found = {key: values[0] for key, values in self.allows.items() if len(values) == 1}
        found |= {ours: config[name] for ours, names in self.keys.items() for name in names if name in config}
        if self.activations:
            found["mlp"] = self.activations[str(config.get(self.activation_key))]
        if "rope_theta" in self.keys:
            fraction = self.keys.get("rotary_fraction", (None,))[0]
            found |= read_rotary(config, self.keys["rope_theta"][0], fraction)
        if seq:
            if found["position"] == "learned" and seq != found["seq"]:
                raise UserError(f"--seq {seq} can't change a table of {found['seq']} learned positions: leave it out")
            found["seq"] = seq
        model = model_section(found)
        looks_back = self.window and (not self.window_switch or config.get(self.window_switch))
        window = read_length(config, self.window) if looks_back else None
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

    def _check(self, config: HFConfig) -> None:
        """Raises for what a completed config.json lacks, or has and we have not."""
        for key, value in self.demands.items():
            if config.get(key, value) != value:
                raise UserError(
                    f"{key}={config[key]} in config.json can't be imported: of {self.model_type} only models with "
                    f"{key}={value} can"
                )
        for key in ("layers", "hidden", "heads", "vocab"):
            if self.keys[key][0] not in config:
                raise UserError(f"config.json lacks {self.keys[key][0]}, which every {self.model_type} has: add it")
        theirs = config.get(self.activation_key)
        if self.activations and str(theirs) not in self.activations:
            known = ", ".join(self.activations)
            raise UserError(
                f"{self.activation_key}={theirs} in config.json can't be imported: use a model with {known}"
            )
        for ours, (first, *others) in self.keys.items():
            for other in others:
                if config.get(other, config.get(first)) != config.get(first):
                    raise UserError(
                        f"{other}={config[other]} differs from {first}={config.get(first)} in config.json: "
                        f"{self.differing[ours]} can't be imported"
                    )

    def misfits(self, model: ModelConfig) -> list[str]:
        """Returns what this family can't express of a model, as `key=value` words."""
        found = []
        for key, values in self.allows.items():
            value = getattr(model, key)
            plain = list(value) if isinstance(value, tuple) else value
            if values and plain not in values and not (key == "qkv_bias" and model.bias):
                found.append(f"{key}={plain}")
        if self.activations and model.mlp not in self.activations.values():
            found.append(f"mlp={model.mlp}")
        usual = {"kv_heads": model.heads, "head_dim": model.hidden / model.heads, "ffn": 4 * model.hidden}
        unusual = {key: getattr(model, key) for key, value in usual.items() if getattr(model, key) != value}
        return found + [f"{key}={value}" for key, value in unusual.items() if key not in self.keys]

    def config_of(self, model: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """Returns a config.json for a model that fits. What `base`, the one that the model may come from, says is kept
        where it still holds."""
        if base is not None:
            with suppress(UserError):
                if same_function(self.model_of(base), model):
                    return dict(base)
        written = {name: getattr(model, ours) for ours, names in self.keys.items() for name in names}
        written |= dict(self.demands) | dict(self.writes)
        if "rope_theta" in self.keys:
            written |= write_rotary(model)
        if "rotary_fraction" in self.keys:
            written[PART] = model.rotary_fraction
        if self.activations:
            written[self.activation_key] = next(word for word, ours in self.activations.items() if ours == model.mlp)
        if base is not None:
            return {key: value for key, value in base.items() if key != "rope_parameters"} | written
        written |= dict.fromkeys(self.dropouts, model.dropout)
        return {"architectures": [self.architecture], "model_type": self.model_type, "use_cache": True, **written}

    def tensors(self, model: ModelConfig) -> dict[str, Mapped]:
        """Returns every global tensor of a model, by our name."""
        records = describe(model).records(ALONE).values()
        return {record.name: self.mapped(model, record.name, record.shape) for record in records}

    def mapped(self, model: ModelConfig, name: str, shape: tuple[int, ...]) -> Mapped:
        """Returns where the rows of one of our tensors are in theirs."""
        stem, _, kind = name.rpartition(".")
        index = r"(?<=\.)\d+\b"
        ours, numbers = re.sub(index, "#", stem), re.findall(index, stem)
        sources = [each.replace("#", "{}").format(*numbers) + f".{kind}" for each in self.names[ours]]
        transposed = ours in self.transposed and len(shape) == 2
        if ours in self.by_head:
            return Mapped(shape, tuple(by_head(model, sources[0])), transposed)
        counts = [shape[0] // len(sources)] * len(sources)
        if ours.endswith(".qkv") and len(sources) == 3:
            counts = [heads * model.head_dim for heads in (model.heads, model.kv_heads, model.kv_heads)]
        starts = accumulate(counts, initial=0)
        runs = [SourceRows(*each, 0) for each in zip(starts, counts, sources, strict=False)]
        return Mapped(shape, tuple(runs), transposed)


def family_from(model_type: str, entry: Mapping[str, Any]) -> Family:
    """Builds a family from its entry in families.yaml, where a name may stand for a list of one."""
    tables = {
        table: {ours: [theirs] if isinstance(theirs, str) else theirs for ours, theirs in entry[table].items()}
        for table in ("keys", "names")
    }
    return Family(model_type, **{**entry, **tables})


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


def same_function(a: ModelConfig, b: ModelConfig) -> bool:
    keys = [f.name for f in fields(ModelConfig) if f.name not in TRAINING_KEYS]
    return all(getattr(a, key) == getattr(b, key) for key in keys)
