"""Random order of tests, for `pytest --shuffle SEED`.

Files are shuffled, and the tests within each file. No seeds of random numbers are touched: a test draws the same
numbers in every order.
"""

from __future__ import annotations

import random

import pytest


def seed_of(text: str) -> int:
    """Return the number given, or one drawn now for `random`."""
    if text == "random":
        return random.SystemRandom().randrange(1, 1_000_000)
    if not text.isdecimal():
        raise pytest.UsageError(f"--shuffle {text}: give a number, or the word random")
    return int(text)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Reorder the items in place. Every worker of a run computes the same order from the seed."""
    dice = random.Random(seed)
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    files = list(by_file.values())
    dice.shuffle(files)
    for file in files:
        dice.shuffle(file)
    items[:] = [item for file in files for item in file]
