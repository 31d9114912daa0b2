"""Parse numbers as people write them: `100B` tokens, a sequence of `128k`, a share of `2%`. No torch."""

from __future__ import annotations

import argparse
import re

SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
# A context of "128k" tokens is 131,072 in every model card, so lengths count in units of 1,024.
LENGTH_SUFFIXES = {"k": 2**10, "m": 2**20}
# A comma only separates thousands: half the world writes 0,001 for a thousandth, which must not become 1.
_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9][0-9_]*)"
_NUMBER = re.compile(rf"({_WHOLE}(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)([a-z]?)", re.IGNORECASE)


def number_from(text: str, suffixes: dict[str, int] = SUFFIXES) -> float | None:
    """Return the number that a text such as `1.5B`, `300e9` or `1,000` spells, or None if it spells none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    digits = match[1].replace(",", "").replace("_", "")
    suffix = match[2].lower()
    if suffix and suffix not in suffixes:
        return None
    return float(digits) * suffixes[suffix] if suffix else float(digits)


def whole_number_from(text: str, key: str) -> int | None:
    """Return the whole number that a text spells, or None. Keys that end in `seq` are lengths: 8k is 8,192 there."""
    try:
        return int(text)
    except ValueError:
        number = number_from(text, LENGTH_SUFFIXES if key.endswith("seq") else SUFFIXES)
    return int(number) if number is not None and number < 2**63 and number == int(number) else None


def count_argument(text: str) -> int:
    """Parse a command-line option that takes a count, such as `--global-batch 2k`."""
    return _argument(text, "count")


def length_argument(text: str) -> int:
    """Parse a command-line option that takes a sequence length, such as `--seq 128k`."""
    return _argument(text, "seq")


def _argument(text: str, key: str) -> int:
    number = whole_number_from(text, key)
    if number is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number such as 4096 or 8k")
    return number


def share_from(text: str) -> float | None:
    """Return the share that a text such as `2%` spells, between 0 and 1, or None."""
    number = number_from(text.strip()[:-1]) if text.strip().endswith("%") else None
    return number / 100 if number is not None and number <= 100 else None
