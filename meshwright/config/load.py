"""Build a config from a YAML file and `a.b=c` words, and turn it back into plain values. The error for a mistake names
the key and a fix."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.config.data import OBJECTIVES
from meshwright.config.numbers import number_from, whole_number_from
from meshwright.config.presets import KIND_DEFAULTS, PRESETS
from meshwright.config.recipes import SECTION, read_recipe, recipe_names
from meshwright.config.sections import Config
from meshwright.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from meshwright.errors import UserError, closest, nearest
from meshwright.outside import LARGEST
from meshwright.plugins import load_plugins

# Names of keys in other frameworks, for suggestions.
OTHER_NAMES = {"learning_rate": "lr", "batch_size": "global_batch", "max_steps": "steps"}
# A placeholder on the command line for the keys of the layout that the planner chooses.
AUTO_LAYOUT = "layout=auto"
# typing compiles every annotation anew on each call, which takes 1.4 ms for a whole config.
hints_of: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def without_auto(words: Sequence[str]) -> list[str]:
    """Return the words without `layout=auto`."""
    return [word for word in words if word != AUTO_LAYOUT]


# A config as a program may give it: the path of a YAML file, the name of a recipe, nested mappings, or a whole config.
GivenConfig = str | Path | Mapping[str, Any] | Config


def load_config(
    given: GivenConfig | None, overrides: Sequence[str] = (), sections: Mapping[str, type] | None = None
) -> Config:
    """Return a config with `a.b=c` words applied on top of it. `sections` adds dataclasses of the user's program.

    >>> import meshwright
    >>> meshwright.load_config("gpt2-124m", ["train.steps=10"]).train.steps
    10
    """
    raw = read_sections(given) if given is not None else {}
    for word in overrides:
        set_key(raw, word, sections)
    return config_from(raw, sections)


def read_sections(given: GivenConfig) -> dict[str, Any]:
    """Return the sections of a config, without checking their keys."""
    if isinstance(given, Config):
        return to_mapping(given)
    if isinstance(given, Mapping):
        return {name: copy.deepcopy(section) for name, section in given.items()}
    return _read_file(given)


def _read_file(path: str | Path) -> dict[str, Any]:
    """Read the sections of a config file or of the recipe of that name."""
    file = Path(path)
    if str(path) in recipe_names() and not file.is_file():
        # Recipes are cached, and callers change the sections that they get.
        return copy.deepcopy(dict(read_recipe(str(path)).sections))
    if not file.is_file():
        neighbours = [str(other) for other in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
        close = nearest(str(file), [*neighbours, *recipe_names()])
        raise UserError(f"there is no config file '{path}'{close}: give the path of a YAML file or a recipe's name")
    read = read_yaml(file)
    if read is not None and not isinstance(read, dict):
        raise UserError(f"{path} must hold sections such as 'model:' and 'train:', not a {type(read).__name__}")
    return {name: section for name, section in (read or {}).items() if name != SECTION}


def set_key(raw: dict[str, Any], word: str, sections: Mapping[str, type] | None = None) -> None:
    """Put one `section.key=value` word into nested mappings. If the key takes a word, its value is not parsed, so that
    for example a folder's name may look like a number."""
    key, equals, value = word.partition("=")
    *path, last = key.split(".")
    if not equals or not path or not all(path) or not last:
        close = _full_key(last) if equals and not path else ""
        raise UserError(f"'{word}' is not of the form section.key=value{close}, e.g. train.steps=100")
    section = raw
    kinds = hints_of(Config) | dict(sections or {})
    for depth, name in enumerate(path, 1):
        if section.get(name) is None:
            section[name] = {}
        elif isinstance(section[name], str) and hasattr(kind := _kind_of(path[:depth], kinds), "from_word"):
            # The file has one word in place of the section, as in `comm.algorithm: ring`. To change one of its keys,
            # the section must be written out.
            section[name] = dataclasses.asdict(kind.from_word(section[name]))
        section = section[name]
        if not isinstance(section, dict):
            raise UserError(f"'{name}' in the config file is not a section, so '{word}' can't be set in it")
    kind = _kind_of([*path, last], kinds)
    section[last] = parse_yaml(value, f"'{word}'", words=kind is str or typing.get_args(kind)[:1] == (str,))


def _kind_of(path: Sequence[str], kinds: Mapping[str, Any]) -> Any:
    """Return the annotation of a key, or None if there is no such key. `kinds` has the annotations by name."""
    kind = kinds.get(path[0])
    if len(path) == 1:
        return kind
    if not dataclasses.is_dataclass(kind):
        return None
    return _kind_of(path[1:], {key_of(f): hints_of(kind)[f.name] for f in dataclasses.fields(kind)})


def config_keys(kind: Any = Config, before: str = "") -> Iterator[str]:
    """Yield every key of a config as it is written on a command line, such as `train.steps=`."""
    for field in dataclasses.fields(kind):
        name = f"{before}{key_of(field)}"
        hint = hints_of(kind)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from config_keys(hint, f"{name}.")
        elif before:
            yield f"{name}="


def _full_key(name: str) -> str:
    """Return a hint that suggests the full key for a key that was given without its section, or an empty string."""
    full_keys: dict[str, str] = {}
    # Of keys with the same last word, the one with the fewest sections is suggested.
    for key in sorted((key.rstrip("=") for key in config_keys()), key=lambda key: key.count(".")):
        full_keys.setdefault(key.split(".")[-1], key)
    plain = name.lower().replace("-", "_")
    suggestion = full_keys.get(OTHER_NAMES.get(plain) or closest(plain, full_keys) or "")
    return f" (did you mean {suggestion}?)" if suggestion else ""


def config_from(raw: Mapping[str, Any], sections: Mapping[str, type] | None = None) -> Config:
    """Build a config from nested mappings and check every key. Plugins are loaded first, because values may name kinds
    that a plugin registers."""
    load_plugins(_plugins_of(raw))
    own = dict(sections or {})
    fields = {f.name for f in dataclasses.fields(Config) if f.name != "extra"}
    known = fields | set(own)
    for name, value in raw.items():
        if name not in known:
            close = nearest(str(name), known) or _full_key(str(name)).replace("?)", "? indent it below its section)")
            raise UserError(f"unknown section '{name}'{close}: the sections are {_list(known)}")
        if value is not None and not isinstance(value, Mapping):
            hint = ": put a space after each colon" if isinstance(value, str) and ":" in value else ""
            raise UserError(f"section '{name}' must hold keys and values, not '{value}'{hint}")
    given = {name: dict(raw.get(name) or {}) for name in known}
    given["model"] = with_preset(with_folder(given["model"], given.get("data", {})))
    built = {name: _section(hints_of(Config)[name], name, given[name]) for name in sorted(fields)}
    built["extra"] = {name: _section(cls, name, given[name]) for name, cls in own.items()}
    return Config(**built)


def _plugins_of(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules of `run.plugins`, before the sections are checked."""
    run = raw.get("run")
    named = run.get("plugins") if isinstance(run, Mapping) else None
    return _value(tuple[str, ...], "run.plugins", named)  # type: ignore[no-any-return]


def with_folder(model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section, with missing keys filled in from the Hugging Face folder that `hf` names.

    Samples of conversations get the length that fits them, not the longest that the model takes, which few devices
    hold. The config of a run or a checkpoint has all keys, so the folder is not read for it. It may be gone by then."""
    folder = model.get("hf")
    if not folder or "layers" in model:
        return dict(model)
    if not isinstance(folder, str):
        raise UserError(f"model.hf={folder} must be a word, the path of a folder: put it in quotes")
    # Imported by its name, because this module belongs to a layer above the config.
    sections = importlib.import_module("meshwright.models.wrapped.sections")
    made = sections.section_of(folder, model)
    prefixes = _value(tuple[str, ...], "data.prefixes", data.get("prefixes"))
    objective = OBJECTIVES.get(str(data.get("objective")))
    is_packed = objective is not None and objective.packed and bool(prefixes)
    # A table of learned positions has the length that it has.
    if is_packed and "seq" in made and made["position"] != "learned":
        # Imported here because it needs numpy, which most commands about a config do without.
        from meshwright.data.packed import sample_length

        made |= {"seq": sample_length(prefixes, made["seq"])}
    return merge_sections(made, model)


def with_preset(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section, with missing keys filled in from its preset, and then from the defaults of its kind."""
    name = model.get("preset") or ""
    if name:
        if not isinstance(name, str) or name not in PRESETS:
            raise UserError(
                f"unknown model.preset '{name}'{nearest(str(name), PRESETS)}: the presets are {_list(PRESETS)}"
            )
        model = merge_sections(PRESETS[name], model)
    return merge_sections(KIND_DEFAULTS.get(str(model.get("kind")), {}), model)


def _section(cls: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Build a section's dataclass from its keys, and refuse unknown and missing ones."""
    hints = hints_of(cls)
    fields = {key_of(f): f for f in dataclasses.fields(cls)}
    for key in given:
        if key not in fields:
            close = closest(str(key), fields)
            hint = f" (did you mean '{name}.{close}'?)" if close else ""
            raise UserError(f"unknown key '{name}.{key}'{hint}: {name} has {_list(fields)}")
    missing = [
        key for key, f in fields.items()
        if key not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        keys = " and ".join(f"{name}.{key}" for key in missing)
        hint = " (or model.preset=NAME, or model.hf=DIR for a Hugging Face folder)" if name == "model" else ""
        raise UserError(f"{keys} must be given in the config file or as {name}.{missing[0]}=...{hint}")
    # A key may differ from the name of its field (see `key_of`).
    named = {fields[key].name: (key, value) for key, value in given.items()}
    return cls(**{field: _value(hints[field], f"{name}.{key}", value) for field, (key, value) in named.items()})


def key_of(field: dataclasses.Field[Any]) -> str:
    """Return a field's key in a config file: its name, unless the key is a word that Python reserves (`async`)."""
    return str(field.metadata.get("key", field.name))


def _value(hint: Any, key: str, value: Any) -> Any:
    """Return `value` as the annotated type, or raise UserError. `key` is the name of the key for errors."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        if str in args and isinstance(value, str):
            return value
        return _value(next(a for a in args if a is not type(None)), key, value)
    if origin is typing.Literal:
        # YAML reads `true` as a bool and a missing value as None.
        value = "" if value is None else value
        if isinstance(value, bool):
            value = str(value).lower()
        if str(value) in args:
            return str(value)
        raise UserError(f"{key}={value} is not one of {', '.join(args)}{nearest(str(value), args)}")
    if origin is tuple:
        if value is None:
            return ()
        if isinstance(value, str) and args[0] is not str:
            value = [parse_yaml(part, key) for part in value.split(",")]
        items = value if isinstance(value, (list, tuple)) else [value]
        if args[0] in (int, float) and any(isinstance(item, str) for item in items):
            kind = "whole numbers" if args[0] is int else "numbers"
            given = ",".join(map(str, items))
            raise UserError(f"{key}={given} must be {kind} with commas between them, e.g. {key}=[2,1]")
        return tuple(_value(args[0], key, item) for item in items)
    if hint in (int, float) and isinstance(value, str):
        value = _number(hint, key, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value} must be a finite number")
    if hint is bool and isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and abs(value) >= LARGEST:
        raise UserError(f"{key} must be below 2^63")
    if hint is int and isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value):
        return int(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    # A `key=` without a word is read as None.
    if hint is str and (value is None or isinstance(value, str)):
        return value or ""
    if hint is str and isinstance(value, (bool, int, float)):
        raise UserError(f"{key} must be a word, and YAML reads a number or a yes or no there: put it in quotes")
    if dataclasses.is_dataclass(hint):
        if isinstance(value, (list, tuple)) and hasattr(hint, "from_list"):
            return hint.from_list([_value(float, key, item) for item in value])
        if hasattr(hint, "from_word") and not isinstance(value, Mapping):
            return hint.from_word(str(value))
        if not isinstance(value, Mapping):
            raise UserError(f"{key} must hold keys and values, not '{value}'")
        return _section(hint, key, value)
    if hint in (bool, int, float, str):
        wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[hint]
        if value is None:
            raise UserError(f"{key} is empty: give {wanted}, or leave the key out")
        raise UserError(f"{key}={value} must be {wanted}")
    return value


def _number(hint: Any, key: str, text: str) -> int | float | str:
    """Return the number that a text spells (10k, 1.5B), or the text if it spells none."""
    number = whole_number_from(text, key) if hint is int else number_from(text)
    return text if number is None else number


def to_plain(value: Any) -> Any:
    """Return a section, or a value of one, as mappings, lists and scalars that JSON and YAML can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key_of(f): to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def to_mapping(config: Config) -> dict[str, Any]:
    """Return a config as nested plain values. `config_from` turns them back into the same config."""
    out = {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config) if f.name != "extra"}
    out |= {name: to_plain(section) for name, section in config.extra.items()}
    return out


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections as one mapping whose keys have dots, as in {"train.steps": 100}."""
    values: dict[str, Any] = {}
    for key, value in sections.items():
        if isinstance(value, Mapping):
            values |= {f"{key}.{name}": inner for name, inner in flat(value).items()}
        else:
            values[key] = value
    return values


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping whose keys have dots as nested sections. This is the inverse of `flat`."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        section = sections
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return sections


def merge_sections(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by the given keys. Sections that both have are merged, not replaced."""
    result = {**base, **given}
    for key in base.keys() & given.keys():
        if isinstance(base[key], Mapping) and isinstance(given[key], Mapping):
            result[key] = merge_sections(base[key], given[key])
    return result


def to_yaml(config: Config) -> str:
    """Return a config as YAML, with all keys."""
    return dump_yaml(to_mapping(config))


def _list(names: Any) -> str:
    return ", ".join(sorted(names))
