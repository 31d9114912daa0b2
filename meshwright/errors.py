"""The one exception for a user's mistake: the command line prints its sentence and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can fix; the message is one sentence that says how."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""
