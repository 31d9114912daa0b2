"""Hostile values and texts from a seeded generator: the same seed gives the same ones everywhere."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from random import Random
from typing import Any

DEEP = 3000  # levels of nested brackets, beyond Python's limit of recursion


class Raw:
    """JSON text that no Python value represents."""

    def __init__(self, text: str) -> None:
        self.text = text


def scalar(random: Random) -> Any:
    """Return one JSON value that few readers expect."""
    sizes = (0, 1, -1, 2, 3, 7, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), 10**30)
    words = (
        "", " ", "a", "0", "-1", "1e999", "null", "9" * 5000, "a" * 10_000, "b" * 500_000, "\x00", "x\ny", "\x1b[31m",
        "\ud800", "é" * 400, "../x", "/", ".", "a/b", "a b " * 3000, "float32", "{}", "[]", "${HOME}", "%s{0}",
    )  # fmt: skip
    numbers = (0.5, -0.5, 1e-300, 1e300, 1.7e308, math.inf, -math.inf, math.nan)
    raws = ("9" * 5000, "1" + "0" * 400, "-0", "1e400", "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP)
    choices = [None, True, False, random.choice(sizes), random.choice(words), random.choice(numbers)]
    return random.choice([*choices, Raw(random.choice(raws))])


def value(random: Random) -> Any:
    """Return a hostile scalar, or a list or a table of hostile scalars."""
    kind = random.randrange(8)
    if kind < 5:
        return scalar(random)
    if kind == 5:
        return [scalar(random) for _ in range(random.randrange(4))]
    if kind == 6:
        return {str(n): scalar(random) for n in range(random.randrange(3))}
    return random.choice([list(range(5000)), [[]], [{}], {"": {}}, [[1, 2], [3]], {"shape": [1]}])


def places(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths to all values within a value."""
    keys: Iterable[Any] = ()
    if isinstance(found, dict):
        keys = list(found)
    elif isinstance(found, list):
        keys = range(len(found))
    return [path, *(inner for key in keys for inner in places(found[key], (*path, key)))]


def mutated(given: Any, random: Random) -> Any:
    """Return a copy of a JSON value with one or two places changed, removed or added."""
    found = copy.deepcopy(given)
    for _ in range(random.choice((1, 1, 1, 2))):
        paths = [path for path in places(found) if path]
        if not paths:
            return value(random)
        # The depth is drawn first: most paths are deep, and outer places would rarely be chosen.
        depth = random.choice(sorted({len(path) for path in paths}))
        *outer, last = random.choice([path for path in paths if len(path) == depth])
        inside = found
        for key in outer:
            inside = inside[key]
        change = random.randrange(10)
        if change == 0:
            del inside[last]
        elif change == 1 and isinstance(inside, dict):
            inside[random.choice(("", "x", "a" * 10_000, "\ud800", "step"))] = value(random)
        elif change == 2 and isinstance(inside, list):
            inside.insert(0, value(random))
        elif change == 3 and isinstance(inside[last], int):
            inside[last] += random.choice((-1, 1, 2**62, -(2**62)))
        else:
            inside[last] = value(random)
    return found


def json_text(found: Any) -> str:
    """Write JSON in which `Raw` texts appear as they are."""
    pieces: list[str] = []

    def mark(each: Any) -> Any:
        if isinstance(each, Raw):
            pieces.append(each.text)
            return f"<raw {len(pieces) - 1}>"
        if isinstance(each, dict):
            return {key: mark(item) for key, item in each.items()}
        return [mark(item) for item in each] if isinstance(each, list) else each

    text = json.dumps(mark(found))
    for number, piece in enumerate(pieces):
        text = text.replace(f'"<raw {number}>"', piece)
    return text


def broken_text(text: str, random: Random) -> bytes:
    """Return a text that is cut off, or in which some bytes are changed."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if random.random() < 0.4:
        return bytes(data[: random.randrange(len(data) + 1)])
    for _ in range(random.randrange(1, 6)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


def yaml_text(random: Random, base: str) -> str:
    """Return hostile YAML, alone or appended to a good config."""
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    merges = "a: &a {x: 1}\n" + "".join(
        f"{name}: &{name} {{<<: [{','.join(['*' + before] * 9)}]}}\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    deep = random.choice((200, 5000, 50_000))
    texts = [
        laughs, merges, laughs.replace("a:", "model:", 1), "&a [*a]", "model: &m {layers: *m}", "model: &m\n  <<: *m\n",
        "[" * deep, "model: " + "[" * deep + "]" * deep, "- " * deep, "? " * deep, "{" * deep, "a: " * deep,
        "model: !!python/object/apply:os.system [ls]", "model: !!bool maybe", "model: !!int ''", "train: !!int 0x",
        "model: !!timestamp x", "model: !!binary '?'", "model: !!set {a, b}", "model: !!omap [a: 1]", "!!str",
        "model: !<tag:x> 1", "train: {steps: 0x" + "f" * 20_000 + "}", "train: {steps: " + "9" * 20_000 + "}",
        "train: {steps: " + ":".join(["9"] * 5000) + "}", "train: {steps: 1e99999}", "train: {steps: .inf}",
        "train: {clip: .nan}", "train: {steps: 0o777}", "model: {? [1, 2] : 3}", "? {a: b}\n: c", "{[1]: 2}", "1: 2",
        "null: {}", "model: {1: 2}", "model: {null: 2}", "model: {true: 2}", "model: 2001-12-14", "--- a\n--- b\n",
        "%YAML 9.9\n---\na: b", "\x00", "\x07", "\t", "model:\n\tlayers: 4", "a: 'x", '"\\x0"', "a: *b", "*", "&", "!",
        "@", "`", "%", "model: |\n  x", "model: >\n" + "  y\n" * 2000, "# " + "x" * 200_000, "x" * 200_000,
        "a" * 2000 + ": 1", "\ufeffmodel: {}", "model: \ud800".encode("utf-8", "replace").decode(), "y" * 2**21,
    ]  # fmt: skip
    text = random.choice(texts)
    return text if random.random() < 0.5 else base + text + "\n"
