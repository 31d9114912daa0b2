"""What comes from outside: JSON that anybody may have written, and the check that it holds what it should. No torch."""

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

from meshwright.errors import shortened

DEEPEST = 50  # lists and tables within one another; no file of ours or of Hugging Face's comes near
LARGEST_JSON = 2**32  # bytes; the index of a checkpoint with ten million blocks is smaller
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
    return parse_json(read_file(path))


def read_file(path: Path) -> bytes:
    """Returns the bytes of a file that must be an ordinary one: a pipe may never be written to, and a device may never
    end. Raises OSError or ValueError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError("it is a device or a pipe, not a file")
    if found.st_size > LARGEST_JSON:
        raise ValueError(f"it has more than {LARGEST_JSON:,} bytes")
    return path.read_bytes()


def of_kind(value: Any, kind: Any, where: str) -> Any:
    """Returns a value from JSON if it is of a kind: a plain type, `Any`, a TypedDict, or a list, tuple, dict or union
    of kinds. Raises ValueError, which names the place, if not. Whole numbers are counts: at least 0 and below 2^63."""
    try:
        _check_of(kind)(value)
    except _Wrong as wrong:
        raise ValueError(f"{where}{wrong.place} {wrong.what}") from None
    return value


class _Wrong(Exception):
    """What is wrong, and at which place within the value that is checked."""

    def __init__(self, what: str, place: str = "") -> None:
        self.what, self.place = what, place

    def within(self, key: str) -> _Wrong:
        return _Wrong(self.what, key + self.place)


Check = Callable[[Any], None]  # raises _Wrong
Item = tuple[str | int, Check, Any]
TABLE = "keys and values"


@lru_cache(maxsize=1024)
def _check_of(kind: Any) -> Check:
    """Returns the check of a kind. It is made once: an index has a row for each of maybe a million blocks."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: None
    if origin in (typing.Union, types.UnionType):
        inner = _check_of(next(each for each in args if each is not type(None)))
        return lambda value: None if value is None else inner(value)
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
    return _plain(kind)


def _must_be(wanted: str, value: Any) -> _Wrong:
    return _Wrong(f"must be {wanted}, not {shortened(str(value), 60)}")


def _is_dict(value: Any) -> bool:
    return type(value) is dict


def _is_list(value: Any) -> bool:
    return type(value) is list


def _container(fits: Callable[[Any], bool], wanted: str, items: Callable[[Any], Iterable[Item]]) -> Check:
    """Return the check of a list or a table. `items` yields the key or the number of each item, its check, and it."""

    def check(value: Any) -> None:
        if not fits(value):
            raise _must_be(wanted, value)
        for key, inner, item in items(value):
            try:
                inner(item)
            except _Wrong as wrong:
                raise wrong.within(f"[{key}]" if isinstance(key, int) else f".{shortened(key, 60)}") from None

    return check


def _fields(fields: Mapping[str, Check], required: frozenset[str], value: Mapping[str, Any]) -> Iterator[Item]:
    """Yield the items of a TypedDict."""
    for key, check in fields.items():
        if key in value:
            yield key, check, value[key]
        elif key in required:
            raise _Wrong(f"lacks {key}")


def _plain(kind: type) -> Check:
    def check(value: Any) -> None:
        fits = type(value) is kind
        if kind is float:
            fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
        elif kind is int:
            fits = fits and 0 <= value < LARGEST
        if not fits:
            raise _must_be(WORDS[kind], value)

    return check
