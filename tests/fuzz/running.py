"""Runs a command in this process as the installed command would run, and judges how it ended."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence

from meshwright.cli.main import main
from meshwright.errors import LONGEST_SENTENCE

SAYS = "meshwright: "
MOST_LINES = 3  # a note about the start of the work may precede the sentence


class TooLong(BaseException):
    """The time limit was reached. This is not an Exception, so that no handler of the command catches it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict(words: Sequence[str], seconds: float = 30.0, err: io.StringIO | None = None) -> str:
    """Run a command and return a complaint about the way it ended, or an empty string.

    The command must succeed, or end with exit code 2 and one short sentence, within the time. Its error output is
    written to `err`.
    """
    out, err = io.StringIO(), io.StringIO() if err is None else err
    try:
        with time_limit(seconds), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
    except TooLong:
        where = [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in traceback.extract_tb(sys.exc_info()[2])]
        return f"took more than {seconds:g} s: " + " < ".join(reversed(where[-4:]))
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} in {frame.name} ({frame.filename}:{frame.lineno})"
    lines = err.getvalue().splitlines()
    if "Traceback" in err.getvalue():
        return f"a traceback: {lines[-1][:200]}"
    if code == 0:
        return ""
    if code != 2:
        return f"exit code {code}: {err.getvalue()[-300:]}"
    if not lines or not lines[-1].startswith(SAYS) or len(lines) > MOST_LINES:
        return f"no sentence: {err.getvalue()[:300]!r}"
    if max(map(len, lines)) > LONGEST_SENTENCE + len(SAYS):
        return f"a sentence of {max(map(len, lines))} characters: {lines[-1][:200]}"
    return ""
