"""Messages for the user: the one exception for a mistake, which the command line prints before it exits with code 2,
and helpers that print notices and put values into words."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

# Characters. Words are shortened only in a sentence that is too long.
LONGEST_SENTENCE = 600
LONGEST_WORD = 100


class UserError(ValueError):
    """A mistake that the user can fix. The message is one sentence that says how. It may quote a value of any length,
    so long messages are shortened here."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Return a text as one printable line of limited length.

    Unprintable characters become escapes. In a text that is too long, first long words and then the middle are
    shortened. The beginning, which names the place, and the end, which names the fix, stay.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) > LONGEST_SENTENCE:
        text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: shorten(word[0], LONGEST_WORD), text)
    return shorten(text, LONGEST_SENTENCE)


def shorten(text: str, most: int) -> str:
    """Return a text, or its beginning and end if it is longer than `most` characters."""
    half = (most - len(" ... ")) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def notice(text: str) -> None:
    """Print one line on stderr. A terminal that is gone is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def begin_line() -> None:
    """End the line that may be open on the terminal.

    A terminal echoes Ctrl-C as ^C, and a killed rank leaves the last line of its display. A live display in this
    process replaces `sys.stderr` and prints messages above itself, so it needs no new line.
    """
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest known name, or an empty string."""
    close = closest(name, known)
    return f" (did you mean '{close}'?)" if close else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is closest, or an empty string."""
    names = list(known)
    # A name that was cut short is a better match than one that looks alike: h100 means h100-80g, not v100-32g.
    close = [full for full in names if name and full.startswith(name)]
    close += [full for full in names if len(name) > 3 and name in full]
    # One wrong letter is a large share of a short name, so short names need a lower cutoff.
    close += difflib.get_close_matches(name, names, n=1, cutoff=0.5 if len(name) <= 3 else 0.65)
    return close[0] if close else ""


def either(values: Iterable[Any]) -> str:
    """Return the values as a phrase, e.g. `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `1,024 ranks`, `2 micro-batches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order. Above 2^40, where the search takes long, return only 1 and
    the number itself."""
    if number > 2**40:
        return [1, number]
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
