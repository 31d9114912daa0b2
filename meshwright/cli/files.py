"""Files that a command writes besides its output. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwright.errors import UserError


def write(path: Path | None, make: Callable[[], str]) -> None:
    """Writes a file if a path was given, and says so on stderr."""
    if path is None:
        return
    text = make()
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): name a file in a folder that exists") from error
    print(f"wrote {path}", file=sys.stderr)


def tell_files(files: Iterable[str], column: int = 12) -> None:
    """Says which files were written, with their sizes; names begin at a column, as the lines above have it."""
    for path in files:
        print(f"{'wrote':{column}}{path} ({os.path.getsize(path):,} bytes)")
