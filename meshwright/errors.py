"""What a user is told: the one exception for a mistake, which the command line prints before it exits with code 2, and
the lines that say what happens."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Something the user can fix; the message is one sentence that says how."""


def notice(text: str) -> None:
    """Says in one line on stderr what happens. A terminal that is gone stops nobody."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `" (did you mean 'x'?)"` for the closest known name, or an empty string."""
    names = list(known)
    # A name that is cut short means more than one that looks alike: h100 is near h100-80g, not v100-32g.
    close = [full for full in names if name and full.startswith(name)]
    close += [full for full in names if len(name) > 3 and name in full]
    # One wrong letter is a large share of a short name, so short names need a lower cutoff.
    close += difflib.get_close_matches(name, names, n=1, cutoff=0.5 if len(name) <= 3 else 0.65)
    return f" (did you mean '{close[0]}'?)" if close else ""


def either(values: Iterable[Any]) -> str:
    """Returns the values as a phrase, e.g. `1, 2 or 4`."""
    words = [str(value) for value in values]
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
