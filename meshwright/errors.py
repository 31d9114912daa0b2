"""What a user is told: the one exception for a mistake, which the command line prints before it exits with code 2, and
the lines that say what happens."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

LONGEST_SENTENCE = 600
LONGEST_WORD = 100  # within a sentence that is longer than that


class UserError(ValueError):
    """Something the user can fix; the message is one sentence that says how. It may repeat a value that anybody has
    written, so what is too long of it is left out here."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Returns a text as one line for people: what can't be printed as escapes, its long words and then its middle
    shortened. Its beginning, which names the place, and its end, which names the fix, stay."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) > LONGEST_SENTENCE:
        text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: shortened(word[0], LONGEST_WORD), text)
    return shortened(text, LONGEST_SENTENCE)


def shortened(text: str, most: int) -> str:
    """Returns the beginning and the end of a text that is longer than `most` characters."""
    half = (most - len(" ... ")) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def notice(text: str) -> None:
    """Says in one line on stderr what happens. A terminal that is gone stops nobody."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def begin_line() -> None:
    """Ends a line that is open on a terminal: it echoes Ctrl-C as ^C, and a killed rank leaves the last line of its
    display. A display that is drawn here prints what is told above itself, and needs nothing."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `" (did you mean 'x'?)"` for the closest known name, or an empty string."""
    close = closest(name, known)
    return f" (did you mean '{close}'?)" if close else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Returns the known name that is closest, or an empty string."""
    names = list(known)
    # A name that is cut short means more than one that looks alike: h100 is near h100-80g, not v100-32g.
    close = [full for full in names if name and full.startswith(name)]
    close += [full for full in names if len(name) > 3 and name in full]
    # One wrong letter is a large share of a short name, so short names need a lower cutoff.
    close += difflib.get_close_matches(name, names, n=1, cutoff=0.5 if len(name) <= 3 else 0.65)
    return close[0] if close else ""


def either(values: Iterable[Any]) -> str:
    """Returns the values as a phrase, e.g. `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def plural(number: int, noun: str) -> str:
    """Formats a number with its noun: `1 rank`, `1,024 ranks`, `2 micro-batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def divisors(number: int) -> list[int]:
    """Returns what divides a number, in order. Beyond 2^40, where looking takes long, 1 and the number itself stand for
    all."""
    if number > 2**40:
        return [1, number]
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
