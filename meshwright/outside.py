"""Data from outside: reading JSON files that anyone may have written, and checking the types of their values. No
torch."""

from __future__ import annotations

import json
import stat
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import count, repeat
from pathlib import Path
from typing import Any

from meshwright.errors import shorten

# Levels of nested lists and tables. No file of ours or of Hugging Face's comes near this.
DEEPEST = 50
# Bytes. The index of a checkpoint with ten million blocks is smaller.
LARGEST_JSON = 2**32
# Whole numbers stay below this, because sizes of tensors are 64-bit.
LARGEST = 2**63
WORDS = {int: "a whole number of at least 0", float: "a finite number", str: "a text", bool: "true or false"}


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError, with the reason, if it is invalid or nested too deeply.

    A recursive function over a value that is nested too deeply would reach Python's recursion limit.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # Walk level by level, since a recursive check could itself reach the limit.
    level = [value]
    for _ in range(DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raise OSError or ValueError, with the reason, if it can't be read."""
    return parse_json(read_file(path))


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file. Raise OSError or ValueError if it can't be read or is too large.

    Pipes and devices are refused, because a pipe may never be written to and a device may never end.
    """
    status = path.stat()
    # A folder passes, so that `read_bytes` raises the operating system's error for it.
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError("it is a device or a pipe, not a file")
    if status.st_size > LARGEST_JSON:
        raise ValueError(f"it has more than {LARGEST_JSON:,} bytes")
    return path.read_bytes()


def of_kind(value: Any, kind: Any, where: str) -> Any:
    """Return a value from JSON if it is of a kind, or raise ValueError, which names the place.

    A kind is a plain type, `Any`, a TypedDict, or a list, tuple, dict or union of kinds. Whole numbers are counts: at
    least 0 and below 2^63.
    """
    try:
        _check_of(kind)(value)
    except _Wrong as wrong:
        raise ValueError(f"{where}{wrong.place} {wrong.what}") from None
    return value


class _Wrong(Exception):
    """A complaint, and its place within the checked value."""

    def __init__(self, what: str, place: str = "") -> None:
        self.what, self.place = what, place

    def within(self, key: str) -> _Wrong:
        return _Wrong(self.what, key + self.place)


# A check raises `_Wrong` if the value does not fit.
Check = Callable[[Any], None]
# The key or index of an item, its check, and the item itself.
Item = tuple[str | int, Check, Any]
TABLE = "keys and values"


@lru_cache(maxsize=1024)
def _check_of(kind: Any) -> Check:
    """Return the check of a kind. It is cached, because an index may have a row for each of a million blocks."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: None
    if origin in (typing.Union, types.UnionType):
        # Null and strings are recognised by their type. At most one kind stands beside them, and its check complains.
        by_type = tuple(each for each in args if each in (type(None), str))
        inner = _check_of(next((each for each in args if each not in by_type), str))
        return lambda value: None if type(value) in by_type else inner(value)
    if origin is dict:
        inner = _check_of(args[1])
        return _container(_is_dict, TABLE, lambda value: zip(value, repeat(inner), value.values()))
    if origin is list or (origin is tuple and args[-1] is ...):
        inner = _check_of(args[0])
        return _container(_is_list, "a list", lambda value: zip(count(), repeat(inner), value))
    if origin is tuple:
        checks = [_check_of(each) for each in args]
        fits = lambda value: _is_list(value) and len(value) == len(checks)  # noqa: E731
        return _container(fits, f"a list of {len(checks)} values", lambda value: zip(count(), checks, value))
    if typing.is_typeddict(kind):
        fields = {key: _check_of(each) for key, each in typing.get_type_hints(kind).items()}
        return _container(_is_dict, TABLE, partial(_fields, fields, kind.__required_keys__))
    return _check_for(kind)


def _must_be(wanted: str, value: Any) -> _Wrong:
    return _Wrong(f"must be {wanted}, not {shorten(str(value), 60)}")


def _is_dict(value: Any) -> bool:
    return type(value) is dict


def _is_list(value: Any) -> bool:
    return type(value) is list


def _container(fits: Callable[[Any], bool], wanted: str, items: Callable[[Any], Iterable[Item]]) -> Check:
    """Return the check of a list or a table. `items` yields the key or index, the check and the value of each item."""

    def check(value: Any) -> None:
        if not fits(value):
            raise _must_be(wanted, value)
        for key, inner, item in items(value):
            try:
                inner(item)
            except _Wrong as wrong:
                raise wrong.within(f"[{key}]" if isinstance(key, int) else f".{shorten(key, 60)}") from None

    return check


def _fields(fields: Mapping[str, Check], required: frozenset[str], value: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the items of a TypedDict, or raise `_Wrong` if a required key is missing. Unknown keys are ignored."""
    for key, check in fields.items():
        if key in value:
            yield key, check, value[key]
        elif key in required:
            raise _Wrong(f"lacks {key}")


def _check_for(kind: type) -> Check:
    def check(value: Any) -> None:
        fits = type(value) is kind
        if kind is float:
            fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
        elif kind is int:
            fits = fits and 0 <= value < LARGEST
        if not fits:
            raise _must_be(WORDS[kind], value)

    return check
