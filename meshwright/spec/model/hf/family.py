"""Families of Hugging Face models: the tables of families.yaml, used for both import and export. No torch.

"Ours" are keys of Meshwright's model section and its tensors; "theirs" are keys of config.json and tensors of Hugging
Face files. A family maps our keys to theirs, lists the values of our other keys that it can express, and maps the names
of our tensors to theirs. Rows of our tensors are rows of theirs, in runs. `TensorMapping` (rows.py) lists the runs, so
that import and export can copy any part of a tensor without holding the whole tensor. Keys of a section within the
model section are written with a dot: `experts.count`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.config.load import config_from, flat, nest
from meshwright.config.sections import TRAINING_KEYS, ModelConfig
from meshwright.errors import UserError
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.model.description import describe
from meshwright.spec.model.hf.rotary import PART, read_length, read_rotary, write_rotary
from meshwright.spec.model.hf.rows import SourceRows, TensorMapping, by_head, heads_in_pairs, in_order, in_pairs
from meshwright.spec.model.hf.window import TYPES, read_window, write_window
from meshwright.spec.model.part import SINGLE_RANK

HFConfig = dict[str, Any]

INDEX = r"(?<=\.)\d+\b"  # matches the number of a layer in the name of a tensor

# Keys of config.json whose null means "none". A null under any other key is treated as a missing key.
NONE_IF_NULL = ("num_key_value_heads", "sliding_window", "q_lora_rank")


@dataclass(frozen=True)
class Family:
    """One entry of families.yaml. The comment at the top of that file explains each field."""

    model_type: str
    architecture: str
    keys: Mapping[str, Sequence[str]]
    allows: Mapping[str, Sequence[Any]]
    names: Mapping[str, Sequence[str]]
    prefix: str
    architectures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    differing: Mapping[str, str] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    demands: Mapping[str, Any] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    window: str = ""
    window_switch: str = ""
    window_layers: bool = False
    dense_layers: str = ""
    extra_layers: str = ""
    decoder_layers: str = ""
    needs: Sequence[str] = ()
    dropouts: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    by_head: Sequence[str] = ()
    in_pairs: Sequence[str] = ()
    transposed: Sequence[str] = ()
    buffers: str = r"(?!)"  # matches nothing

    @property
    def head(self) -> str:
        """Their name of the output layer's weight, which files of tied models leave out."""
        return f"{self.names['head'][0]}.weight"

    def model_of(self, config: HFConfig, seq: int = 0) -> ModelConfig:
        """Return the model section of a config.json. `seq`, if not 0, replaces its context length."""
        config = self._with_defaults(config)
        self._check(config)
        values = {key: allowed[0] for key, allowed in self.allows.items() if len(allowed) == 1}
        values |= {ours: config[name] for ours, names in self.keys.items() for name in names if name in config}
        values |= self.architectures.get(self._architecture(config), {})
        if self.activations:
            values["mlp"] = self.activations[str(config.get(self.activation_key))]
        if self.dense_layers:
            values["experts.first_dense"] = first_dense(config, self.dense_layers, values)
        if self.decoder_layers:
            encoder = read_length(config, self.keys["layers"][0]) or 0
            values["t5.encoder_layers"] = encoder
            values["layers"] = encoder + (read_length(config, self.decoder_layers) or encoder)
        if "rope_theta" in self.keys:
            fraction = self.keys.get("rotary_fraction", (None,))[0]
            values |= read_rotary(config, self.keys["rope_theta"][0], fraction)
        if self.window:
            values |= read_window(config, self.window, self.window_switch, self.window_layers, values["layers"])
        if seq:
            if values["position"] == "learned" and seq != values["seq"]:
                raise UserError(f"--seq {seq} can't change a table of {values['seq']} learned positions: leave it out")
            values["seq"] = seq
        model = model_section(nest(values))
        if misfits := self.misfits(model):
            words = " and ".join(f"model.{each}" for each in misfits)
            raise UserError(f"config.json asks for {words}, which no {self.model_type} has here: import another model")
        return model

    def _with_defaults(self, config: HFConfig) -> HFConfig:
        """Return a config.json with aliases replaced, defaults for missing keys, and without nulls."""
        given = {
            self.aliases.get(key, key): value
            for key, value in config.items()
            if value is not None or key in NONE_IF_NULL
        }
        return {key: value for key, value in {**self.defaults, **given}.items() if value is not None}

    def _architecture(self, config: HFConfig) -> str:
        """Return the class that a config.json names. Raise if the family has several and this is none of them."""
        named = config.get("architectures") or [self.architecture]
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise UserError(f"architectures={named!r} in config.json must be a list of names: correct it")
        if self.architectures and named[0] not in self.architectures:
            raise UserError(
                f"architectures={named} in config.json can't be imported: of {self.model_type} only "
                f"{' and '.join(self.architectures)} can"
            )
        return str(named[0])

    def _check(self, config: HFConfig) -> None:
        """Raise if a completed config.json lacks a key that we need, or asks for something that we can't do."""
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
        """Return the settings of a model that this family can't express, as `key=value` words."""
        misfits = []
        for key, values in self.allows.items():
            value = value_of(model, key)
            plain = list(value) if isinstance(value, tuple) else value
            if values and plain not in values and not (key == "qkv_bias" and model.bias):
                misfits.append(f"{key}={plain}")
        if self.activations and model.mlp not in self.activations.values():
            misfits.append(f"mlp={model.mlp}")
        misfits += [f"{key}={value_of(model, key)}" for key in self.needs if not value_of(model, key)]
        usual = {"kv_heads": model.heads, "head_dim": model.hidden / model.heads, "ffn": 4 * model.hidden}
        if model.latent.kv_rank:
            del usual["head_dim"]
        unusual = {key: getattr(model, key) for key, value in usual.items() if getattr(model, key) != value}
        return misfits + [f"{key}={value}" for key, value in unusual.items() if key not in self.keys]

    def config_of(self, model: ModelConfig, base: HFConfig | None = None) -> HFConfig:
        """Return a config.json for a model that fits this family.

        `base` is the config.json that the model was imported from, if any. Its keys are kept if they still hold.
        """
        # A model that computes the same as at import keeps its config.json unchanged.
        if base is not None:
            with suppress(UserError):
                if same_function(self.model_of(base), model):
                    return dict(base)
        values = {ours: value_of(model, ours) for ours in self.keys}
        # Our keys that have a third value, auto, are strings.
        switches = {"true": True, "false": False}
        written = {name: switches.get(str(values[ours]), values[ours]) for ours in values for name in self.keys[ours]}
        if self.decoder_layers:
            written[self.keys["layers"][0]] = model.t5.encoder_layers
            written[self.decoder_layers] = model.layers - model.t5.encoder_layers
        written |= {name: None for name in NONE_IF_NULL if written.get(name) == 0}
        if self.window:
            written |= write_window(model, self.window, self.window_switch, self.window_layers)
        if self.dense_layers:
            written[self.dense_layers] = list(range(model.experts.first_dense))
        written |= dict(self.demands) | dict(self.writes)
        if "rope_theta" in self.keys:
            written |= write_rotary(model)
        if "rotary_fraction" in self.keys:
            written[PART] = model.rotary_fraction
        if self.activations:
            written[self.activation_key] = next(word for word, ours in self.activations.items() if ours == model.mlp)
        if base is not None:
            replaced = {"rope_parameters", TYPES, *self.aliases}
            return {key: value for key, value in base.items() if key not in replaced} | written
        written |= {name: value_of(model, ours) for name, ours in self.dropouts.items()}
        known = self.architectures.items()
        fitting = [name for name, keys in known if all(value_of(model, key) == value for key, value in keys.items())]
        name = (*fitting, self.architecture)[0]
        return {"architectures": [name], "model_type": self.model_type, "use_cache": True, **written}

    def tensors(self, model: ModelConfig) -> dict[str, TensorMapping]:
        """Return every global tensor of a model, by our name."""
        return {record.name: self.map_tensor(model, record) for record in describe(model).records(SINGLE_RANK).values()}

    def map_tensor(self, model: ModelConfig, record: ParamRecord) -> TensorMapping:
        """Return the position of the rows of one of our tensors in their tensors."""
        numbers = re.findall(INDEX, record.name)
        full = re.sub(INDEX, "#", record.name)
        shape = record.shape
        ours, _, kind = full.rpartition(".")
        # An exact name with its last word takes precedence over a module's name.
        theirs = self.names[full] if full in self.names else [f"{name}.{kind}" for name in self.names[ours]]
        stacked = theirs[0].count("#") > len(numbers)
        runs: list[SourceRows] = []
        for expert in range(shape[0] if stacked else 1):
            sources = [name.replace("#", "{}").format(*numbers, expert) for name in theirs]
            runs += self._runs(model, ours, sources, shape[1] if stacked else shape[0], expert)
        transposed = ours in self.transposed and len(shape) == 2
        return TensorMapping(shape, tuple(runs), transposed, stacked, record.wide)

    def stacked_parameter(self, ours: str) -> str:
        """Return the name of the parameter in transformers' model that holds one of our tensors of all experts, or an
        empty string if there is none."""
        numbers = re.findall(INDEX, ours)
        return self.stacked.get(re.sub(INDEX, "#", ours), "").replace("#", "{}").format(*numbers)

    def _runs(self, model: ModelConfig, ours: str, sources: Sequence[str], rows: int, expert: int) -> list[SourceRows]:
        """Return the runs of one matrix. A stacked tensor has one matrix per expert."""
        if ours in self.by_head:
            return by_head(model, sources[0])
        if ours in self.in_pairs and ours.endswith(".qkv"):
            return heads_in_pairs(model, sources)
        # Latent attention's kv_a is treated as one head, since all heads share its rotated rows.
        if ours in self.in_pairs:
            head = rows if ours.endswith(".kv_a") else model.head_dim
            return in_pairs(rows, head, model.latent.rope_dim, sources[0])
        counts = [rows // len(sources)] * len(sources)
        if ours.endswith(".qkv") and len(sources) == 3:
            counts = [heads * model.head_dim for heads in (model.heads, model.kv_heads, model.kv_heads)]
        return in_order(counts, sources, expert * rows)

    def is_extra(self, name: str, config: HFConfig) -> bool:
        """Return whether a tensor in their files belongs to an extra layer after the last one, for multi-token
        prediction."""
        if not self.extra_layers:
            return False
        config = self._with_defaults(config)
        match = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        first = config[self.keys["layers"][0]]
        count = config.get(self.extra_layers)
        return match is not None and isinstance(count, int) and 0 <= int(match.group(1)) - first < count


def family_from(model_type: str, entry: Mapping[str, Any]) -> Family:
    """Build a family from its entry in families.yaml, where a single name means a list of one name."""
    tables = {
        table: {ours: [theirs] if isinstance(theirs, str) else theirs for ours, theirs in entry[table].items()}
        for table in ("keys", "names")
    }
    return Family(model_type, **{**entry, **tables})


def value_of(model: ModelConfig, key: str) -> Any:
    """Return the value of a key of the model section. The key may have dots."""
    value: Any = model
    for word in key.split("."):
        value = getattr(value, word)
    return value


def first_dense(config: HFConfig, key: str, values: Mapping[str, Any]) -> int:
    """Return the number of leading blocks without experts, from their list of blocks without experts."""
    listed = config.get(key) or []
    layers, every = values["layers"], values["experts.every"]
    # Building the model section reports these mistakes.
    if not isinstance(layers, int) or not isinstance(every, int) or every < 1:
        return 0
    if not isinstance(listed, list) or not all(isinstance(n, int) for n in listed):
        raise UserError(f"{key}={listed!r} in config.json must be a list of layers' numbers: correct it")
    mixed = [layer for layer in range(layers) if (layer + 1) % every == 0]
    dense = [layer for layer in mixed if layer in listed]
    if dense != mixed[: len(dense)]:
        raise UserError(
            f"{key}={listed} in config.json can't be imported: only the first blocks can be without experts, and "
            f"block {dense[-1]} comes after one that has them"
        )
    return dense[-1] + 1 if dense else 0


def model_section(values: Mapping[str, Any]) -> ModelConfig:
    """Build a model section from plain values. Every key is checked as in a config file."""
    return config_from({"model": dict(values), "data": {"prefixes": ["none"]}}).model


def same_function(a: ModelConfig, b: ModelConfig) -> bool:
    """Return whether two model sections compute the same function."""
    return function_keys(a) == function_keys(b)


def function_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a model section that determine the function that it computes."""
    return {key: value for key, value in flat(asdict(model)).items() if key not in TRAINING_KEYS}
