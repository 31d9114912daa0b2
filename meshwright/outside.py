"""What comes from outside: JSON that anybody may have written, and the check that it holds what it should. No torch."""

from __future__ import annotations

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from meshwright.errors import shortened

DEEPEST = 50  # lists and tables within one another; no file of ours or of Hugging Face's comes near
LARGEST = 2**63  # sizes of tensors are 64-bit
WORDS = {int: "a whole number of at least 0", float: "a finite number", str: "a text", bool: "true or false"}


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError, which says what is wrong, for anything else, and for values
    so deep that a function that follows them would reach Python's limit."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read_json(path: Path) -> Any:
    """Returns what a JSON file holds. Raises OSError or ValueError, which says what is wrong with the file."""
    return parse_json(path.read_bytes())


def of_kind(value: Any, kind: Any, where: str) -> Any:
    """Returns a value from JSON if it is of a kind: a plain type, `Any`, a TypedDict, or a list, tuple, dict or union
    of kinds. Raises ValueError, which names the place, if not. Whole numbers are counts: at least 0 and below 2^63."""
    _check(value, kind, where)
    return value


def _check(value: Any, kind: Any, where: str) -> None:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (value is None and type(None) in args):
        return
    if origin in (typing.Union, types.UnionType):
        _check(value, next(each for each in args if each is not type(None)), where)
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            _check(item, args[1], f"{where}.{shortened(str(key), 60)}")
    elif origin is list and isinstance(value, list):
        for item in value:
            _check(item, args[0], f"an item of {where}")
    elif origin is tuple and args[-1] is ... and isinstance(value, list):
        _check(value, list[args[0]], where)  # type: ignore[valid-type]
    elif origin is tuple and isinstance(value, list) and len(value) == len(args):
        for item, each in zip(value, args, strict=True):
            _check(item, each, where)
    elif typing.is_typeddict(kind) and isinstance(value, dict):
        for key, each in typing.get_type_hints(kind).items():
            if key in value:
                _check(value[key], each, f"{where}.{key}")
            elif key in kind.__required_keys__:
                raise ValueError(f"{where} lacks {key}")
    elif not _is_plain(value, kind):
        wanted = WORDS.get(kind, "keys and values" if origin is dict or typing.is_typeddict(kind) else "a list")
        raise ValueError(f"{where} must be {wanted}, not {shortened(str(value), 60)}")


def _is_plain(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind and (kind is not int or 0 <= value < LARGEST)

