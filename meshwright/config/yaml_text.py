"""Read YAML as people write it, within limits: even for a malicious file, the error is one sentence. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meshwright.disk import refusal
from meshwright.errors import UserError

LARGEST_FILE = 2**20  # bytes
MAX_VALUES = 100_000
# Characters of a number: the largest float of 64 bits has 309 digits.
LONGEST_NUMBER = 400
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Words(yaml.BaseLoader):
    """A YAML loader that reads every value as a word, and that refuses a document with too many values.

    A reference (`*name`) counts as all values that it refers to. References to references could otherwise let a short
    file grow beyond all bounds (the "billion laughs" attack)."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _values_in(node, {}) > MAX_VALUES:
            raise ValueError(f"it stands for more than {MAX_VALUES:,} values")
        return node


class _Loader(_Words, yaml.SafeLoader):
    """A YAML loader for text as people write it. `1e-3` is a number (plain PyYAML reads a string), a date is a word,
    and a key that is given twice is a mistake."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"'{key.value}' was given in line {seen[key.value]} already"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                seen[key.value] = key.start_mark.line + 1
        return node


def _values_in(node: Any, known: dict[int, float]) -> float:
    """Return the number of values in a node, with references followed; infinity if the node contains itself. `known`
    has the numbers of nodes that were counted before."""
    if id(node) not in known:
        # A node that is met again while it is being counted contains itself.
        known[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        # A mapping holds tuples of a key and a value, a sequence holds its items.
        children = [child for item in inner for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_values_in(child, known) for child in children)
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise ValueError(f"a number has {len(node.value):,} digits")
    return known[id(node)]


# PyYAML tells the type of a plain value by patterns, which are listed by first letter. These are without that of dates.
_DATE = "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in known if tag != _DATE]
    for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML's pattern of a float needs a point and a sign of the exponent, so that it reads 1e-3 and 1.0e3 as strings.
_FLOAT = (
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9_]+(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes words which the loader would read as another type, writes texts of several lines as
    blocks, and repeats a value that is used twice instead of referring to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
_Dumper.yaml_implicit_resolvers = {
    letter: [*_Loader.yaml_implicit_resolvers.get(letter, []), *known]
    for letter, known in yaml.SafeDumper.yaml_implicit_resolvers.items()
}


# By a part of the parser's message, the usual fix for the mistake behind it.
HINTS = {
    "'\\t'": "indent with spaces, not with tabs",
    "mapping values are not allowed": (
        "indent this line like those beside it, and write a colon and a space after each key, also in the line above"
    ),
    "<block": "indent this line like the others of its section",
    "could not find expected ':'": "write a colon and a space after each key",
    "expected ','": "close the bracket, or put a comma before this",
}


def _hint(problem: str) -> str:
    return next((f" ({hint})" for words, hint in HINTS.items() if words in problem), "")


def parse_yaml(text: str, where: str, words: bool = False) -> Any:
    """Parse YAML text. Errors name `where` it comes from. With `words`, every value is read as a word, even if it looks
    like a number."""
    try:
        return yaml.load(text, _Words if words else _Loader)  # noqa: S506 (both are safe)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise UserError(f"{where}{line} is not valid YAML: {problem}{_hint(str(problem))}") from None
    except RecursionError:
        raise UserError(f"{where} can't be read: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{where} can't be read: {error}") from None
    except (LookupError, AttributeError, TypeError, OverflowError):
        # PyYAML raises these for a value that contradicts its explicit tag, such as `!!int abc`.
        raise UserError(f"{where} is not valid YAML: a value is not what its tag (!!...) says") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file, and raise UserError if it can't be read."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} has more than {LARGEST_FILE:,} bytes, which no config has: name a YAML file")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refusal(f"{path} can't be read", error, path, "another file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} can't be read as UTF-8 text: {error}") from None
    return parse_yaml(text, str(path))


def dump_yaml(*documents: Mapping[str, Any], width: int = 80) -> str:
    """Return YAML that `parse_yaml` reads back as the same values."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=width)
